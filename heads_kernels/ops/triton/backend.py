"""The operators on the `triton` backend: the order in which their kernels run."""

from __future__ import annotations

from functools import partial

import torch

from heads_kernels.call import Call
from heads_kernels.ops.attention import Gradients, Results, Saved, allocate_gradients
from heads_kernels.ops.buffers import contiguous_rows
from heads_kernels.ops.entmax import check_alpha_values
from heads_kernels.ops.statistics import Buffers
from heads_kernels.ops.triton.bias_gradients import bias_pass, offsets_pass
from heads_kernels.ops.triton.entmax import centers_pass
from heads_kernels.ops.triton.forward import closed_pass, forward_pass
from heads_kernels.ops.triton.keys import keys_pass
from heads_kernels.ops.triton.launch import compiled_together
from heads_kernels.ops.triton.queries import queries_pass
from heads_kernels.ops.triton.rows import first_pass
from heads_kernels.ops.triton.specialized import specialized_backward
from heads_kernels.ops.triton.statistics import statistics_passes

__all__ = ["backward", "forward", "statistics"]


def forward(call: Call, results: Results) -> None:
    """Fill `results`, except empty ones."""
    if call.alpha is not None and not call.alpha.is_cuda:  # on a GPU this would make the host wait
        check_alpha_values(call.alpha)
    compiled_together(partial(forward_pass, call), results, partial(_backward_of, call, results))


def backward(call: Call, saved: Saved, gradients: Gradients) -> None:
    """Fill `gradients`, except empty ones."""
    compiled_together(partial(_backward, call, saved), gradients)


def statistics(call: Call, results: Buffers) -> None:
    """Fill `results`."""
    compiled_together(partial(statistics_passes, call), results)


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
    if call.alpha is not None:
        first = centers_pass(call, first, g.dalpha)
    if tiles is not None:
        from heads_kernels.ops.triton.gluon_backward import specialized_pass

        specialized_pass(call, first, g, tiles)
    else:
        keys_pass(call, first, g.dkey, g.dvalue, g.dcontent_bias)
        queries_pass(call, first, g.dquery, g.dmixing)
    bias_pass(call, first, g.dbias)
    offsets_pass(call, first, g.doffset_bias)
