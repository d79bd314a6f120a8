"""Collaborative attention on the `cpu` backend: launchers of `csrc/cpu/collaborative_attention.h`."""

from __future__ import annotations

from torch import Tensor

from heads_kernels.mask import Intervals
from heads_kernels.ops import native
from heads_kernels.ops.collaborative_attention.op import allocate, allocate_gradients


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    content_bias: Tensor | None,
    gate: Tensor | None,
    intervals: Intervals,
    seed: Tensor | None,
    scale: float,
    gate_activation: str,
    dropout_p: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, and `attended` and `lse` where `save` asks for them (see `allocate`)."""
    outputs = allocate(query, value, gate, save)
    native.attention_forward(
        (query, key, mixing, content_bias, scale),
        value,
        intervals,
        (gate, gate_activation, seed, dropout_p),
        outputs,
    )
    return outputs


def backward(
    dout: Tensor,
    attended: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    content_bias: Tensor | None,
    gate: Tensor | None,
    intervals: Intervals,
    seed: Tensor | None,
    scale: float,
    gate_activation: str,
    dropout_p: float,
    closed_grad: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`dquery`, `dkey`, `dvalue`, the rows of `dmixing`, `dcontent_bias` and the rows of the gate's gradient."""
    gradients = allocate_gradients(query, key, value, content_bias, gate, needs)
    native.attention_backward(
        (query, key, mixing, content_bias, scale),
        value,
        intervals,
        (gate, gate_activation, seed, dropout_p),
        closed_grad,
        (dout, attended, lse),
        gradients,
    )
    return gradients
