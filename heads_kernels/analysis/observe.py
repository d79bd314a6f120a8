"""Observe the attention calls of a model while it runs.

Calls of the operators have operands, mask and scale for any model. The mask shows which rows and keys are tokens: a
token sees itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.heads.observers import observed
from heads_kernels.nn.attention_call import AttentionCall

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
    key. Blocks may be nested; a block acts on the thread that entered it alone. Under `torch.compile` it breaks the
    graph.

    Args:
        model: with attention layers (`hk.heads.attention_layers`); a transformers model after
            `hk.integrations.transformers.use(model)`.
        observer: takes the `AttentionLayer` and its `AttentionCall`.
        layers: a list of indices or names of layers; default all that have heads.

    Your own modules are observed if their forward passes an `AttentionCall` to `self.observer`, unless that is None:
    `AttentionCall.of(hk.gated_attention, query, key, value, mask)`.

    Raises:
        ValueError: a layer does not exist, or has an observer that was set by hand; the attention function of a
            transformers model is not this package's, now or in a forward pass; in the forward pass, a layer ran without
            calling its observer.
    """
    every = attention_layers(model)
    chosen = choose_layers(every, layers)

    def see(layer: AttentionLayer, call: AttentionCall) -> None:
        observer(layer, call)  # what it returns is not a change of the outputs

    with observed(every, chosen, see):
        yield chosen
