"""Families that the table does not name: their attention has one of its forms, and the form fits."""

from __future__ import annotations

import pytest
import torch

import heads_kernels as hk
from heads_kernels.integrations.transformers.tested import OF_A_FORM
from tests.support.alike import assert_alike
from tests.support.tiny_models import outputs, small

pytestmark = pytest.mark.check


@pytest.mark.parametrize("name", OF_A_FORM)
@torch.no_grad()
def test_family(name: str, tmp_path: object) -> None:
    model = small(name)
    stock = outputs(model)
    hk.integrations.transformers.use(model)
    layers = hk.heads.attention_layers(model)
    assert layers
    assert_alike(outputs(model), stock)
    hk.heads.gate(model, lambda H: hk.nn.FixedGate(torch.ones(H)))
    assert_alike(outputs(model), stock)
    hk.heads.ungate(model)
    hk.heads.close(model, {layer.index: [1] for layer in layers})
    closed = outputs(model)
    assert (closed - stock).abs().max() > 1e-4 * stock.abs().max()
    assert hk.heads.prune(model, hk.heads.closed(model)) == {layer.name: [1] for layer in layers}
    assert_alike(outputs(model), closed)
    hk.heads.save(model, f"{tmp_path}/model.safetensors")
    whole = hk.integrations.transformers.use(small(name, seed=3))
    hk.heads.load(whole, f"{tmp_path}/model.safetensors")
    assert_alike(outputs(whole), closed)
