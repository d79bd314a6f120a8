"""The operators on the `triton` backend: which kernels run, and in which order.

On sm_90, kernels in Gluon with specialized warps (`gluon_forward`, `gluon_backward`, `gluon_shared_backward`) replace
others in the calls that they serve. They do not serve calls whose tiles would be mostly padding: queries of a few rows,
narrow heads and, in gated attention, values of another width; nor calls with fewer keys than other descriptors need
(`load.FEWEST_KEYS`). Backward, heads of collaborative attention may share up to 256 features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
import triton
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.attention import Gradients, Results, Saved, allocate_gradients
from heads_kernels.ops.buffers import SHORT_QUERY, contiguous_rows
from heads_kernels.ops.entmax import check_alpha_values
from heads_kernels.ops.statistics import AttentionStatistics
from heads_kernels.ops.triton.bias_gradients import bias_pass, offsets_pass
from heads_kernels.ops.triton.entmax import centers_pass
from heads_kernels.ops.triton.forward import closed_pass, forward_pass
from heads_kernels.ops.triton.keys import keys_pass
from heads_kernels.ops.triton.launch import compiled_together
from heads_kernels.ops.triton.load import FEWEST_KEYS, describable
from heads_kernels.ops.triton.operands import with_positive_scale
from heads_kernels.ops.triton.queries import queries_pass
from heads_kernels.ops.triton.rows import first_pass
from heads_kernels.ops.triton.statistics import statistics_passes
from heads_kernels.ops.triton.tiles import Tiles, padded, warp_tiles

_RELEASE: Final = tuple(map(int, triton.__version__.split(".")[:2]))
#: Names in Gluon, which is experimental, change between releases: the kernels were compiled with these.
_HAS_GLUON: Final = (3, 6) <= _RELEASE <= (3, 9)
#: Whether this release compiles the backward kernels: gated attention's needs copies that add to a tile.
HAS_BACKWARD: Final = _RELEASE >= (3, 8)
#: Features that heads may share: 128 rows of them have 128 KiB, of the 227 that a program may have.
_MOST_SHARED: Final = 512


def forward(call: Call, results: Results) -> None:
    """Fill `results`, except empty ones."""
    if call.alpha is not None and not call.alpha.is_cuda:  # on a GPU this would make the host wait
        check_alpha_values(call.alpha)
    compiled_together(partial(_forward, call), results, partial(_backward_of, call, results))


def backward(call: Call, saved: Saved, gradients: Gradients) -> None:
    """Fill `gradients`, except empty ones."""
    compiled_together(partial(_backward, call, saved), gradients)


def statistics(call: Call, results: AttentionStatistics) -> None:
    """Fill `results`."""
    compiled_together(partial(statistics_passes, call), results)


def _forward(call: Call, results: Results) -> None:
    call = with_positive_scale(call)
    tiles = specialized_forward(call, results)
    if tiles is None:
        forward_pass(call, results)
    else:
        from heads_kernels.ops.triton import gluon_forward

        gluon_forward.specialized_pass(call, results, tiles)


def _backward_of(call: Call, results: Results) -> None:
    """The backward pass that will follow, with buffers of its own; nothing if no gradient is required."""
    needs = [operand is not None and operand.requires_grad for operand in call.operands]
    if results.lse.numel() and any(needs):
        attended = results.out if call.gate is None else results.attended
        saved = Saved(torch.empty_like(results.out), attended, results.lse, None)
        _backward(call, saved, allocate_gradients(call, needs))


def _backward(call: Call, saved: Saved, gradients: Gradients) -> None:
    g, dout = gradients, contiguous_rows(saved.dout)
    tiles = specialized_backward(call, g, dout)
    first = first_pass(call, saved, dout, g.dgate, g.dsinks, gated_rows=tiles is not None)
    if g.dgate.numel() and call.closed_grad:
        closed_pass(call, first.operands, first.reads, g.dgate)
    if first.reads.gate is None:  # dattended includes it
        call = call._replace(gate=None)
    if call.alpha is not None:
        first = centers_pass(call, first, g.dalpha)
    if tiles is None:
        keys_pass(call, first, g.dkey, g.dvalue, g.dcontent_bias)
        queries_pass(call, first, g.dquery, g.dmixing)
    else:
        from heads_kernels.ops.triton import gluon_backward, gluon_shared_backward

        of_operator = gluon_backward if call.mixing is None else gluon_shared_backward
        of_operator.specialized_pass(call, first, g, tiles)
    bias_pass(call, first, g.dbias)
    offsets_pass(call, first, g.doffset_bias)


# ---------------------------------------------------------------------- which calls kernels in Gluon serve
def specialized_forward(call: Call, outputs: Results) -> Tiles | None:
    """The tiles of the forward kernel, if it serves the call."""
    tensors = [call.query, call.key, call.value, outputs.out]
    if outputs.attended.numel():
        tensors.append(outputs.attended)
    return _tiles("forward", call, tensors)


def specialized_backward(call: Call, gradients: Gradients, dout: Tensor) -> Tiles | None:
    """The tiles of the backward kernel, if it serves the call.

    It requires that all of dquery, dkey and dvalue are requested. Its loops would spill with a dense mask, and with a
    cap in heads of more than 64 features. With a gate it reads a dense tensor in the place of `dout`.
    """
    g = gradients
    asked_for = g.dquery.numel() and g.dkey.numel() and g.dvalue.numel()
    spills = call.dense_mask is not None or (call.softcap and max(call.D, call.Dv) > 64)
    dense_rows_fit = call.gate is None or call.Dv % 8 == 0
    if not (asked_for and HAS_BACKWARD and dense_rows_fit) or spills:
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
    D, Dv = padded(call.D), padded(call.Dv)
    if call.mixing is None:
        fit = D == Dv > 32
    elif part == "forward":
        fit = min(D, Dv) > 32
    else:  # sums of more features do not fit into registers; Triton's kernels skip what heads do not mix
        fit = 32 < D <= 256 and Dv > 32 and call.closed_grad
    if not (fit and call.T > SHORT_QUERY and call.S >= FEWEST_KEYS and _HAS_GLUON):
        return None
    tiles = warp_tiles(f"{call.operator}.{part}", call.query, call.D, call.Dv)
    return tiles if tiles is not None and served(call, tensors) else None
