"""Observe the attention calls of a model while it runs.

Calls of the operators have operands, mask and scale for any model. The mask shows which rows and keys are tokens: a
token sees itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.heads.gating import check_runs_operators
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.nn.multihead import Multihead

Observer = Callable[[AttentionLayer, AttentionCall], None]


@contextmanager
def observe(
    model: nn.Module, observer: Observer, layers: Iterable[int | str] | None = None
) -> Iterator[list[AttentionLayer]]:
    """In this block, `observer(layer, call)` is called for every attention of the model, before its operator runs.

        def look(layer, call):
            print(layer.name, call.statistics().entropy.mean((0, 2)))

        with hk.analysis.observe(model, look):
            model(ids)

    A call holds its operands, but no maps `[T, S]`. Calls come in the order in which layers run; a layer that runs
    several times (ALBERT) is observed each time. The real rows of encoder-decoder attention are those of the decoder's
    last self-attention of that size, whether or not it is among `layers`; if that has no heads, the rows that see a
    key.

    Args:
        model: with attention layers (`hk.heads.attention_layers`); a transformers model after
            `hk.integrations.transformers.use(model)`.
        observer: takes the `AttentionLayer` and its `AttentionCall`.
        layers: a list of indices or names of layers; default all that have heads.

    Your own modules are observed if their forward passes an `AttentionCall` to `self.observer`, unless that is None:
    `AttentionCall.of(hk.gated_attention, query, key, value, mask)`.

    Raises:
        ValueError: a layer does not exist or is observed already; the attention function of a transformers model is not
            this package's, now or in a forward pass; in the forward pass, a layer ran without calling its observer.
    """
    there = attention_layers(model)
    chosen = choose_layers(there, layers)
    knowing = _knowing(there)
    is_asked = any(layer.kind == "cross" for layer in chosen)
    beside = [layer for layer in knowing if is_asked and layer not in chosen]
    looked_at = chosen + beside
    rows: dict[tuple[int, int], Tensor] = {}
    hooks = []
    own = [layer for layer in looked_at if "observer" in vars(layer.module)]  # its value is None
    for layer in looked_at:
        check_runs_operators(layer)
        if getattr(layer.module, "observer", None) is not None:
            refuse(str(layer), "is observed already", "leave that block first")
    try:
        for layer in looked_at:
            if layer.num_heads:
                chosen_observer = None if layer in beside else observer
                layer.module.observer = see = _See(layer, chosen_observer, rows, layer in knowing)
                hooks.append(layer.module.register_forward_hook(see.check_called))
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()
        for layer in looked_at:
            layer.module.__dict__.pop("observer", None)
        for layer in own:
            layer.module.observer = None


def _knowing(layers: list[AttentionLayer]) -> list[AttentionLayer]:
    """Those whose rows encoder-decoder attention has: the decoder's, where the model has one."""
    decoder = [layer for layer in layers if layer.kind == "decoder"]
    return decoder or [layer for layer in layers if layer.kind != "cross"]


class _See:
    """What `layer` calls: it hands calls on to `observer`, and keeps the rows of self-attention that `is_knowing`."""

    def __init__(
        self,
        layer: AttentionLayer,
        observer: Observer | None,
        rows: dict[tuple[int, int], Tensor],
        is_knowing: bool,
    ) -> None:
        self._layer, self._observer, self._rows = layer, observer, rows
        self._is_knowing, self._was_called = is_knowing, False

    def __call__(self, call: AttentionCall) -> None:
        self._was_called = True
        if self._layer.num_heads != call.H:
            was = f"says that it has {self._layer.num_heads} heads, but runs {call.H}"
            refuse(str(self._layer), was, "set its attribute num_heads")
        if not isinstance(self._layer.module, Multihead):  # those know it themselves
            call = replace(call, self_attention=self._layer.kind != "cross")
        if call.self_attention:
            if self._is_knowing:
                self._rows[call.B, call.T] = call.real_queries
        elif (call.B, call.T) in self._rows:
            call = replace(call, rows=self._rows[call.B, call.T])
        if self._observer is not None:
            self._observer(self._layer, call)

    def check_called(self, module: nn.Module, *_: object) -> None:
        """A forward hook of the layer: refuse another attention function, and a forward that calls no observer."""
        check_runs_operators(self._layer)
        if not self._was_called:
            was = f"is a {type(module).__name__}, which does not call its observer"
            instead = "its forward must pass a hk.analysis.AttentionCall to self.observer"
            refuse(str(self._layer), was, instead)
