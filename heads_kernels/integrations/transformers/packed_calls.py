"""Packs the arguments of a layer's call, the real tokens of a padded batch in one row, or says why it cannot."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache, EncoderDecoderCache

from heads_kernels.integrations.transformers.head_masks import pass_state, requests_statistics
from heads_kernels.integrations.transformers.masks import PreparedMask, RelativeBias
from heads_kernels.mask import Mask
from heads_kernels.mask.kept import traced
from heads_kernels.mask.terms import Causal, KeyMask, Window
from heads_kernels.nn import FixedGate, HardConcrete
from heads_kernels.nn.unpadding import Packing


@dataclass(eq=False)
class UnpaddedLayer:
    """What is known of a layer whose calls are packed."""

    name: str  # in its model
    attention: list[nn.Module]  # its attention modules
    distances: bool  # its scores have a bias by the distance of tokens
    adds_zeros: bool  # its cross-attention adds zeros of all pairs to the scores
    by_batch: bool  # something in it looks at a batch as a whole, or at its rows, in training
    probed: set[tuple[Any, ...]] = field(default_factory=set)  # kinds of calls that were checked against a padded one
    handles: list[Any] = field(default_factory=list)  # of the hooks


class RunsPadded(Exception):
    """A call runs as it is: nothing is to be packed, or padded rows are asked for, or for the reason that it has."""


# ---------------------------------------------------------------------- where the real tokens are
class PackedMask(PreparedMask):
    """The mask of a packed row, and what was packed for the layers that share it."""

    def __init__(self, mask: Mask, rows: Packing, padded: PreparedMask) -> None:
        N = len(rows.index)
        super().__init__(mask, (1, 1, N, N), padded.device)
        self.rows = rows  # what was packed
        self.padded = padded  # the mask of the rows as they were, of keys that the rows are

    def pack(self, packing: Packing, padded: Tensor) -> Tensor:
        """A tensor packed, once for all layers unless it has a gradient."""
        if padded.requires_grad:
            return packing.pack(padded)
        # `padded` is kept too: while it lives, no other tensor has its id.
        packed: Tensor = self.once(id(padded), lambda: (padded, packing.pack(padded)))[1]
        return packed

    def cross(self, keys: Packing) -> PreparedMask:
        """The mask of the packed rows and of keys that are packed too."""
        rows, ids = self.rows.rows, keys.rows
        sizes = 1, 1, len(rows), len(ids)
        cross: PreparedMask = self.once(
            id(keys), lambda: (keys, PreparedMask(Mask(document_ids=(rows, ids)), sizes, self.device))
        )[1]
        return cross


def _packed_mask(mask: PreparedMask) -> PackedMask | None:
    """The mask of a self-attention for the packed row; None if `hk.Mask` cannot express it."""
    if not isinstance(mask.mask, Mask):
        return None
    B, _, T, S = mask.sizes
    terms = mask.mask.terms
    shape = tuple(each for each in terms if not isinstance(each, KeyMask))
    is_causal = any(isinstance(each, Causal) for each in shape)
    if any(not isinstance(each, (Causal, Window)) or each.align != "upper_left" for each in shape):
        return None  # rows behind what a cache holds, or packed already
    if T != S and not (is_causal and T < S):  # keys that a static cache has no tokens for yet
        return None
    if (real := _real(mask, T)) is None:
        return None
    rows = Packing.of(real)
    padded = PreparedMask(Mask.of(shape) & Mask(key_mask=real), (B, 1, T, T), mask.device)
    return PackedMask(Mask.of(shape) & Mask(document_ids=rows.rows), rows, padded)


def _real(mask: PreparedMask, length: int) -> Tensor | None:
    """Which of the first keys of a mask are real, `[B, length]`; None if that cannot be known."""
    assert isinstance(mask.mask, Mask)
    real = [each.real for each in mask.mask.terms if isinstance(each, KeyMask)]
    if len(real) > 1:
        return None
    everything = torch.ones((), dtype=torch.bool, device=mask.device).expand(1, length)
    found = real[0][:, :length] if real else everything
    if type(found) is not Tensor or found.device.type == "meta":
        return None  # there are no values to look at
    return found.expand(mask.sizes[0], -1)


# ---------------------------------------------------------------------- what is packed
class PackedCache(Cache):
    """Wraps an empty cache in a packed call, so that it stores the padded batch, from which decoding continues."""

    def __init__(self, kept: Cache, packing: Packing) -> None:
        self.kept = kept
        self.packing = packing

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key, value = (
            self.packing.pad_back(each.transpose(1, 2)).transpose(1, 2) for each in (key_states, value_states)
        )
        kept = self.kept.update(key, value, *args, **kwargs)
        T = self.packing.sizes[1]
        key, value = (self.packing.pack(each[:, :, :T].transpose(1, 2)).transpose(1, 2) for each in kept)
        return key, value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "kept":
            raise AttributeError(name)
        return getattr(self.kept, name)


def without_cache(value: Any) -> Any:
    """An argument of a check, which must not fill a cache: None for the cache, and a mask without its other keys."""
    if isinstance(value, Cache):
        return None
    if not isinstance(value, PreparedMask):
        return value
    if (packed := value.derived.get(PackedMask)) is not None:
        return packed.padded
    if isinstance(value.mask, Tensor):  # of a layer that was not packed: the whole of its static cache
        T = value.sizes[2]
        return PreparedMask(value.mask[..., :T], (*value.sizes[:3], T), value.device)
    return value


# ---------------------------------------------------------------------- calls
class PackedCall(NamedTuple):
    """A call of a layer on real tokens alone."""

    mask: PackedMask
    arguments: dict[str, Any]  # by name
    kind: tuple[Any, ...]  # of calls of one kind, one is checked


def packed_call(layer: Any, own: UnpaddedLayer, arguments: dict[str, Any]) -> PackedCall:
    """A call of a layer packed by its own mask, and the encoder's states by theirs; or `RunsPadded` is raised."""
    masks = [value for name, value in arguments.items() if isinstance(value, PreparedMask) and not _is_of_keys(name)]
    pairs = arguments.get("attention_mask")
    if not masks and isinstance(pairs, Tensor) and pairs.dim() == 4 and pairs.shape[-1] > 1:
        raise RunsPadded("attention_mask is a tensor for pairs of tokens")
    if len(masks) != 1 or masks[0].sizes[2] == 1 or _is_of_padded_rows(layer, own, arguments):
        raise RunsPadded
    mask: PackedMask | None = masks[0].once(PackedMask, lambda: _packed_mask(masks[0]))
    if mask is None:
        raise RunsPadded
    states = arguments.get("encoder_hidden_states")
    keys = None if states is None else _keys(states, arguments.get("encoder_attention_mask"))
    found = [mask.rows] if keys is None else [mask.rows, keys]
    if all(each.is_whole for each in found) or any(len(each.index) == 0 for each in found):
        raise RunsPadded
    terms = tuple(type(term) for term in cast(Mask, mask.mask).terms)
    counts = own.distances or Window in terms or any(isinstance(each, RelativeBias) for each in arguments.values())
    if counts and mask.rows.kind.has_holes:
        raise RunsPadded("it counts positions between tokens, and there is padding between real ones")
    if own.adds_zeros and keys is not None:
        raise RunsPadded("its cross-attention makes a bias of all pairs of the packed rows")
    packed = {name: _packed(mask, keys, name, value) for name, value in arguments.items()}
    if keys is not None and arguments.get("encoder_attention_mask") is None:
        packed["encoder_attention_mask"] = mask.cross(keys)
    return PackedCall(mask, packed, (terms, *(each.kind for each in found)))


