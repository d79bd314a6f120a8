"""The torch ops of gated attention: forward and backward, their fakes, FLOPs and autograd.

A backend module has `forward(call, save)` and `backward(call, dout, attended, lse, closed_grad, needs)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads_kernels.flops import backward_flops, forward_flops
from heads_kernels.mask import Intervals
from heads_kernels.ops import gate as gates
from heads_kernels.ops.arguments import check_operands
from heads_kernels.ops.autograd import first_order_only, is_recorded
from heads_kernels.ops.gated_attention import BACKENDS
from heads_kernels.ops.layout import compute_dtype, empty_gradient, empty_heads
from heads_kernels.ops.library import define_op, load
from heads_kernels.problem import Problem

_CALL = """
    Tensor query, Tensor key, Tensor value, Tensor? gate,
    Tensor? k_lo, Tensor? k_hi, Tensor? key_visible, Tensor? dense_mask, SymInt band_lo, SymInt band_hi,
    Tensor? seed, float scale, str gate_activation, float dropout_p
"""


class Call(NamedTuple):
    """What a backend is asked to compute: the arguments of the op, the mask parts as one `Intervals`."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None
    intervals: Intervals
    seed: Tensor | None
    scale: float
    gate_activation: str
    dropout_p: float


def allocate(
    query: Tensor, value: Tensor, gate: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`out` as the query lies in memory; for the backward `attended` (out before the gate) and `lse`, else empty."""
    B, H, T, Dv = *query.shape[:3], value.shape[3]
    out = empty_heads(query, B, H, T, Dv)
    attended = empty_heads(query, B, H, T, Dv) if save and gate is not None else query.new_empty(0)
    lse = query.new_empty((B, H, T) if save else 0, dtype=compute_dtype(query.dtype))
    return out, attended, lse


def allocate_gradients(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`dquery`, `dkey`, `dvalue` and the rows of `gate_gradient`; empty where `needs` says no."""
    B, H, T, Dv = *query.shape[:3], value.shape[3]
    return (
        empty_gradient(query, needs[0]),
        empty_gradient(key, needs[1]),
        empty_gradient(value, needs[2]),
        gates.empty_rows(gate, needs[3], query, B, H, T, Dv),
    )


def _check(backend: str | None, call: Call, **saved: Tensor) -> None:
    """Refuse tensors that do not fit each other; `saved` are `dout`, `attended` and `lse` of a backward pass."""
    check_operands(
        backend,
        {"query": call.query, "key": call.key, "value": call.value},
        call.intervals,
        gate=call.gate,
        gate_activation=call.gate_activation,
        seed=call.seed,
        saved=saved,
    )


def _call_of(query: Any, key: Any, value: Any, gate: Any, *rest: Any) -> Call:
    """The call of an op by its arguments, from `query` to `dropout_p`."""
    k_lo, k_hi, key_visible, dense_mask, band_lo, band_hi, *options = rest
    intervals = Intervals(band_lo, band_hi, k_lo, k_hi, key_visible, dense_mask)
    return Call(query, key, value, gate, intervals, *options)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None,
    k_lo: Tensor | None, k_hi: Tensor | None, key_visible: Tensor | None, dense_mask: Tensor | None,
    band_lo: int, band_hi: int,
    seed: Tensor | None, scale: float, gate_activation: str, dropout_p: float, save: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    intervals = Intervals(band_lo, band_hi, k_lo, k_hi, key_visible, dense_mask)
    call = Call(query, key, value, gate, intervals, seed, scale, gate_activation, dropout_p)
    _check(backend, call)
    result: tuple[Tensor, Tensor, Tensor] = load(BACKENDS, backend).forward(call, save)
    return result


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *options, save, _ = rest
    _check(None, _call_of(query, key, value, gate, *options))
    return allocate(query, value, gate, save)


def _forward_flops(query: Any, key: Any, value: Any, *call: Any, **kwargs: Any) -> int:
    B, H, T, D = query
    return forward_flops(B * H * T * key[2], D, value[3])


forward_op = define_op(
    "gated_attention",
    f"({_CALL}, bool save, str backend) -> (Tensor out, Tensor attended, Tensor lse)",
    _forward,
    _forward_fake,
    _forward_flops,
)


def _backward(
    dout: Tensor, attended: Tensor, lse: Tensor,
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None,
    k_lo: Tensor | None, k_hi: Tensor | None, key_visible: Tensor | None, dense_mask: Tensor | None,
    band_lo: int, band_hi: int,
    seed: Tensor | None, scale: float, gate_activation: str, dropout_p: float,
    closed_grad: bool, needs: list[bool], backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    intervals = Intervals(band_lo, band_hi, k_lo, k_hi, key_visible, dense_mask)
    call = Call(query, key, value, gate, intervals, seed, scale, gate_activation, dropout_p)
    _check(backend, call, dout=dout, attended=attended, lse=lse)
    result: tuple[Tensor, Tensor, Tensor, Tensor] = load(BACKENDS, backend).backward(
        call, dout, attended, lse, closed_grad, needs
    )
    return result


def _backward_fake(
    dout: Tensor,
    attended: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, _, needs, _ = rest
    call = _call_of(query, key, value, gate, *options)
    _check(None, call, dout=dout, attended=attended, lse=lse)
    return allocate_gradients(query, key, value, gate, needs)


def _backward_flops(
    dout: Any, attended: Any, lse: Any, query: Any, key: Any, value: Any, *call: Any, **kwargs: Any
) -> int:
    B, H, T, D = query
    return backward_flops(B * H * T * key[2], D, value[3])


backward_op = define_op(
    "gated_attention_backward",
    f"(Tensor dout, Tensor attended, Tensor lse, {_CALL}, bool closed_grad, bool[4] needs, str backend)"
    " -> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dgate_rows)",
    _backward,
    _backward_fake,
    _backward_flops,
)


class _GatedAttention(torch.autograd.Function):
    """Gradients of query, key, value and gate; `rest` are the other arguments of the op, in its order."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None,
        rest: tuple[Any, ...], closed_grad: bool, backend: str,
    ) -> Tensor:  # fmt: skip
        inputs = query, key, value, gate
        out, attended, lse = forward_op(*inputs, *rest, True, backend)
        saved = out if gate is None else attended, lse
        ctx.save_for_backward(*saved, *inputs, *rest[:4], rest[6])
        ctx.constants = rest[4:6], rest[7:], closed_grad, backend
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        attended, lse, *tensors, seed = ctx.saved_tensors
        band, (scale, gate_activation, dropout_p), closed_grad, backend = ctx.constants
        gate = tensors[3]
        needs = list(ctx.needs_input_grad[:4])
        dquery, dkey, dvalue, rows = backward_op(
            dout,
            attended,
            lse,
            *tensors,
            *band,
            seed,
            scale,
            gate_activation,
            dropout_p,
            closed_grad,
            needs,
            backend,
        )
        grads = (
            dquery if needs[0] else None,
            dkey if needs[1] else None,
            dvalue if needs[2] else None,
            gates.gate_gradient(rows, gate, gate_activation, closed_grad) if needs[3] else None,
        )
        inputs = dout, *tensors[:4]
        return *first_order_only("gated_attention", grads, inputs), None, None, None


def gated_attention(problem: Problem, backend: str, seed: Tensor | None) -> Tensor:
    """Run a valid problem on `backend`; gradients are recorded where an input asks for one."""
    p, mask = problem, problem.intervals
    inputs = p.query, p.key, p.value, p.gate
    rest = (
        mask.k_lo, mask.k_hi, mask.key_visible, mask.dense, mask.band_lo, mask.band_hi,
        seed, p.scale, p.gate_activation, p.dropout_p,
    )  # fmt: skip
    if is_recorded("gated_attention", inputs):
        return _GatedAttention.apply(*inputs, rest, p.closed_grad, backend)  # type: ignore[no-any-return, no-untyped-call]
    return forward_op(*inputs, *rest, False, backend)[0]  # type: ignore[no-any-return]
