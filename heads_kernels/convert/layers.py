"""The heads of a layer of a model, as conversion reads them."""

from __future__ import annotations

from torch import Tensor

from heads_kernels.convert.heads import Heads
from heads_kernels.heads.layers import AttentionLayer, Projection, is_transposed
from heads_kernels.heads.sharing import check_has_products


def read_heads(layer: AttentionLayer) -> Heads:
    """The query and key projections of a layer, float64, on the device of its weights.

    Whatever they lie in: `nn.Linear`, transformers' `Conv1D`, one fused projection. Keys that several heads share are
    repeated; the scale is that of the layer.

    Raises:
        ValueError: a layer whose scores are no products of its weights (rotary positions), that is collaborative
            already, has no heads left, or keeps logits of an output gate among the rows of its queries; weights that
            are packed, or not finite.
    """
    check_has_products(layer)
    assert layer.scale is not None
    bias = layer.query.linear.bias
    if bias is not None:
        bias = bias[layer.query.features(range(layer.num_heads))].view(layer.num_heads, -1)
    try:
        return Heads(
            query=_rows(layer.query),
            key=_rows(layer.key).repeat_interleave(layer.num_heads // layer.num_key_heads, 0),
            scale=layer.scale,
            query_bias=bias,
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"{layer}: {error}") from None


def _rows(projection: Projection) -> Tensor:
    """`[heads, width, D_in]`."""
    linear = projection.linear
    weight: Tensor = linear.weight.T if is_transposed(linear) else linear.weight
    rows = weight[projection.features(range(projection.heads))]
    return rows.view(projection.heads, projection.width, -1)
