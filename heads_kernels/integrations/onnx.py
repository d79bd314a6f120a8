"""The operators in ONNX: as the standard operators of their formula."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.export import ExportedProgram

from heads_kernels.checks import refuse
from heads_kernels.ops import eager
from heads_kernels.ops.attention_statistics import SIGNATURE as STATISTICS
from heads_kernels.ops.attention_statistics import eager as statistics
from heads_kernels.ops.attention_statistics import statistics_op
from heads_kernels.ops.collaborative_attention import OPERATOR as COLLABORATIVE
from heads_kernels.ops.entmax_attention import OPERATOR as ENTMAX
from heads_kernels.ops.gated_attention import OPERATOR as GATED
from heads_kernels.ops.operator import Operator


def export(
    program: ExportedProgram, path: str | os.PathLike[str] | None = None, **options: Any
) -> torch.onnx.ONNXProgram:
    """`torch.onnx.export` of a program that calls the operators of this package.

    ONNX has no gated or collaborative attention, so their calls become the formula in standard operators, with the
    `[T, S]` matrix of each head: closed heads are computed too. Prune them first. `hk.attention_statistics` is exported
    likewise; `hk.entmax_attention` cannot be.

        program = torch.export.export(model, inputs, dynamic_shapes=...)
        hk.integrations.onnx.export(program, "model.onnx")

    Args:
        program: of `torch.export.export`, in evaluation: dropout draws nothing in ONNX.
        path: of the file to write, or None.
        **options: of `torch.onnx.export`.

    Returns:
        The `ONNXProgram`.

    Raises:
        ValueError: an operator of the program has dropout, or is `hk.entmax_attention`.
    """
    made = torch.onnx.export(program.run_decompositions(decompositions()), (), path, **options)
    assert made is not None  # the exporter of torch.export returns a program
    return made


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The operators as their formulas, and what masks compute that ONNX lacks; for `run_decompositions`."""
    operators = {operator.forward_op: _formula(operator) for operator in (GATED, COLLABORATIVE)}
    return {
        **operators,
        statistics_op: _statistics,
        ENTMAX.forward_op: _refuse_entmax,
        torch.ops.aten.searchsorted.Tensor: _count_before,
    }


def _formula(operator: Operator) -> Callable[..., tuple[Tensor, ...]]:
    def attend(*arguments: Any) -> tuple[Tensor, ...]:
        *packed, save, _ = arguments
        call = operator.unpack(packed)
        if call.seed is not None:
            raise ValueError(f"{operator.name} has dropout; export the model in evaluation mode.")
        results = eager.attend(call)
        out, attended = (each.to(call.query.dtype) for each in results[:2])
        none = out.new_empty(0)
        return (
            out,
            attended if save and call.gate is not None else none,
            results.lse if save else none,
        )

    return attend


def _statistics(*arguments: Any) -> tuple[Tensor, ...]:
    *packed, excluded, _ = arguments
    return tuple(statistics.of_call(STATISTICS.unpack(packed), excluded))


def _refuse_entmax(*arguments: Any) -> NoReturn:
    was = "calls entmax_attention, and ONNX has no loop that finds its thresholds"
    refuse("program", was, "use gated_attention, or run the program of torch.export")


def _count_before(
    ascending: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    **options: Any,
) -> Tensor:
    """`torch.searchsorted` by comparing all pairs: the mask of packed documents."""
    if any(option is not None for option in options.values()):
        raise ValueError(f"searchsorted has {', '.join(options)}, which ONNX cannot express here.")
    pairs = ascending[..., None, :], values[..., :, None]
    before = torch.le(*pairs) if right else torch.lt(*pairs)
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)
