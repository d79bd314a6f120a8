"""Undo structural changes of a model.

Functions that change a model check and compute first and change it last, inside `kept_on_error`. That copies no
weights, since such functions replace parameters and never write to them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from torch import nn

from heads_kernels.checks import refuse_type

Made = TypeVar("Made")
_ABSENT: Final = object()


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make a module an instance of another class with the same attributes, as PyTorch's `parametrize` does."""
    module.__class__ = kind


class Snapshot:
    """The structure of a model: classes, attributes, submodules, parameters, buffers and hooks of its modules.

    Values are not copied: replacing parameters can be undone, writing into them cannot.

    Raises:
        TypeError: `model` is not a `nn.Module`.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            refuse_type("model", model, "pass a torch.nn.Module")
        self._kinds = {module: type(module) for module in model.modules()}
        #: The attributes of the modules, and the dicts among them, by their ids, with what they hold now.
        self._dicts: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        for module in self._kinds:
            for each in (vars(module), *vars(module).values()):
                if type(each) in (dict, OrderedDict):
                    self._dicts[id(each)] = each, dict(each)

    def restore(self) -> None:
        """Restore the model. Registries stay the same objects, which handles of hooks refer to."""
        for module, kind in self._kinds.items():
            set_class(module, kind)
        for now, before in self._dicts.values():
            now.clear()
            now.update(before)

    def undo(self, later: Snapshot) -> None:
        """Undo the changes between this snapshot and `later`, but not those after `later`."""
        for module, kind in self._kinds.items():
            if type(module) is later._kinds.get(module):
                set_class(module, kind)
        for key in self._dicts.keys() & later._dicts.keys():
            now, before = self._dicts[key]
            _undo(now, before, later._dicts[key][1])


@contextmanager
def kept_on_error(model: nn.Module) -> Iterator[Snapshot]:
    """Restore the model, of which it yields the snapshot, if the block raises, also on Ctrl-C."""
    before = Snapshot(model)
    try:
        yield before
    except BaseException:
        before.restore()
        raise


@contextmanager
def undone(model: nn.Module, change: Callable[[], Made]) -> Iterator[Made]:
    """Change the model by `change()`, yield its result, and undo the change after the block.

    Other changes in the block, by the model's own forward, are kept, unless the block raises.
    """
    with kept_on_error(model) as before:
        made = change()
        after = Snapshot(model)
        yield made
    before.undo(after)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In this block the model is in evaluation mode; then every module is in the mode that it was in."""
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _undo(now: dict[Any, Any], before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """Restore the entries of `now` that differ between `before` and `after`."""
    for name in before.keys() | after.keys():
        was = before.get(name, _ABSENT)
        if was is after.get(name, _ABSENT):
            continue
        if was is _ABSENT:
            now.pop(name, None)
        else:
            now[name] = was
