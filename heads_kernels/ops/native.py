"""The launcher that both operators share: what the compiled extension `heads_kernels._cpu` is told.

Tensors go in as they are (the extension reads pointer, dtype, sizes and strides); None stands for what is absent or not
asked for. Threads are those of PyTorch's own pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads_kernels import _cpu
from heads_kernels.mask import Intervals

#: query, key, mixing, content_bias (None for gated attention), scale
Scores = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]
#: gate, gate_activation, seed, dropout_p
Options = tuple[Tensor | None, str, Tensor | None, float]


def mask_of(
    intervals: Intervals,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int, int]:
    """The parts of the mask that kernels read."""
    i = intervals
    return i.k_lo, i.k_hi, i.key_visible, i.band_lo, i.band_hi


def attention_forward(
    scores: Scores, value: Tensor, intervals: Intervals, options: Options, outputs: Sequence[Tensor]
) -> None:
    """Fill `outputs` (out, attended, lse); empty ones are not kept."""
    wanted = [_asked_for(t) for t in outputs]
    _cpu.attention_forward(
        scores, value, mask_of(intervals), options, wanted, torch.get_num_threads()
    )


def attention_backward(
    scores: Scores,
    value: Tensor,
    intervals: Intervals,
    options: Options,
    closed_grad: bool,
    saved: tuple[Tensor, Tensor, Tensor],
    gradients: Sequence[Tensor | None],
) -> None:
    """Fill `gradients` (dquery, dkey, dvalue, dmixing, dcontent_bias, dgate); empty ones are not computed.

    `saved` is dout, attended, lse.
    """
    wanted = [_asked_for(t) for t in gradients]
    threads = torch.get_num_threads()
    _cpu.attention_backward(
        scores, value, mask_of(intervals), options, closed_grad, saved, wanted, threads
    )


def _asked_for(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is not None and tensor.numel() else None
