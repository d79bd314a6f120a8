"""A model's attention, looked at while it runs: every call of an operator goes by an observer first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from heads_kernels.errors import refuse
from heads_kernels.heads.gating import check_runs_operators
from heads_kernels.heads.layers import AttentionLayer, attention_layers, find_layer
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.nn.multihead import Multihead

Observer = Callable[[AttentionLayer, AttentionCall], None]


@contextmanager
def observe(
    model: nn.Module, observer: Observer, layers: Iterable[int | str] | None = None
) -> Iterator[list[AttentionLayer]]:
    """In this block `observer(layer, call)` is called at every attention of the model, before its operator runs.

        def look(layer, call):
            print(layer.name, call.statistics().entropy.mean((0, 2)))

        with hk.analysis.observe(model, look):
            model(ids)

    What the observer keeps of a call stays in memory; the maps `[T, S]` never are in it. Calls come in the order in
    which layers run, those of a layer that runs several times (ALBERT) several times. The rows of encoder-decoder
    attention are real where those of the decoder's last self-attention of that size were, whether or not that is among
    `layers`; where none of it has heads, those that see a key are.

    Args:
        model: with attention layers of the table; a transformers model after `hk.integrations.transformers.use(model)`.
        observer: takes the `AttentionLayer` and its `AttentionCall`.
        layers: a list of indices or names of layers; default all that have heads.

    Raises:
        ValueError: a layer that doesn't exist or is observed already, a transformers model whose attention function
            is another.
    """
    there = attention_layers(model)
    chosen = there if layers is None else [find_layer(there, key, "layers") for key in layers]
    knowing = _knowing(there)
    is_asked = any(layer.kind == "cross" for layer in chosen)
    beside = [layer for layer in knowing if is_asked and layer not in chosen]
    looked_at = chosen + beside
    rows: dict[tuple[int, int], Tensor] = {}
    for layer in looked_at:
        check_runs_operators(layer)
        if getattr(layer.module, "observer", None) is not None:
            refuse(str(layer), "is observed already", "leave that block first")
    try:
        for layer in looked_at:
            if layer.num_heads:
                chosen_observer = None if layer in beside else observer
                layer.module.observer = _see(layer, chosen_observer, rows, layer in knowing)
        yield chosen
    finally:
        for layer in looked_at:
            layer.module.__dict__.pop("observer", None)


def _knowing(layers: list[AttentionLayer]) -> list[AttentionLayer]:
    """Those whose rows encoder-decoder attention has: the decoder's, where the model has one."""
    decoder = [layer for layer in layers if layer.kind == "decoder"]
    return decoder or [layer for layer in layers if layer.kind != "cross"]


def _see(
    layer: AttentionLayer,
    observer: Observer | None,
    rows: dict[tuple[int, int], Tensor],
    is_knowing: bool,
) -> Callable[[AttentionCall], None]:
    """What `layer` calls: it hands calls on to `observer`, and keeps the rows of self-attention that `is_knowing`."""

    def see(call: AttentionCall) -> None:
        if not isinstance(layer.module, Multihead):  # those know it themselves
            call = replace(call, self_attention=layer.kind != "cross")
        if call.self_attention:
            if is_knowing:
                rows[call.B, call.T] = call.real_queries
        elif (call.B, call.T) in rows:
            call = replace(call, rows=rows[call.B, call.T])
        if observer is not None:
            observer(layer, call)

    return see
