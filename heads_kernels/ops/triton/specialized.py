"""Which calls the kernels with specialized warps serve, on sm_90: `gluon_forward` and `gluon_backward`.

All other calls run in Triton's kernels. So do calls whose tiles would be mostly padding: queries of a few rows, narrow
heads, in gated attention values of another width. There must be as many keys as for other descriptors
(`load.FEWEST_KEYS`). The backward kernel serves gated attention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import triton
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.attention import Gradients, Results
from heads_kernels.ops.buffers import SHORT_QUERY
from heads_kernels.ops.triton.load import FEWEST_KEYS, describable
from heads_kernels.ops.triton.operands import operator_of
from heads_kernels.ops.triton.tiles import Tiles, padded, warp_tiles

_RELEASE: Final = tuple(map(int, triton.__version__.split(".")[:2]))
#: Names in Gluon, which is experimental, change between releases: the kernels were compiled with these.
_HAS_GLUON: Final = (3, 6) <= _RELEASE <= (3, 9)
#: Whether Gluon has the copies that add to a tile, which the backward kernel needs.
HAS_ADDING_COPIES: Final = _RELEASE >= (3, 8)
#: Features that heads may share: 128 rows of them have 128 KiB, of the 227 that a program may have.
_MOST_SHARED: Final = 512


def specialized_forward(call: Call, outputs: Results) -> Tiles | None:
    """The tiles of the forward kernel, if it serves the call."""
    tensors = [call.query, call.key, call.value, outputs.out]
    if outputs.attended.numel():
        tensors.append(outputs.attended)
    return _tiles("forward", call, tensors)


def specialized_backward(call: Call, gradients: Gradients, dout: Tensor) -> Tiles | None:
    """The tiles of the backward kernel, if it serves the call.

    It requires that all of dquery, dkey and dvalue are requested. Its loops would spill with a dense mask, and with a
    cap in heads of more than 64 features.
    """
    g = gradients
    asked_for = g.dquery.numel() and g.dkey.numel() and g.dvalue.numel()
    spills = call.dense_mask is not None or (call.softcap and max(call.D, call.Dv) > 64)
    if not (asked_for and HAS_ADDING_COPIES) or spills:
        return None
    return _tiles("backward", call, [call.query, call.key, call.value, dout])


def served(call: Call, tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels can serve the call.

    They support no biases of pairs, dropout, entmax or first keys, and at most _MOST_SHARED features that heads share.
    Descriptors must be able to describe all tensors.
    """
    others = call.alpha, call.bias, call.offset_bias, call.first_keys
    plain = not call.dropout_p and all(part is None for part in others)
    fits = call.mixing is None or call.D <= _MOST_SHARED
    return plain and fits and all(map(describable, tensors))


def _tiles(part: str, call: Call, tensors: Sequence[Tensor]) -> Tiles | None:
    long = call.T > SHORT_QUERY and call.S >= FEWEST_KEYS
    of_one_width = call.mixing is not None or padded(call.D) == padded(call.Dv)
    if not (long and of_one_width and min(padded(call.D), padded(call.Dv)) > 32 and _HAS_GLUON):
        return None
    tiles = warp_tiles(f"{operator_of(call)}.{part}", call.query, call.D, call.Dv)
    return tiles if tiles is not None and served(call, tensors) else None
