"""An operation that fails leaves its model as it was: any operation, wherever an error or Ctrl-C stops it.

Of those that only read a model tests/analysis/test_what_holds.py says it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import collaborate
from heads_kernels.integrations.transformers import release, use
from tests.convert.converted_models import encoder
from tests.support.model_state import state
from tests.support.nn_layers import B, E, S, torch_encoder
from tests.support.tiny_models import batch, build, outputs, unpooled

HEADS = {0: [1], 1: [2, 3]}


# ---------------------------------------------------------------------- models
def stock() -> Any:
    return unpooled(build("bert"))


def biased() -> Any:
    """Its classes are replaced."""
    return unpooled(build("mpnet"))


def in_use(change: Callable[..., Any] | None = None, *arguments: Any) -> Any:
    """A model in use, after a change of its heads."""
    model = use(stock())
    if change is not None:
        change(model, *arguments)
    return model


closed = partial(in_use, hk.heads.close, HEADS)
pruned = partial(in_use, hk.heads.prune, HEADS)


def unpadded() -> Any:
    return use(biased(), unpad=True)


def run(model: Any) -> Tensor:
    if isinstance(model, nn.TransformerEncoder):
        return model(torch.linspace(-1, 1, B * S * E).view(B, S, E))
    return outputs(model)


# ---------------------------------------------------------------------- operations that change a model
#: The model before, and the operation.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "close": (in_use, lambda model: hk.heads.close(model, HEADS)),
    "reopen": (closed, hk.heads.reopen),
    "gate": (in_use, lambda model: hk.heads.gate(model, hk.nn.HardConcrete)),
    "ungate": (lambda: in_use(hk.heads.gate, hk.nn.HardConcrete), hk.heads.ungate),
    "prune": (closed, lambda model: hk.heads.prune(model, hk.heads.closed(model))),
    "apply_shapes": (in_use, lambda model: hk.heads.apply_shapes(model, hk.heads.shapes(pruned()))),
    "load": (in_use, hk.heads.load),
    "collaborate": (stock, lambda model: collaborate(model, 8, method="ragged", calibration=[batch(model)])),
    "collaborate modules": (encoder, lambda model: collaborate(model, 8, method="ragged")),
    "replace_attention_": (torch_encoder, hk.nn.replace_attention_),
    "use": (biased, use),
    "use unpadded": (biased, lambda model: use(model, unpad=True)),
    "use padded again": (unpadded, use),
    "release": (unpadded, release),
}


#: The methods of modules that write to them.
WRITES = ("__setattr__", "register_buffer", "register_forward_hook", "register_forward_pre_hook")


@contextmanager
def stopped_at(number: int | None) -> Iterator[list[str]]:
    """Ctrl-C at the call with this number of a function of the package, or of one that writes to a module; yields the
    names of those called so far."""
    called: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        code, place = frame.f_code, frame.f_globals.get("__name__", "")
        if event != "call" or code.co_flags & CO_GENERATOR:  # one ends when it is freed
            return
        is_write = place == nn.Module.__module__ and code.co_name in WRITES
        if is_write or place.startswith("heads_kernels."):
            called.append(code.co_name)
            if len(called) - 1 == number:
                raise KeyboardInterrupt

    before = sys.gettrace()  # of a debugger or of coverage
    sys.settrace(count)
    try:
        yield called
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_whole_or_undone(name: str, tmp_path: Path) -> None:
    """Interrupted at the last call, the third from the end, the ninth and so on: models are changed last."""
    make, operation = CHANGES[name]
    path = tmp_path / "model.safetensors"
    if name == "load":
        hk.heads.save(pruned(), path)
    arguments = (path,) if name == "load" else ()
    for model in (make(), make()):  # the second time nothing is computed that is cached
        with stopped_at(None) as called:
            operation(model, *arguments)
    model = make()
    expected, before, n = run(model), state(model), len(called)
    for left in (3**power for power in range(20) if 3**power <= n):
        with pytest.raises(KeyboardInterrupt), stopped_at(n - left) as called:
            operation(model, *arguments)
        assert state(model) == before, called[-5:]
        assert torch.equal(run(model), expected)
    operation(model, *arguments)
    assert state(model) != before
