"""Surgery that an error or Ctrl-C stops half-way leaves the model that it found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heads_kernels as hk
from heads_kernels.convert import install, ragged, read_heads
from heads_kernels.heads import attention_layers
from tests.convert.model_state import state
from tests.support.tiny_models import build, outputs


def in_use() -> Any:
    return hk.integrations.transformers.use(build("bert"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_pruning_is_all_or_nothing(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stops: at any of the parameters that are replaced."""
    stock, left = hk.heads.reshape.replace, iter(())

    def failing(*arguments: Any) -> None:
        if next(left, None) is None:
            raise error
        stock(*arguments)

    model = in_use()
    hk.heads.close(model, {0: [1], 1: [2]})
    attention_layers(model)  # its layout is proven on a copy, once
    before, expected = state(model), outputs(model)
    for module in (hk.heads.reshape, hk.heads.pruning):
        monkeypatch.setattr(module, "replace", failing)
    for count in (0, 1, 2, 7, 15):
        left = iter(range(count))
        with pytest.raises(error):
            hk.heads.prune(model, hk.heads.closed(model))
        assert next(left, None) is None
        assert state(model) == before
        assert torch.equal(outputs(model), expected)
    left = iter(range(1000))
    hk.heads.prune(model, hk.heads.closed(model))
    assert next(left) > 15


@pytest.mark.parametrize("operation", ["gate", "ungate", "close", "reopen"])
def test_gating_is_all_or_nothing(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_use()
    if operation in ("ungate", "reopen"):
        hk.heads.close(model, {0: [1], 1: [2]})
    before = state(model)
    setattr_, calls = nn.Module.__setattr__, []

    def interrupted(self: nn.Module, name: str, value: Any) -> None:
        if name == "head_gate":
            if calls:
                raise KeyboardInterrupt
            calls.append(name)
        setattr_(self, name, value)

    arguments = {"gate": (hk.nn.HardConcrete,), "close": ({0: [1], 1: [2]},)}
    monkeypatch.setattr(nn.Module, "__setattr__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(hk.heads, operation)(model, *arguments.get(operation, ()))
    assert calls
    assert state(model) == before


@pytest.mark.parametrize("fails", ["restore_shape", "load_model", "record_in_config"])
def test_loading_gives_the_shape_back(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = in_use(), tmp_path / "model.safetensors"
    hk.heads.prune(model, {0: [1], 1: [2]})
    hk.heads.save(model, path)
    other = in_use()
    before = state(other)
    name = "safetensors.torch" if fails == "load_model" else "heads_kernels.heads.saving"

    def interrupted(model: nn.Module, *arguments: Any) -> None:
        if model is other:
            raise KeyboardInterrupt

    monkeypatch.setattr(f"{name}.{fails}", interrupted)
    if fails == "restore_shape":
        monkeypatch.setattr("heads_kernels.heads.saving._check_weights", lambda *of: None)
    with pytest.raises(KeyboardInterrupt):
        hk.heads.load(other, path)
    assert state(other) == before


@pytest.mark.parametrize("fails", ["put_in", "record_in_config"])
def test_installing_is_all_or_nothing(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_use()
    before = state(model)
    layer = attention_layers(model)[1]
    factors = ragged(read_heads(layer), 12)
    module = sys.modules["heads_kernels.convert.install"]
    stock = getattr(module, fails)

    def failing(*arguments: Any, **options: Any) -> None:
        stock(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, fails, failing)
    with pytest.raises(KeyboardInterrupt):
        install(model, layer, factors, ragged=True)
    assert state(model) == before
