"""A layer with fewer heads: smaller projections, and head counts in step with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads_kernels.heads.dense import dense_parts, is_lora
from heads_kernels.heads.layers import AttentionLayer, is_transposed
from heads_kernels.nn.shared import FusedProjection


def shrink(layer: AttentionLayer, heads: Sequence[int], key_heads: Sequence[int]) -> None:
    """Keep these heads and key heads of a layer, in this order; key heads may repeat.

    The module then has `kept_heads`, an int64 buffer with the numbers that its heads had before it was ever shrunk, and
    `heads_before`, how many there were.
    """
    if layer.layout.shared:
        projections = [(layer.value, heads)]
    else:
        projections = [(layer.query, heads), (layer.key, key_heads), (layer.value, key_heads)]
    rows: dict[nn.Module, list[Tensor]] = {}  # a fused projection has several
    for projection, chosen in [*projections, *((beside, heads) for beside in layer.beside)]:
        rows.setdefault(projection.linear, []).append(projection.features(chosen))
    for linear, parts in rows.items():
        select(linear, torch.cat(parts), 1)
    select(layer.output.linear, layer.output.features(heads), 0)
    if not heads:
        _run_without_inputs(layer)
    module = layer.module
    kept = torch.tensor(heads, dtype=torch.int64)
    for name in layer.layout.rows:
        replace(module, name, getattr(module, name)[kept])
    if layer.gate is not None:
        layer.gate.keep(heads)
    if not hasattr(module, "kept_heads"):
        module.heads_before = layer.num_heads
    numbers = getattr(module, "kept_heads", torch.arange(layer.num_heads)).to(kept.device)[kept]
    device = layer.output.linear.weight.device
    module.register_buffer("kept_heads", numbers.to(device), persistent=False)
    count_heads(layer, len(heads), len(heads if layer.layout.shared else key_heads))


def replace(module: Any, name: str, value: Tensor) -> None:
    """A new parameter in the place of the old one, which asks for a gradient where that did."""
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad))


def select(linear: Any, features: Tensor, of: int) -> None:
    """Keep these input features (`of` = 0) or output features (1) of a projection, and of its adapters."""
    for part, ends in dense_parts(linear):
        if of in ends:
            _select(part, features, of)
    if is_lora(linear):
        setattr(linear, ("in_features", "out_features")[of], len(features))


def _select(linear: Any, features: Tensor, of: int) -> None:
    axis = of if is_transposed(linear) else 1 - of
    replace(linear, "weight", linear.weight.index_select(axis, features))
    if of and linear.bias is not None:
        replace(linear, "bias", linear.bias[features])
    count = ("nx", "nf") if is_transposed(linear) else ("in_features", "out_features")
    setattr(linear, count[of], len(features))


def _run_without_inputs(layer: AttentionLayer) -> None:
    """Put an `nn.Linear` in the place of an output projection that is a `Conv1D`, which needs input features to run."""
    linear = layer.output.linear
    if is_lora(linear) and is_transposed(linear.base_layer):
        linear.base_layer = _as_linear(linear.base_layer)
        linear.fan_in_fan_out = False
    elif is_transposed(linear):
        setattr(layer.module, layer.layout.output, _as_linear(linear))


def _as_linear(linear: Any) -> nn.Linear:
    """The same projection as an `nn.Linear`."""
    made = nn.Linear(1, linear.nf, device="meta")
    made.in_features = linear.nx
    made.weight = nn.Parameter(linear.weight.detach().T, linear.weight.requires_grad)
    made.bias = linear.bias
    return made


def count_heads(layer: AttentionLayer, H: int, Hk: int) -> None:
    """Bring the module's own head counts and sizes in step; Hk are the heads of the values."""
    module = layer.module
    query = [] if layer.query.linear is not layer.key.linear else [H * layer.head_dim]
    sizes = [*query, Hk * layer.head_dim, Hk * layer.value_dim]
    fused = (part.sizes for part in module.children() if isinstance(part, FusedProjection))
    counts = {
        "num_attention_heads": H,
        "num_heads": H,
        "n_heads": H,
        "num_key_heads": Hk,
        "num_key_value_heads": Hk,
        "num_key_value_groups": H // Hk if Hk else 1,
        "all_head_size": H * layer.value_dim,
        "inner_dim": H * layer.value_dim,
        "split_size": next(fused, sizes),
    }
    for name, count in counts.items():
        if hasattr(module, name) and name not in layer.layout.keeps_count:
            setattr(module, name, count)
