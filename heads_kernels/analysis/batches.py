"""A pass of a model over data: evaluation mode, batches, a progress bar, and excluded keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from heads_kernels.checks import is_int, refuse
from heads_kernels.heads.layers import AttentionLayer

#: What `AttentionLayer.kind` may be.
KINDS: Final = ("encoder", "decoder", "cross")
#: Token ids; or a function of the batch that gives bool `[B, S]`, or `{kind of layer: [B, S]}`.
ExcludeKeys: TypeAlias = Collection[int] | Callable[[Any], Tensor | Mapping[str, Tensor]]


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with `requires_grad=False` for all weights; both are restored after the block.

    Weights created under `torch.inference_mode()` are not changed, since they never have a gradient.
    """
    training = {module: module.training for module in model.modules()}
    asking = [p for p in model.parameters() if p.requires_grad and not p.is_inference()]
    try:
        model.eval()
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)
        for module, mode in training.items():
            module.training = mode


# ---------------------------------------------------------------------- batches
def each_batch(
    data: Iterable[Any], title: str, progress: bool, argument: str = "data"
) -> Iterator[Any]:
    """The batches of `data`, with a progress `bar` if `progress`; errors name `argument`.

    Raises:
        TypeError: `data` is not an iterable of batches.
        ValueError: `data` is empty.
    """
    checked = batches(data, argument)
    empty = True
    with bar(title, length(data), progress) as advance:
        for batch in checked:
            empty = False
            yield batch
            advance()
    if empty:
        refuse(
            argument, "has no batches", "pass [batch] for a single one; a generator works only once"
        )


def batches(data: Iterable[Any], argument: str = "data") -> Iterable[Any]:
    """`data`, checked to be an iterable of batches for `run`.

    Raises:
        TypeError: `data` is a single batch, a string, or not iterable.
    """
    if isinstance(data, (str, bytes, Tensor, Mapping)) or not isinstance(data, Iterable):
        was = f"is a {type(data).__name__}"
        refuse(argument, was, "pass an iterable of batches, [batch] for a single one", TypeError)
    return data


def run(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: keyword arguments in a mapping, arguments in a tuple or list, or one argument.

    Raises:
        TypeError: the batch is text, or contains only text.
    """
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    if parts and all(isinstance(part, (str, bytes)) for part in parts):
        refuse("batch", "is text", "pass the output of the tokenizer", TypeError)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def length(data: Any) -> int | None:
    """Number of batches; None if unknown, such as for a loader of an iterable data set."""
    try:
        return len(data)
    except TypeError:
        return None


@contextmanager
def bar(text: str, total: int | None, shown: bool) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each step; shows a bar on a terminal if rich is installed.

    Args:
        text: title of the bar.
        total: number of steps; None if unknown.
        shown: False shows nothing.
    """
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        shown = False
    if shown:
        console = Console(stderr=True)
        if console.is_terminal or console.is_jupyter:
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task(text, total=total)
                yield lambda: progress.advance(task)
            return
    yield lambda: None


# ---------------------------------------------------------------------- excluded keys
def excluded_keys(
    exclude_keys: ExcludeKeys | None,
    batch: Any,
    layers: Iterable[AttentionLayer],
    argument: str = "exclude_keys",
) -> dict[str, Tensor]:
    """The excluded keys of a batch, `{kind of layer: bool [B, S]}`; kinds that are absent exclude none.

    Args:
        exclude_keys: token ids, looked up in the batch's `input_ids` (for the decoder's self-attention in an
            encoder-decoder model, in `decoder_input_ids`); or a function of the batch that returns a bool tensor
            `[B, S]` for all layers, or `{kind: [B, S]}` with kinds "encoder", "decoder" and "cross".
        batch: as passed to the model; a mapping if `exclude_keys` are token ids.
        layers: those of the model.
        argument: the name of `exclude_keys` in errors.

    Raises:
        TypeError, ValueError: `exclude_keys` is something else, or a batch does not contain the ids.
    """
    kinds = {layer.kind for layer in layers}
    if exclude_keys is None:
        return {}
    if callable(exclude_keys):
        given = exclude_keys(batch)
        found = dict(given) if isinstance(given, Mapping) else dict.fromkeys(kinds, given)
        _check_given(found, argument)
        return found
    if isinstance(exclude_keys, (str, Tensor)) or not isinstance(exclude_keys, Collection):
        was = f"is a {type(exclude_keys).__name__}"
        refuse(argument, was, "pass a list of token ids or a function of a batch", TypeError)
    ids = list(exclude_keys)
    if not all(map(is_int, ids)):
        refuse(argument, f"is {ids!r}", "pass token ids, which are ints", TypeError)
    names = dict.fromkeys(kinds, "input_ids")
    if {"decoder", "cross"} <= kinds:
        names["decoder"] = "decoder_input_ids"
    for name in names.values():
        if not isinstance(batch, Mapping) or name not in batch:
            was = f"names token ids, but a batch has no {name!r}"
            refuse(argument, was, "pass it in a mapping, or a function of a batch")
    return {
        kind: torch.isin(batch[name], torch.tensor(ids, device=batch[name].device))
        for kind, name in names.items()
    }


def _check_given(found: Mapping[Any, Any], argument: str) -> None:
    """Check the result of a function of a batch: existing kinds, with a tensor each."""
    instead = "give a bool tensor [B, S], or {kind: [B, S]} of 'encoder', 'decoder' or 'cross'"
    for kind, keys in found.items():
        if kind not in KINDS:
            refuse(argument, f"gave the kind {kind!r}", instead)
        if not isinstance(keys, Tensor):
            refuse(argument, f"gave a {type(keys).__name__}", instead, TypeError)
