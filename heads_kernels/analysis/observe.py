"""Observe the attention calls of a model while it runs; passes of a model over data, and keys by their tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from heads_kernels.checks import is_int, refuse, refuse_type
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.heads.observers import observed
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.snapshot import evaluating

Observer = Callable[[AttentionLayer, AttentionCall], None]
#: What `AttentionLayer.kind` may be.
KINDS: Final = ("encoder", "decoder", "cross")
#: Token ids; or a function of the batch that gives bool `[B, S]`, or `{kind of layer: [B, S]}`.
TokenKeys: TypeAlias = Collection[int] | Callable[[Any], Tensor | Mapping[str, Tensor]]


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
        TypeError, ValueError: a layer does not exist, or has an observer that was set by hand; the attention function
            of a transformers model is not this package's, now or in a forward pass; in the forward pass, a layer ran
            without calling its observer, with another number of heads than it says, or in a replica of
            `nn.DataParallel`.
    """
    if not callable(observer):
        refuse_type("observer", observer, "pass a function of an AttentionLayer and its AttentionCall")
    chosen = choose_layers(attention_layers(model), layers)

    def see(layer: AttentionLayer, call: AttentionCall) -> None:
        observer(layer, call)  # what it returns is not a change of the outputs

    with observed(model, chosen, see):
        yield chosen


# ---------------------------------------------------------------------- passes over data
@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with `requires_grad=False` for all weights; both are restored after the block.

    Weights created under `torch.inference_mode()` are not changed, since they never have a gradient.
    """
    asking = [p for p in model.parameters() if p.requires_grad and not p.is_inference()]
    with evaluating(model):
        try:
            for parameter in asking:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in asking:
                parameter.requires_grad_(True)


@contextmanager
def reading(model: nn.Module, observer: Observer, layers: Collection[AttentionLayer]) -> Iterator[None]:
    """In this block the model runs in evaluation mode without gradients, and `observer` sees the calls of `layers`."""
    with torch.no_grad(), evaluation(model), observed(model, layers, observer):
        yield


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that does nothing on other threads, which may run the same modules."""
    own = threading.get_ident()
    return lambda *arguments: hook(*arguments) if threading.get_ident() == own else None


def each_batch(data: Iterable[Any], argument: str = "data") -> Iterator[Any]:
    """The batches of `data`, at least one; a single batch or text is refused. Errors name `argument`."""
    if isinstance(data, (str, bytes, Tensor, Mapping)) or not isinstance(data, Iterable):
        refuse_type(argument, data, "pass an iterable of batches, [batch] for a single one")
    empty = True
    for batch in data:
        empty = False
        yield batch
    if empty:
        refuse(argument, "has no batches", "pass [batch] for a single one; a generator works only once")


def run(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: keyword arguments in a mapping, arguments in a tuple or list, or one argument."""
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    if parts and all(isinstance(part, (str, bytes)) for part in parts):
        refuse("batch", "is text", "pass the output of the tokenizer", TypeError)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*parts)


# ---------------------------------------------------------------------- keys by their tokens
def keys_by_kind(
    tokens: TokenKeys | None, batch: Any, layers: Iterable[AttentionLayer], argument: str
) -> dict[str, Tensor]:
    """The keys of a batch that are `tokens`, `{kind of layer: bool [B, S]}`; kinds that are absent have none.

    Ids are looked up in the batch's `input_ids`, for the decoder's self-attention in an encoder-decoder model in
    `decoder_input_ids`. `layers` are all of the model; errors name `argument`.
    """
    kinds = {layer.kind for layer in layers}
    if tokens is None:
        return {}
    if callable(tokens):
        given = tokens(batch)
        found = dict(given) if isinstance(given, Mapping) else dict.fromkeys(kinds, given)
        instead = "give a bool tensor [B, S], or {kind: [B, S]} of 'encoder', 'decoder' or 'cross'"
        for kind, keys in found.items():
            if kind not in KINDS:
                refuse(argument, f"gave the kind {kind!r}", instead)
            if not isinstance(keys, Tensor):
                refuse(argument, f"gave a {type(keys).__name__}", instead, TypeError)
        return found
    if isinstance(tokens, (str, Tensor)) or not isinstance(tokens, Collection):
        refuse_type(argument, tokens, "pass a list of token ids or a function of a batch")
    if not all(map(is_int, tokens)):
        refuse(argument, f"is {tokens!r}", "pass token ids, which are ints", TypeError)
    names = dict.fromkeys(kinds, "input_ids")
    if {"decoder", "cross"} <= kinds:
        names["decoder"] = "decoder_input_ids"
    for name in names.values():
        if not isinstance(batch, Mapping) or name not in batch:
            was = f"names token ids, but a batch has no {name!r}"
            refuse(argument, was, "pass it in a mapping, or a function of a batch")
    return {
        kind: torch.isin(batch[name], torch.tensor([*tokens], device=batch[name].device))
        for kind, name in names.items()
    }
