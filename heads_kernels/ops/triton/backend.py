"""The operators on the `triton` backend: the order in which their kernels run."""

from __future__ import annotations

from heads_kernels.call import Call
from heads_kernels.ops.attention import Gradients, Results, Saved
from heads_kernels.ops.buffers import contiguous_rows
from heads_kernels.ops.entmax import check_alpha_values
from heads_kernels.ops.triton.bias_gradients import bias_pass, offsets_pass
from heads_kernels.ops.triton.entmax import centers_pass
from heads_kernels.ops.triton.forward import closed_pass, forward_pass
from heads_kernels.ops.triton.keys import keys_pass
from heads_kernels.ops.triton.queries import queries_pass
from heads_kernels.ops.triton.rows import first_pass
from heads_kernels.ops.triton.specialized import specialized_backward
from heads_kernels.ops.triton.statistics import statistics

__all__ = ["backward", "forward", "statistics"]


def forward(call: Call, results: Results) -> None:
    """Fill `results`, except empty ones."""
    if call.alpha is not None and not call.alpha.is_cuda:  # on a GPU this would make the host wait
        check_alpha_values(call.alpha)
    forward_pass(call, results)


def backward(call: Call, saved: Saved, gradients: Gradients) -> None:
    """Fill `gradients`, except empty ones."""
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
