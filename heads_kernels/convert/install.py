"""The layers of a model: chosen for conversion, their heads read, and factors put in."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.rotary import AnyFactors, AnyHeads, RotaryFactors, RotaryHeads
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.heads.projected import with_projections
from heads_kernels.heads.reshape import check_can_share, check_has_products, share
from heads_kernels.heads.weights import ProjectedLayer, Projection, is_transposed


def prepare(
    model: nn.Module, layers: Iterable[int | str] | None, argument: str = "layers"
) -> list[ProjectedLayer]:
    """The layers to convert, in the given order. transformers models that contain them run on the operators afterwards.

    Args:
        model: contains the layers, and is not a layer itself.
        layers: indices or names of `attention_layers(model)`; None means all that have heads.
        argument: the name of `layers` in errors.

    Raises:
        TypeError, ValueError: a layer does not exist, is named twice or cannot be converted; there is no layer.
    """
    named = choose_layers(attention_layers(model), layers, argument)
    _use(model, named)
    chosen = with_projections(model, named)
    if layers is None:
        chosen = [layer for layer in chosen if layer.num_heads]
    if not chosen:
        refuse("model", "has no heads left", "convert it before all of them are pruned")
    for layer in chosen:
        check_can_share(model, layer)
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
    """The query and key projections of a layer, float64, on the device of its weights.

    Projections may be `nn.Linear`, transformers' `Conv1D`, or fused. Keys that several heads share are repeated.

    Returns:
        `Heads`; `RotaryHeads` of a layer with rotary positions.

    Raises:
        ValueError: the scores are not products of weights (norms of queries and keys); the layer is collaborative
            already, has no heads left, or has logits of an output gate among the rows of its queries; weights are
            packed or not finite.
    """
    check_has_products(layer)
    assert layer.scale is not None
    group = layer.num_heads // layer.num_key_heads
    query, key = _rows(layer.query), _rows(layer.key).repeat_interleave(group, 0)
    query_bias = _bias(layer.query)
    try:
        if layer.layout.rotary:
            key_bias = _bias(layer.key)
            if key_bias is not None:
                key_bias = key_bias.repeat_interleave(group, 0)
            return RotaryHeads.of(query, key, layer.scale, query_bias, key_bias)
        return Heads(query, key, layer.scale, query_bias)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{layer}: {error}") from None


def _rows(projection: Projection) -> Tensor:
    """`[heads, width, D_in]`."""
    linear = projection.linear
    weight: Tensor = linear.weight.T if is_transposed(linear) else linear.weight
    rows = weight[projection.features(range(projection.heads))]
    return rows.view(projection.heads, projection.width, -1)


def _bias(projection: Projection) -> Tensor | None:
    """`[heads, width]`."""
    bias: Tensor | None = projection.linear.bias
    if bias is None:
        return None
    return bias[projection.features(range(projection.heads))].view(projection.heads, -1)


def install(model: nn.Module, layer: ProjectedLayer, factors: AnyFactors, *, ragged: bool) -> None:
    """Make a layer of `prepare` compute with factors of its heads, in place, without the record in configs.

    A `GatedMultiheadAttention` is replaced by a `CollaborativeMultiheadAttention` wherever the model holds it. A layer
    of transformers keeps its forward: its query and key become `SharedProjection`s, the module gets `mixing`, and the
    attention function uses them. Its cache then keeps one key and H content biases per token instead of H keys.
    Values, output, gates, scale, dropout and other attributes are kept. The new parameters have the dtype, device and
    `requires_grad` of the old projections.

    Args:
        ragged: whether entries of mixing that are 0 stay 0 in training, and cost nothing.
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
