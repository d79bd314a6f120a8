"""The operators in ONNX: as the standard operators of their formula."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from heads_kernels.call import Call
from heads_kernels.checks import refuse
from heads_kernels.ops import eager
from heads_kernels.ops.attention import attention_op
from heads_kernels.ops.statistics import statistics_op


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

    Raises:
        ValueError: an operator of the program has dropout, or is `hk.entmax_attention`.
    """
    made = torch.onnx.export(program.run_decompositions(decompositions()), (), path, **options)
    assert made is not None  # the exporter of torch.export returns a program
    return made


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The operators as their formulas, and what masks compute that ONNX lacks; for `run_decompositions`."""
    return {
        attention_op: _attend,
        statistics_op: lambda *arguments: tuple(eager.row_statistics(Call(*arguments[:-1]))),
        torch.ops.aten.searchsorted.Tensor: _count_before,
    }


def _attend(*arguments: Any) -> tuple[Tensor, ...]:
    *fields, save, _ = arguments
    call = Call(*fields)
    if call.seed is not None:
        raise ValueError(f"{call.operator} has dropout; export the model in evaluation mode.")
    if call.alpha is not None:
        was = "calls entmax_attention, and ONNX has no loop that finds its thresholds"
        refuse("program", was, "use gated_attention, or run the program of torch.export")
    results = eager.attend(call)
    out, attended = (each.to(call.query.dtype) for each in results[:2])
    none = out.new_empty(0)
    kept = attended if save and call.gate is not None else none
    return out, kept, results.lse if save else none


def _count_before(
    ascending: Tensor, values: Tensor, *, out_int32: bool = False, right: bool = False, **options: Any
) -> Tensor:
    """`torch.searchsorted` by comparing all pairs: the mask of packed documents."""
    if any(option is not None for option in options.values()):
        raise ValueError(f"searchsorted has {', '.join(options)}, which ONNX cannot express here.")
    pairs = ascending[..., None, :], values[..., :, None]
    before = torch.le(*pairs) if right else torch.lt(*pairs)
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)
