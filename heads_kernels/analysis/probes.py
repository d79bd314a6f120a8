"""Factors of 1 on the heads of a model, whose derivatives measure the effect of each head and row on a loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from heads_kernels.analysis.observe import observe
from heads_kernels.heads.layers import AttentionLayer
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.nn.gates import FixedGate, HeadGate


class Probe:
    """The runs of a layer in one pass: a factor of 1 for every head and row, and which rows are real."""

    def __init__(self) -> None:
        self.ones: list[Tensor] = []  # [B, H, T] each
        self.real: list[Tensor] = []  # [B, T] each

    def multiply(self, gate: nn.Module, sizes: tuple[int, int], gates: Tensor) -> Tensor:
        """A forward hook of the layer's gate: what that gives times the factor, `[B, H, T]`."""
        gates = gates[None] if gates.dim() == 1 else gates
        gates = gates[..., None] if gates.dim() == 2 else gates
        (B, T), H = sizes, gates.shape[1]
        ones = torch.ones(B, H, T, dtype=gates.dtype, device=gates.device, requires_grad=True)
        self.ones.append(ones)
        return ones * gates


@contextmanager
def probed(model: nn.Module, layers: Iterable[int | str]) -> Iterator[dict[int, Probe]]:
    """In this block each of these layers that has heads has a probe, `{index: probe}`, beside the gate that it has.

    The operator's backward gives the derivatives of all of them at once, without a map `[T, S]`.
    """
    probes: dict[int, Probe] = {}

    def look(layer: AttentionLayer, call: AttentionCall) -> None:
        probes[layer.index].real.append(call.real_queries)

    with observe(model, look, layers) as chosen, ExitStack() as stack:
        for layer in chosen:
            if layer.num_heads:
                probe = probes[layer.index] = Probe()
                gate = FixedGate(open_gates(layer)) if layer.gate is None else layer.gate
                stack.enter_context(gated(layer, gate))
                stack.callback(gate.register_forward_hook(probe.multiply).remove)
        yield probes


@contextmanager
def without(layer: AttentionLayer, head: int) -> Iterator[None]:
    """In this block the head is closed, in addition to the gate of the layer."""
    gate = FixedGate(open_gates(layer)) if layer.gate is None else layer.gate
    closed = torch.tensor([head], device=layer.weight.device)

    def close(gate: nn.Module, sizes: tuple[int, int], gates: Tensor) -> Tensor:
        return gates.index_fill(min(1, gates.dim() - 1), closed, 0)

    handle = gate.register_forward_hook(close)
    try:
        with gated(layer, gate):
            yield
    finally:
        handle.remove()


@contextmanager
def gated(layer: AttentionLayer, gate: HeadGate) -> Iterator[None]:
    """In this block the layer has this gate."""
    before = layer.gate
    layer.module.head_gate = gate
    try:
        yield
    finally:
        layer.module.head_gate = before


def open_gates(layer: AttentionLayer) -> Tensor:
    """A copy of the gates of a layer at inference, `[H]`; ones without a gate."""
    if layer.gate is not None:
        return layer.gate.export()
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    return torch.ones(layer.num_heads, dtype=dtype, device=layer.weight.device)
