"""The layers of a model: chosen for conversion, their heads read, and factors put in."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.rotary import AnyFactors, AnyHeads, RotaryFactors, RotaryHeads
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.heads.projected import has_products, with_projections
from heads_kernels.heads.reshape import check_can_share, check_has_products, share
from heads_kernels.heads.weights import ProjectedLayer, Projection
from heads_kernels.nn import GatedMultiheadAttention


def prepare(model: nn.Module, layers: Iterable[int | str] | None) -> list[ProjectedLayer]:
    """The layers to convert, in the given order; all that have heads for None, none that cannot be converted.

    transformers models that contain them run on the operators afterwards.
    """
    named = choose_layers(attention_layers(model), layers)
    _use(model, named)
    chosen = with_projections(model, named)
    if layers is None:
        chosen = [layer for layer in chosen if layer.num_heads]
    if not chosen:
        refuse("model", "has no heads left", "convert it before all of them are pruned")
    for layer in chosen:
        check_can_share(model, layer)
        is_ours = isinstance(layer.module, GatedMultiheadAttention)
        if not is_ours and not has_products(layer.holder, layer.layout):  # a subclass may do more than its layout says
            was = f"is a {type(layer.module).__name__}, whose scores are not products of its queries and keys"
            refuse(str(layer), was, "leave it out: something comes between its projections and its scores")
    return chosen


def _use(model: nn.Module, layers: Iterable[AttentionLayer]) -> None:
    """Put the models of transformers that hold chosen layers in use, where they run another attention function."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    from heads_kernels.integrations.transformers import use

    stock = {layer.module for layer in layers if not layer.runs_operators}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and stock & set(part.modules()):
            stock -= set(part.modules())
            use(part)


def read_heads(layer: ProjectedLayer) -> AnyHeads:
    """The query and key projections of a layer that has products, float64, on the device of its weights.

    Projections may be `nn.Linear`, transformers' `Conv1D`, or fused. Keys that several heads share are repeated.
    """
    check_has_products(layer)
    assert layer.scale is not None
    group = layer.num_heads // layer.num_key_heads
    query, query_bias = _by_head(layer.query)
    key, key_bias = _by_head(layer.key, group)
    try:
        if layer.layout.rotary:
            return RotaryHeads.of(query, key, layer.scale, query_bias, key_bias)
        return Heads(query, key, layer.scale, query_bias)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{layer}: {error}") from None


def _by_head(projection: Projection, repeats: int = 1) -> tuple[Tensor, Tensor | None]:
    """Weight `[heads, width, D_in]` and bias `[heads, width]`, each head so many times."""
    weight, bias = projection.rows()

    def split(rows: Tensor) -> Tensor:
        return rows.view(projection.heads, -1, *rows.shape[1:]).repeat_interleave(repeats, 0)

    return split(weight), None if bias is None else split(bias)


def install(model: nn.Module, layer: ProjectedLayer, factors: AnyFactors, *, ragged: bool) -> None:
    """Make a layer of `prepare` compute with factors of its heads, in place (`share`), without the record in configs.

    With `ragged`, entries of mixing that are 0 stay 0 in training, and cost nothing.
    """
    if isinstance(factors, RotaryFactors):
        places, slots = factors.places(layer.head_dim // 2)
        values = {"mixing": factors.mixing, "query_places": places, "key_places": places}
        for role, rows in (("query", factors.query), ("key", factors.key)):
            values |= {role: rows[:, :-1], f"{role}_bias": rows[:, -1]}
        made = share(model, layer, factors.dim, ragged=ragged, slots=slots)
    else:
        made = share(model, layer, factors.dim, ragged=ragged)
        values = {name: getattr(factors, name) for name in made}
    for name, tensor in made.items():
        tensor.copy_(values[name])
