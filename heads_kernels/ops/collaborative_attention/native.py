"""Collaborative attention on the `cpu` backend: launchers of `csrc/cpu/collaborative_attention.h`."""

from __future__ import annotations

from torch import Tensor

from heads_kernels.ops import native
from heads_kernels.ops.arguments import Options, Scores
from heads_kernels.ops.collaborative_attention.op import Call, allocate, allocate_gradients


def forward(call: Call, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, and `attended` and `lse` where `save` asks for them (see `allocate`)."""
    outputs = allocate(call.query, call.value, call.gate, save)
    native.attention_forward(_scores(call), call.value, call.intervals, _options(call), outputs)
    return outputs


def backward(
    call: Call, dout: Tensor, attended: Tensor, lse: Tensor, closed_grad: bool, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`dquery`, `dkey`, `dvalue`, the rows of `dmixing`, `dcontent_bias` and the rows of the gate's gradient."""
    gradients = allocate_gradients(
        call.query, call.key, call.value, call.content_bias, call.gate, needs
    )
    saved = dout, attended, lse
    native.attention_backward(
        _scores(call), call.value, call.intervals, _options(call), closed_grad, saved, gradients
    )
    return gradients


def _scores(call: Call) -> Scores:
    return call.query, call.key, call.mixing, call.content_bias, call.scale


def _options(call: Call) -> Options:
    return call.gate, call.gate_activation, call.seed, call.dropout_p
