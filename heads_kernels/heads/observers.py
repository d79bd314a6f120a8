"""Observers of attention layers: they see each call while a model runs, and may change the outputs of its heads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from heads_kernels.checks import refuse
from heads_kernels.heads.gating import check_runs_operators
from heads_kernels.heads.layers import AttentionLayer, attention_layers
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.nn.multihead import CallObserver, Change, Multihead

#: Called with a layer and its call before the operator runs; returns a change of the outputs, or None.
LayerObserver: TypeAlias = Callable[[AttentionLayer, AttentionCall], Change | None]


#: A thread may take it again: the garbage collector ends blocks that were given up, at any time.
_LOCK: Final = threading.RLock()


@contextmanager
def observed(
    model: nn.Module, chosen: Collection[AttentionLayer], observer: LayerObserver, *, every_thread: bool = False
) -> Iterator[None]:
    """In this block `observer` sees the calls of the `chosen` layers of a model that have heads, on this thread or on
    every one.

    Blocks may be nested: observers are called in the order of their blocks, and each changes what the one before it
    gives. The real rows of encoder-decoder attention are those of the decoder's last self-attention of that size in the
    block, which is observed too. `hk.analysis.observe` says what is refused.
    """
    asks_cross = any(layer.kind == "cross" for layer in chosen)
    decoders = _decoders(model) if asks_cross else []
    also = [layer for layer in decoders if layer not in chosen]
    rows: dict[tuple[int, int], Tensor] = {}

    def see(layer: AttentionLayer, call: AttentionCall) -> Change | None:
        if layer.num_heads != call.H:
            was = f"says that it has {layer.num_heads} heads, but runs {call.H}"
            refuse(str(layer), was, "set its attribute num_heads")
        if not isinstance(layer.module, Multihead):  # those know it themselves
            call = replace(call, self_attention=layer.kind != "cross")
        if call.self_attention:
            if layer in decoders:
                rows[call.B, call.T] = call.real_queries
        elif (call.B, call.T) in rows:
            call = replace(call, rows=rows[call.B, call.T])
        return None if layer in also else observer(layer, call)

    layers = [*chosen, *also]
    for layer in layers:
        check_runs_operators(layer)
    thread = None if every_thread else threading.current_thread()
    with ExitStack() as stack:
        for layer in layers:
            if layer.num_heads:
                own = partial(see, layer)
                stack.callback(_Slot.enter(layer, own, thread).leave, own)
        yield


def _decoders(model: nn.Module) -> list[AttentionLayer]:
    """The self-attention layers whose real rows encoder-decoder attention uses: the decoder's, if the model has one."""
    runs = [layer for layer in attention_layers(model) if layer.runs_operators]
    decoder = [layer for layer in runs if layer.kind == "decoder"]
    return decoder or [layer for layer in runs if layer.kind != "cross"]


class _Pass(threading.local):
    """The pass of a thread: whether it has called the observer, and whether a change of outputs is still to be made."""

    called = False
    due = False


class _Slot:
    """The attribute `observer` of a module while a thread observes it; deep copies and pickles have none."""

    def __init__(self, layer: AttentionLayer) -> None:
        self._layer = layer
        #: In the order of their blocks; the thread that each observes, or None for every one.
        self._observers: dict[CallObserver, threading.Thread | None] = {}
        self._was_there = "observer" in vars(layer.module)  # its value is None
        self._pass = _Pass()
        self._hooks: tuple[RemovableHandle, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """In a copy or a pickle of the module it is None, and the hooks, which were copied before it, are removed."""
        return _remove, self._hooks

    @classmethod
    def enter(cls, layer: AttentionLayer, observer: CallObserver, thread: threading.Thread | None) -> _Slot:
        with _LOCK:
            slot = getattr(layer.module, "observer", None)
            if slot is None or (isinstance(slot, cls) and slot._layer.module is not layer.module):
                slot = cls(layer)
            elif not isinstance(slot, cls):
                refuse(str(layer), "is observed already", "set its observer to None first")
            # First, so that a block which ends meanwhile leaves the slot where it is.
            slot._observers[observer] = thread
            slot._put_into(layer.module)
            return slot

    def leave(self, observer: CallObserver) -> None:
        with _LOCK:
            del self._observers[observer]
            if self._hooks and not self._observers:
                _remove(*self._hooks)
                self._hooks = ()
                self._take_from(self._layer.module)

    def _put_into(self, module: Any) -> None:
        if not self._hooks:
            # Not methods, which a copy of the module would bind to a copy of this slot.
            self._hooks = (
                module.register_forward_pre_hook(partial(_of_slot, _Slot.begin)),
                module.register_forward_hook(partial(_of_slot, _Slot.check_called)),
            )
            module.observer = self

    def _take_from(self, module: Any) -> None:
        del module.observer
        if self._was_there:
            module.observer = None

    def __call__(self, call: AttentionCall) -> Change | None:
        self._pass.called = True
        changes = [change for observer in self._own() if (change := observer(call)) is not None]
        if not changes:
            return None
        self._pass.due = True

        def change_in_turn(heads: Tensor) -> Tensor:
            self._pass.due = False
            for change in changes:
                heads = change(heads)
            return heads

        return change_in_turn

    def _own(self) -> list[CallObserver]:
        """The observers of this thread."""
        here = None, threading.current_thread()
        return [observer for observer, thread in list(self._observers.items()) if thread in here]

    def begin(self, module: nn.Module) -> None:
        """A pass of the module, or of a shallow copy, which has the same slot and hooks."""
        if module is not self._layer.module:
            if getattr(module, "_is_replica", False):
                was = "runs as a replica of nn.DataParallel, on a thread that a block does not see"
                refuse(str(self._layer), was, "run the model that it holds: parallel.module")
            self._take_from(module)
        elif self._own():
            check_runs_operators(self._layer)
        self._pass.called = self._pass.due = False  # the pass before may have ended in an error

    def check_called(self, module: nn.Module) -> None:
        if not self._own():
            return
        is_a = f"is a {type(self._layer.module).__name__}, which does not"
        if not self._pass.called:
            instead = "its forward must pass a hk.analysis.AttentionCall to self.observer"
            refuse(str(self._layer), f"{is_a} call its observer", instead)
        if self._pass.due:
            instead = "its forward must pass the outputs of the heads to what self.observer returns, unless it is None"
            refuse(str(self._layer), f"{is_a} change the outputs of its heads", instead)


def _of_slot(method: Callable[[_Slot, nn.Module], None], module: nn.Module, *_: object) -> None:
    """A hook of the modules that have a slot: a method of the slot that the module has now."""
    if isinstance(slot := vars(module).get("observer"), _Slot):
        method(slot, module)


def _remove(*hooks: RemovableHandle) -> None:
    for hook in hooks:
        hook.remove()
