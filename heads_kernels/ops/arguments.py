"""A call as the tuples that both compiled extensions take; `csrc/bindings/tensors.h` reads them.

The extensions read pointer, dtype, sizes and strides of tensors; None stands for what is absent or not requested.
"""

from __future__ import annotations

from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.mask import Intervals

#: bias, offset_bias, sinks, softcap; None where all are absent
Terms = tuple[Tensor | None, Tensor | None, Tensor | None, float] | None
#: query, key, mixing, content_bias (None for gated attention), scale, terms
Scores = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float, Terms]
#: k_lo, k_hi, key_visible, dense, band_lo, band_hi
MaskParts = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int, int]
#: gate, gate_activation, seed, dropout_p
Options = tuple[Tensor | None, str, Tensor | None, float]


def scores_of(call: Call) -> Scores:
    """The operands, scale and terms of the scores."""
    terms = terms_of(call.bias, call.offset_bias, call.sinks, call.softcap)
    return call.query, call.key, call.mixing, call.content_bias, call.scale, terms


def terms_of(
    bias: Tensor | None, offset_bias: Tensor | None, sinks: Tensor | None, softcap: float
) -> Terms:
    """The terms applied to the product of query and key; None without any."""
    if bias is None and offset_bias is None and sinks is None and not softcap:
        return None
    return bias, offset_bias, sinks, softcap


def options_of(call: Call) -> Options:
    """The gate and dropout."""
    return call.gate, call.gate_activation, call.seed, call.dropout_p


def mask_of(intervals: Intervals) -> MaskParts:
    """The parts of the mask that kernels read."""
    i = intervals
    return i.k_lo, i.k_hi, i.key_visible, i.dense, i.band_lo, i.band_hi


def asked_for(tensor: Tensor | None) -> Tensor | None:
    """The output to fill; None if it is empty, which means that it is not requested."""
    return tensor if tensor is not None and tensor.numel() else None
