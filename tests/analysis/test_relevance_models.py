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


@pytest.mark.parametrize("attention", ["constant", "full"])
def test_layers_of_gpt2_are_linear_layers(attention: str) -> None:
    """Their rule is tested by Jacobians. All steps count, by default."""
    model = use(build("gpt2").double())
    expected = relevance(model, [batch(model)], attention=attention)
    assert expected.kinds == ("decoder", "decoder")
    for block in model.transformer.h:
        for name in ("c_fc", "c_proj"):
            conv = getattr(block.mlp, name)
            linear = torch.nn.Linear(*conv.weight.shape, dtype=torch.float64)
            linear.weight.data, linear.bias = conv.weight.data.T, conv.bias
            setattr(block.mlp, name, linear)
    assert_alike(relevance(model, [batch(model)], attention=attention).table(), expected.table())


# ---------------------------------------------------------------------- masks
def test_a_mask_that_differs_by_row_goes_by_sdpa() -> None:
    model, arguments = use(build("bert")), batch(build("bert"))
    arguments["attention_mask"][2] = 1
    expected = relevance(model, [arguments], token_two).table()
    real = arguments["attention_mask"]
    dense = (real[:, None, None, :] > 0).expand(-1, 1, 9, -1).clone()
    dense[:, :, 8, 8] = True  # a row that nothing rests on
    found = relevance(model, [arguments | {"attention_mask": dense}], token_two).table()
    assert_alike(found, expected, dtype=torch.float32)
    hk.heads.close(model, {0: [1]})
    found = relevance(model, [arguments | {"attention_mask": dense}], token_two).table()
    assert found[0, 1] == 0


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


# ---------------------------------------------------------------------- other ways


def test_t5_in_half_precision_clamps_its_hidden_states() -> None:
    model = use(build("t5")).half()
    found = relevance(model, [batch(model)], token_two).table()
    assert_alike(found.sum(1), torch.ones(len(found)).double(), dtype=torch.float16)
