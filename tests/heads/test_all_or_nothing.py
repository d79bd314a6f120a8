"""An operation that fails leaves its model as it was: any operation, wherever an error or Ctrl-C stops it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import calibrate, collaborate, curves
from heads_kernels.integrations.transformers import release, use
from tests.support.model_state import state
from tests.support.nn_layers import B, E, H, S, spread
from tests.support.tiny_models import batch, build, outputs, unpooled

HEADS = {0: [1], 1: [2, 3]}


# ---------------------------------------------------------------------- models
def stock() -> Any:
    return unpooled(build("bert"))


def biased() -> Any:
    """Its classes are replaced."""
    return unpooled(build("mpnet"))


def in_use() -> Any:
    return use(stock())


def after(change: Callable[..., Any], argument: Any) -> Any:
    """A model in use whose heads were changed."""
    change(model := in_use(), argument)
    return model


def closed() -> Any:
    return after(hk.heads.close, HEADS)


def pruned() -> Any:
    return after(hk.heads.prune, HEADS)


def unpadded() -> Any:
    return use(biased(), unpad=True)


def torch_encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    return spread(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def encoder() -> Any:
    return hk.nn.replace_attention_(torch_encoder())


def data_of(model: Any) -> Any:
    if isinstance(model, nn.TransformerEncoder):
        return torch.randn(B, S, E, generator=torch.Generator().manual_seed(0))
    return batch(model)


def run(model: Any) -> Tensor:
    return model(data_of(model)) if isinstance(model, nn.TransformerEncoder) else outputs(model)


# ---------------------------------------------------------------------- operations that change a model
def convert(model: Any) -> None:
    collaborate(model, 8, calibration=[data_of(model)], progress=False)


def load(model: Any, folder: Path) -> None:
    hk.heads.save(pruned(), folder / "model.safetensors")
    hk.heads.load(model, folder / "model.safetensors")


#: The model before, and the operation.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "close": (in_use, lambda model: hk.heads.close(model, HEADS)),
    "reopen": (closed, hk.heads.reopen),
    "gate": (in_use, lambda model: hk.heads.gate(model, hk.nn.HardConcrete)),
    "ungate": (lambda: after(hk.heads.gate, hk.nn.HardConcrete), hk.heads.ungate),
    "prune": (closed, lambda model: hk.heads.prune(model, hk.heads.closed(model))),
    "apply_shapes": (in_use, lambda model: hk.heads.apply_shapes(model, hk.heads.shapes(pruned()))),
    "load": (in_use, load),
    "collaborate": (stock, convert),
    "collaborate modules": (encoder, lambda model: collaborate(model, 8, method="ragged")),
    "replace_attention_": (torch_encoder, hk.nn.replace_attention_),
    "use": (biased, use),
    "use unpadded": (biased, lambda model: use(model, unpad=True)),
    "use padded again": (unpadded, use),
    "release": (unpadded, release),
}


@contextmanager
def stopped_at(model: nn.Module, number: int) -> Iterator[list[str]]:
    """The write to a module of the model with this number is interrupted: of an attribute, a parameter or a hook."""
    modules, writes = set(model.modules()), list[str]()
    names = ("__setattr__", "register_parameter", "register_buffer", "register_forward_hook")

    def counted(write: Callable[..., Any]) -> Callable[..., Any]:
        def interrupted(self: nn.Module, name: Any, *rest: Any, **options: Any) -> Any:
            if self in modules:
                writes.append(str(name))
                if len(writes) == number + 1:
                    raise KeyboardInterrupt
            return write(self, name, *rest, **options)

        return interrupted

    with pytest.MonkeyPatch.context() as patch:
        for name in (*names, "register_forward_pre_hook"):
            patch.setattr(nn.Module, name, counted(getattr(nn.Module, name)))
        yield writes


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_whole_or_undone(name: str, tmp_path: Path) -> None:
    """Interrupted at the first write, the second, the fourth and so on, until it ends before."""
    make, operation = CHANGES[name]
    model = make()
    arguments = (tmp_path,) if name == "load" else ()
    expected = run(model)
    before = state(model)
    for doubling in itertools.count():
        with stopped_at(model, 2**doubling - 1) as writes:
            try:
                operation(model, *arguments)
            except KeyboardInterrupt:
                assert state(model) == before, writes
            else:
                break
        assert torch.equal(run(model), expected)
    assert doubling > 1
    assert state(model) != before


#: Steps that come late, or write to something else than modules.
LATE = {
    "load": ("heads.saving.record_in_config", "heads.saving.restore_shape"),
    "collaborate": ("convert.collaborate.record_in_config", "convert.collaborate.Conversion"),
    "use unpadded": tuple(
        f"integrations.transformers.models.{step}"
        for step in ("own_configs", "replace_forwards", "watch", "unpad_layers")
    ),
    "use padded again": ("integrations.transformers.models.pad_layers",),
    "release": ("integrations.transformers.models.pad_layers",),
}


@pytest.mark.parametrize(
    ("name", "step"), [(name, step) for name, steps in LATE.items() for step in steps]
)
def test_late_errors(name: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the step."""
    make, operation = CHANGES[name]
    model = make()
    before = state(model)
    arguments = (tmp_path,) if name == "load" else ()
    place, _, function = f"heads_kernels.{step}".rpartition(".")
    module = sys.modules[place]
    stock_step = getattr(module, function)

    def failing(*given: Any, **options: Any) -> None:
        made = stock_step(*given, **options)
        if model in given or function == "Conversion":
            raise RuntimeError("too late")
        return made

    monkeypatch.setattr(module, function, failing)
    with pytest.raises(RuntimeError, match="too late"):
        operation(model, *arguments)
    assert state(model) == before


#: Beside those of `hk.analysis`, of which tests/analysis/test_what_holds.py says it.
READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "calibrate": calibrate,
    "curves": curves,
    "collaborate": lambda model, data: collaborate(model, 8, calibration=data, progress=False),
}


@pytest.mark.parametrize("name", READINGS)
def test_readings_leave_nothing(name: str) -> None:
    """An error of the data after a batch, one of the model in a pass, and none."""
    model = in_use().train()
    next(model.children()).eval()
    before = state(model)

    def batches() -> Iterator[Any]:
        yield batch(model)
        raise KeyboardInterrupt

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        READINGS[name](model, batches())
    assert state(model) == before
    handle = model.encoder.layer[1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        READINGS[name](model, [batch(model)])
    handle.remove()
    assert state(model) == before
    if name != "collaborate":
        READINGS[name](model, [batch(model)])
        assert state(model) == before
