"""Models with converted layers, and ordinary models that compute what those must."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import Factors
from heads_kernels.convert.install import install, read_heads
from heads_kernels.heads import ProjectedLayer, Projection, projected_layers
from heads_kernels.heads.layouts import LAYOUTS
from heads_kernels.heads.saving import record_in_config
from tests.support.nn_layers import E, H, spread
from tests.support.tiny_models import TINY, WITH_HEADS, as_linear, build, with_gradients

_CONVERTED = {
    name: layout
    for name in WITH_HEADS
    if (layout := LAYOUTS.get(TINY[name].attention)) is not None and not layout.between
}
#: Families of transformers whose scores are products of the weights.
CONVERTIBLE = [name for name, layout in _CONVERTED.items() if not layout.rotary]
#: Families whose queries and keys are rotated by halves.
ROTARY = [name for name, layout in _CONVERTED.items() if layout.rotary]
#: BEiT has no rotary positions; it is of a form that conversion is not tested with.
TURNED = [name for name in WITH_HEADS if name not in (*_CONVERTED, "beit")]


def torch_encoder(layers: int = 2, **options: Any) -> Any:
    made = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, **options)
    model = spread(nn.TransformerEncoder(made, layers, enable_nested_tensor=False))
    return hk.nn.replace_attention_(model)


def in_use(name: str, **changes: Any) -> Any:
    return hk.integrations.transformers.use(build(name, **changes))


def convert(model: nn.Module, dim: int | None = None, method: str = "ragged") -> Any:
    """All layers with `dim` features of their heads, or with all."""
    for layer in projected_layers(model):
        heads = read_heads(layer)
        put(
            model,
            layer,
            heads.fit(dim or heads.sizes.D_k, method=method),
            ragged=method == "ragged",
        )
    record_in_config(model)
    return model


@torch.inference_mode(False)
@torch.no_grad()
def put(model: nn.Module, layer: ProjectedLayer, factors: Any, *, ragged: bool = False) -> None:
    install(model, layer, factors, ragged=ragged)


def random_factors(layer: ProjectedLayer, dim: int) -> Factors:
    """Any factors of the layer's sizes."""
    generator = torch.Generator().manual_seed(layer.index)

    def normal(rows: int, columns: int) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return 0.4 * drawn

    widths = layer.query.inputs, layer.key.inputs
    assert layer.scale is not None
    return Factors(
        normal(dim, widths[0]),
        normal(dim, widths[1]),
        normal(layer.num_heads, dim),
        layer.scale,
        0.0,
        normal(layer.num_heads, widths[1]),
    )


def mixed(name: str, dim: int = 12, *, ragged: bool = False, **changes: Any) -> Any:
    """A model whose layers have random factors."""
    model = in_use(name, **changes)
    for layer in projected_layers(model):
        put(model, layer, random_factors(layer, dim), ragged=ragged)
    record_in_config(model)
    return model


@torch.no_grad()
def write(layer: ProjectedLayer, factors: Factors) -> None:
    """Give an ordinary layer, whose heads are wider than `factors`, heads of its own with the same scores.

    `q_h = (mixing_h * query x, 1, 0)` and `k_h = (key y, content_h y, 0)`.
    """
    for head, (mixing, content) in enumerate(zip(factors.mixing, factors.content, strict=True)):
        query = mixing[:, None] * factors.query
        bias = torch.zeros(layer.head_dim, dtype=torch.float64)
        bias[len(query)] = 1.0
        _write_head(layer.query, head, query, bias)
        key = torch.cat([factors.key, content[None]])
        _write_head(layer.key, head, key, torch.zeros_like(bias))


def _write_head(projection: Projection, head: int, rows: Tensor, bias: Tensor) -> None:
    linear = projection.linear
    own = projection.features([head])
    weight = as_linear(linear, linear.weight)
    weight[own] = 0.0
    weight[own[: len(rows)]] = rows.to(weight.dtype)
    if linear.bias is not None:
        linear.bias[own] = bias.to(weight.dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Outputs and gradients that a layer has whatever its queries and keys are."""
    found = with_gradients(model)
    layers = projected_layers(model)
    own = {
        id(parameter)
        for layer in layers
        for projection in (layer.query, layer.key)
        for parameter in projection.linear.parameters()
    }
    names = {name for name, parameter in model.named_parameters() if id(parameter) in own}
    same = {n: g for n, g in found.items() if n not in names and "mixing" not in n}
    for layer in layers:
        linear, H = layer.value.linear, layer.value.heads
        parts = [n for n in same if n.startswith(f"{layer.name}.c_attn.")]  # fused, and its value
        for name in parts:
            del same[name]
        rows = layer.value.features(range(H))
        same[f"{layer.name}: value"] = as_linear(linear, linear.weight.grad)[rows]
    return same
