"""All operators on the `cpu` backend, by the compiled extension `heads_kernels._cpu`.

Its kernels are in `csrc/cpu/` and run on PyTorch's thread pool. A call without mixing runs the kernels of gated
attention, with entmax if it has `alpha`. An empty tensor in a tuple of results or gradients is not requested.
"""

from __future__ import annotations

import torch

from heads_kernels import _cpu
from heads_kernels.call import Call
from heads_kernels.ops.attention import Gradients, Results, Saved
from heads_kernels.ops.library import check_fields
from heads_kernels.ops.statistics import AttentionStatistics

check_fields(_cpu)


def forward(call: Call, results: Results) -> None:
    """Fill `results`, except empty ones."""
    if not call.value.shape[-1]:  # the kernels compute `lse` only with an output: one column of zeros is the value
        value = call.value.new_zeros((*call.value.shape[:-1], 1))
        results = results._replace(out=value.new_empty((*call.sizes[:3], 1)))
        call = call._replace(value=value, gate=None)
    _cpu.attention_forward(call, results, torch.get_num_threads())


def backward(call: Call, saved: Saved, gradients: Gradients) -> None:
    """Fill `gradients`, except empty ones."""
    _cpu.attention_backward(call, saved, gradients, torch.get_num_threads())


def statistics(call: Call, results: AttentionStatistics) -> None:
    """Fill `results`."""
    _cpu.attention_statistics(call, results, torch.get_num_threads())
