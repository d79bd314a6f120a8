"""The launcher that both operators share: what the compiled extension `heads_kernels._cpu` is told.

Threads are those of PyTorch's own pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads_kernels import _cpu
from heads_kernels.mask import Intervals
from heads_kernels.ops.arguments import Options, Scores, asked_for, mask_of


def attention_forward(
    scores: Scores, value: Tensor, intervals: Intervals, options: Options, outputs: Sequence[Tensor]
) -> None:
    """Fill `outputs` (out, attended, lse); empty ones are not kept."""
    wanted = [asked_for(t) for t in outputs]
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
    wanted = [asked_for(t) for t in gradients]
    threads = torch.get_num_threads()
    _cpu.attention_backward(
        scores, value, mask_of(intervals), options, closed_grad, saved, wanted, threads
    )