def _keys(states: Tensor, mask: Any) -> Packing:
    """The real tokens of an encoder's states."""
    B, S = states.shape[:2]
    if mask is None:
        return Packing.of(torch.ones((), dtype=torch.bool, device=states.device).expand(B, S))
    is_padding = isinstance(mask, PreparedMask) and isinstance(mask.mask, Mask)
    if not is_padding or any(not isinstance(term, KeyMask) for term in mask.mask.terms):
        raise RunsPadded("encoder_attention_mask is no padding mask")
    real = _real(mask, S)
    if real is None:
        raise RunsPadded("encoder_attention_mask is not known")
    found: Packing = mask.once(Packing, lambda: Packing.of(real))
    return found


def _packed(mask: PackedMask, keys: Packing | None, name: str, value: Any) -> Any:
    """An argument of a packed row."""
    rows = mask.rows
    packing = keys if keys is not None and _is_of_keys(name) else rows
    if isinstance(value, PreparedMask):
        return mask if packing is rows else mask.cross(packing)
    if isinstance(value, EncoderDecoderCache):
        own, cross = value.self_attention_cache, value.cross_attention_cache
        both = EncoderDecoderCache(PackedCache(own, rows), PackedCache(cross, keys or rows))
        both.is_updated = value.is_updated
        return both
    if isinstance(value, Cache):
        return PackedCache(value, rows)
    if type(value) in (tuple, list, torch.Size) or hasattr(value, "_fields"):
        return tree_map(partial(_packed, mask, keys, name), value)
    if not isinstance(value, Tensor):
        if not isinstance(value, _PLAIN):
            raise RunsPadded(f"{name} is a {type(value).__name__}")
        return value
    if value.dim() == 0 or _is_as_it_is(name):
        return value
    B, T = packing.sizes
    batch, length = (*value.shape, 0)[:2]
    is_states = name == "hidden_states"
    if value.dim() > 3 or length != T or (batch != B and (batch != 1 or is_states)):
        raise RunsPadded(f"{name} has shape {list(value.shape)} in a batch of {B} rows of {T} tokens")
    return packing.pack(value) if is_states else mask.pack(packing, value)


#: Arguments beside tensors, masks and caches that a packed row takes as they are.
_PLAIN: Final = (bool, int, float, str, type(None), RelativeBias)


def _is_of_keys(name: str) -> bool:
    return name.startswith(("encoder_", "cross_"))


def _is_as_it_is(name: str) -> bool:
    """Whether a packed row takes the same tensor: head masks, and the positions that a cache is written at."""
    return name.endswith("head_mask") or name == "cache_position"


def _is_of_padded_rows(layer: Any, own: UnpaddedLayer, arguments: dict[str, Any]) -> bool:
    """Whether a call needs padded rows, or depends on the batch as a whole."""
    if (layer.training and own.by_batch) or getattr(layer, "chunk_size_feed_forward", 0):
        return True
    on_gpu = arguments["hidden_states"].is_cuda
    if traced() or torch._C._get_tracing_state() is not None or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return True  # what is recorded serves other batches too
    if (state := pass_state()) is not None and state.collects:
        is_first, state.has_begun = not state.has_begun, True
        # transformers takes the embeddings from the arguments of the first layer
        if is_first or state.collects != {"output_hidden_states"}:
            return True
    for module in own.attention:
        if getattr(module, "observer", None) is not None or requests_statistics(module):
            return True
        gate = getattr(module, "head_gate", None)
        is_shared = type(gate) is HardConcrete and not gate.per_sample  # by all examples
        if gate is not None and not (type(gate) is FixedGate or is_shared):
            return True
    return False
