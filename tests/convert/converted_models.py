"""Models with converted layers."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import heads_kernels as hk
from heads_kernels.convert import Factors
from heads_kernels.convert.collaborate import install, read_heads
from heads_kernels.heads import projected_layers
from heads_kernels.heads.layouts import LAYOUTS
from heads_kernels.heads.saving import record_in_config
from tests.support.nn_layers import torch_encoder
from tests.support.tiny_models import TINY, WITH_HEADS, build

_CONVERTED = {
    name: layout
    for name in WITH_HEADS
    if (layout := LAYOUTS.get(TINY[name].attention)) is not None and not layout.between
}
#: Families of transformers whose scores are products of the weights.
CONVERTIBLE = [name for name, layout in _CONVERTED.items() if not layout.rotary]
#: Families whose queries and keys are rotated by halves.
ROTARY = [name for name, layout in _CONVERTED.items() if layout.rotary]
#: These have no rotary positions; they are of a form that conversion is not tested with.
_OTHERS = ("beit", "layoutlmv3", "swin")
TURNED = [name for name in WITH_HEADS if name not in (*_CONVERTED, *_OTHERS)]


def encoder(*sizes: int) -> Any:
    """`torch_encoder` on the modules of the package."""
    return hk.nn.replace_attention_(torch_encoder(*sizes))


def in_use(name: str, **changes: Any) -> Any:
    return hk.integrations.transformers.use(build(name, **changes))


@torch.inference_mode(False)
@torch.no_grad()
def convert(model: nn.Module, dim: int | None = None, method: str = "ragged") -> Any:
    """All layers with `dim` features of their heads, or with all; of "dense" factors all heads use all features."""
    for layer in projected_layers(model):
        heads = read_heads(layer)
        factors = heads.fit(dim or heads.sizes.D_k, method="cp" if method == "cp" else "ragged")
        if method == "dense" and isinstance(factors, Factors):
            factors = dense(factors)
        install(model, layer, factors, ragged=method == "ragged")
    record_in_config(model)
    return model


def changed(model: Any, change: str, heads: dict[int, Any], method: str = "ragged") -> Any:
    """A model whose layers are "converted", or have lost heads ("pruned"), or "both"."""
    if change in ("both", "converted"):
        convert(model, 12, method)
    if change in ("both", "pruned"):
        hk.heads.prune(model, heads)
    return model


def dense(factors: Factors) -> Factors:
    """The same scores by two copies of the features: what a head has too much of one, it takes back by the other."""
    generator = torch.Generator().manual_seed(0)
    much = 0.4 * torch.randn(factors.mixing.shape, generator=generator, dtype=torch.float64)
    mixing = torch.cat((factors.mixing + much, -much), 1)
    query, key = (each.repeat(2, 1) for each in (factors.query, factors.key))
    return replace(factors, query=query, key=key, mixing=mixing)
