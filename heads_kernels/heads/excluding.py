"""Keys that are no words, such as [CLS], [SEP] or EOS: how a reader of attention names them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from heads_kernels.checks import is_int
from heads_kernels.errors import refuse
from heads_kernels.heads.layers import AttentionLayer

#: What `AttentionLayer.kind` may be.
KINDS: Final = ("encoder", "decoder", "cross")
#: Token ids; or a function of the batch that gives bool `[B, S]`, or `{kind of layer: [B, S]}`.
ExcludeKeys: TypeAlias = Collection[int] | Callable[[Any], Tensor | Mapping[str, Tensor]]


def excluded_keys(
    exclude_keys: ExcludeKeys | None, batch: Any, layers: Iterable[AttentionLayer]
) -> dict[str, Tensor]:
    """The keys of a batch to leave out, `{kind of layer: bool [B, S]}`; of kinds that it lacks, none.

    Args:
        exclude_keys: token ids, looked up in the batch's `input_ids`, of an encoder-decoder model in its
            `decoder_input_ids` for the keys of the decoder's self-attention; or a function of the batch that gives a
            bool tensor `[B, S]` for all layers, or one for each kind, "encoder", "decoder" or "cross".
        batch: as the model gets it; a mapping where there are token ids.
        layers: those of the model.

    Raises:
        TypeError, ValueError: something else, or a batch without the ids.
    """
    kinds = {layer.kind for layer in layers}
    if exclude_keys is None:
        return {}
    if callable(exclude_keys):
        given = exclude_keys(batch)
        found = dict(given) if isinstance(given, Mapping) else dict.fromkeys(kinds, given)
        _check_given(found)
        return found
    if isinstance(exclude_keys, (str, Tensor)) or not isinstance(exclude_keys, Collection):
        was = f"is a {type(exclude_keys).__name__}"
        refuse("exclude_keys", was, "pass a list of token ids or a function of a batch", TypeError)
    ids = list(exclude_keys)
    if not all(map(is_int, ids)):
        refuse("exclude_keys", f"is {ids!r}", "pass token ids, which are ints", TypeError)
    names = dict.fromkeys(kinds, "input_ids")
    if {"decoder", "cross"} <= kinds:
        names["decoder"] = "decoder_input_ids"
    for name in names.values():
        if not isinstance(batch, Mapping) or name not in batch:
            was = f"names token ids, but a batch has no {name!r}"
            refuse("exclude_keys", was, "pass it in a mapping, or a function of a batch")
    return {
        kind: torch.isin(batch[name], torch.tensor(ids, device=batch[name].device))
        for kind, name in names.items()
    }


def _check_given(found: Mapping[Any, Any]) -> None:
    """What a function of a batch gave is of kinds that there are, a tensor each."""
    instead = "give a bool tensor [B, S], or {kind: [B, S]} of 'encoder', 'decoder' or 'cross'"
    for kind, keys in found.items():
        if kind not in KINDS:
            refuse("exclude_keys", f"gave the kind {kind!r}", instead)
        if not isinstance(keys, Tensor):
            refuse("exclude_keys", f"gave a {type(keys).__name__}", instead, TypeError)
