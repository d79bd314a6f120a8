"""Layer-wise relevance propagation in models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.analysis import relevance
from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")
from tests.support.tiny_models import batch, build

use = hk.integrations.transformers.use


def token_two(model: Any, arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the model says of the third token, which is real in `batch`, and its absolute value as relevance."""
    values = model(**arguments)[0][:, 2]
    return values, values.abs()


# ---------------------------------------------------------------------- families
FAMILIES = (
    "albert", "bert", "vit", "bart", "t5", "gpt2", "llama", "modernbert", "gemma3_text", "step3p7_text"
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    model = use(build(name))
    for attention in ("constant", "full"):
        found = relevance(model, [batch(model)], token_two, attention=attention)
        for scores in found.scores:
            assert scores.min() > 0
            assert scores.sum().item() == pytest.approx(1)


def test_a_family_that_is_refused() -> None:
    model = use(build("mixtral"))
    with pytest.raises(ValueError, match="model computes div_, "):
        relevance(model, [batch(model)], token_two)


def test_t5_in_half_precision_clamps_its_hidden_states() -> None:
    model = use(build("t5")).half()
    found = relevance(model, [batch(model)], token_two).table()
    assert_alike(found.sum(1), torch.ones(len(found)).double(), dtype=torch.float16)
