"""Unpadded models in data parallel training: each process packs the rows that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.alike import assert_alike
from tests.support.processes import Processes

pytest.importorskip("transformers", reason="models of transformers")

KINDS = {"bert": "BertForMaskedLM", "llama": "LlamaForCausalLM"}


def gradients(model: Any, rows: slice, passes: int) -> dict[str, Tensor]:
    """Of a loss that is a sum over tokens, whose passes accumulate."""
    T = 9
    ids = torch.randint(3, 40, (4, T), generator=torch.Generator().manual_seed(7))
    real = torch.arange(T) < torch.tensor([9, 9, 3, 6])[:, None]  # the first half has no padding
    for _ in range(passes):
        logits = model(ids[rows], attention_mask=real[rows].long()).logits
        logits[real[rows]].square().sum().backward()
    named = model.named_parameters()
    return {n.removeprefix("module."): p.grad for n, p in named if p.grad is not None}


def check(name: str, checkpointing: bool) -> None:
    from heads_kernels.integrations.transformers import use
    from tests.support.tiny_models import build
    from tests.transformers.test_unpad import packed_layers

    rank = torch.distributed.get_rank()
    expected = gradients(build(name, model=KINDS[name]), slice(0, 4), 2)
    model = use(build(name, model=KINDS[name]), unpad=True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parallel = DistributedDataParallel(model)
    found = gradients(parallel, slice(2 * rank, 2 * rank + 2), 2)
    assert_alike({n: 2 * each for n, each in found.items()}, expected)  # a mean of two processes
    assert all(packed_layers(model)) == (rank == 1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_data_parallel(name: str, checkpointing: bool, ranks: Callable[[int], Processes]) -> None:
    ranks(2).run(check, name, checkpointing)
