"""Packs the arguments of a layer's call, the real tokens of a padded batch in one row, or says why it cannot."""

from __future__ import annotations

from dataclasses import dataclass, field
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


# ---------------------------------------------------------------------- where the real tokens are
class Padding(NamedTuple):
    """The real tokens of the rows, or of the keys, of a mask."""

    packing: Packing  # where they are
    moves: bool  # packing moves some; of one row that is padded on the right it moves none
    has_holes: bool  # padding is between real tokens of a row
    first: bool = True  # the first token of every row is real
    last: bool = True  # the last one is

    @classmethod
    def of(cls, real: Tensor) -> Padding:
        packing = Packing.of(real)
        index, rows = packing.index, packing.rows
        N = len(index)
        if packing.is_whole or N == 0:
            return cls(packing, False, False)
        holes = ((index.diff() != 1) & (rows.diff() == 0)).any()
        ends = real[:, 0].all(), real[:, -1].all()
        end, *found = torch.stack((index[-1], holes, *ends)).tolist()
        return cls(packing, end != N - 1, *map(bool, found))


class PackedMask(PreparedMask):
    """The mask of a packed row, and what was packed for the layers that share it."""

    def __init__(self, mask: Mask, padding: Padding, padded: PreparedMask) -> None:
        N = len(padding.packing.index)
        super().__init__(mask, (1, 1, N, N), padded.device)
        self.padding = padding  # what was packed
        self.padded = padded  # the mask of the rows as they were, of keys that the rows are

    def pack(self, packing: Packing, padded: Tensor) -> Tensor:
        """A tensor packed, once for all layers unless it has a gradient."""
        if padded.requires_grad:
            return packing.pack(padded)
        # `padded` is kept too: while it lives, no other tensor has its id.
        packed: Tensor = self.once(id(padded), lambda: (padded, packing.pack(padded)))[1]
        return packed

    def cross(self, keys: Padding) -> PreparedMask:
        """The mask of the packed rows and of keys that are packed too."""
        rows, ids = self.padding.packing.rows, keys.packing.rows
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
    padding = Padding.of(real)
    padded = PreparedMask(Mask.of(shape) & Mask(key_mask=real), (B, 1, T, T), mask.device)
    return PackedMask(Mask.of(shape) & Mask(document_ids=padding.packing.rows), padding, padded)


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


@dataclass(frozen=True)
class PackedCall:
    """How the arguments of a layer are packed: by its own mask, and the encoder's states by `keys`."""

    mask: PackedMask
    keys: Padding | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Of calls of one kind, one is checked."""
        terms = tuple(type(term) for term in cast(Mask, self.mask.mask).terms)
        return terms, self.mask.padding[1:], self.keys and self.keys[1:]

    def argument(self, name: str, value: Any) -> Any:
        of_keys = _is_of_keys(name)
        if isinstance(value, PreparedMask):
            return self.mask.cross(self.keys) if of_keys and self.keys else self.mask
        rows = self.mask.padding.packing
        keys = rows if self.keys is None else self.keys.packing
        if isinstance(value, EncoderDecoderCache):
            own, cross = value.self_attention_cache, value.cross_attention_cache
            both = EncoderDecoderCache(PackedCache(own, rows), PackedCache(cross, keys))
            both.is_updated = value.is_updated
            return both
        if isinstance(value, Cache):
            return PackedCache(value, rows)
        if name == "hidden_states":
            return rows.pack(value)
        if _is_as_it_is(name):
            return value
        packing = keys if of_keys else rows
        return tree_map(lambda each: self.mask.pack(packing, each) if has_tokens(each) else each, value)

    def cross_mask(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The mask of the encoder's states, where the call has none."""
        if self.keys is None or arguments.get("encoder_attention_mask") is not None:
            return {}
        return {"encoder_attention_mask": self.mask.cross(self.keys)}


def without_cache(value: Any) -> Any:
    """An argument of a check, which must not fill a cache: None for the cache, and a mask without its other keys."""
    if isinstance(value, Cache):
        return None
    if isinstance(value, PreparedMask) and (packed := value.derived.get(PackedMask)) is not None:
        return packed.padded
    return value


def _is_of_keys(name: str) -> bool:
    return name.startswith(("encoder_", "cross_"))


def _is_as_it_is(name: str) -> bool:
    """Whether a packed row takes the same argument: head masks, and the positions that a cache is written at."""
    return name.endswith("head_mask") or name == "cache_position"


def has_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1


# ---------------------------------------------------------------------- which calls are packed
def packed_call(layer: Any, own: UnpaddedLayer, arguments: dict[str, Any]) -> PackedCall | str | None:
    """How to pack a call of a layer.

    None if it runs as it is, because there is no padding or padded rows are asked for. A string, the reason, if it runs
    as it is although there may be padding.
    """
    masks = [value for name, value in arguments.items() if isinstance(value, PreparedMask) and not _is_of_keys(name)]
    pairs = arguments.get("attention_mask")
    if not masks and isinstance(pairs, Tensor) and pairs.dim() == 4 and pairs.shape[-1] > 1:
        return "attention_mask is a tensor for pairs of tokens"
    if len(masks) != 1 or masks[0].sizes[2] == 1 or _is_of_padded_rows(layer, own, arguments):
        return None
    mask: PackedMask | None = masks[0].once(PackedMask, lambda: _packed_mask(masks[0]))
    states = arguments.get("encoder_hidden_states")
    keys = None if states is None else _keys(states, arguments.get("encoder_attention_mask"))
    if mask is None:
        return None
    if isinstance(keys, str):
        return keys
    found = [each.packing for each in (mask.padding, keys) if each is not None]
    if all(each.is_whole for each in found) or any(len(each.index) == 0 for each in found):
        return None
    if why := _why_not(own, mask, keys, arguments):
        return why
    return PackedCall(mask, keys)


def _keys(states: Tensor, mask: Any) -> Padding | str:
    """The real tokens of an encoder's states; or why they cannot be packed."""
    B, S = states.shape[:2]
    if mask is None:
        return Padding.of(torch.ones((), dtype=torch.bool, device=states.device).expand(B, S))
    is_padding = isinstance(mask, PreparedMask) and isinstance(mask.mask, Mask)
    if not is_padding or any(not isinstance(term, KeyMask) for term in mask.mask.terms):
        return "encoder_attention_mask is no padding mask"
    real = _real(mask, S)
    if real is None:
        return "encoder_attention_mask is not known"
    found: Padding = mask.once(Padding, lambda: Padding.of(real))
    return found


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


def _why_not(own: UnpaddedLayer, mask: PackedMask, keys: Padding | None, arguments: dict[str, Any]) -> str | None:
    B, T = mask.padding.packing.sizes
    terms = cast(Mask, mask.mask).terms
    counts = own.distances or any(isinstance(each, RelativeBias) for each in arguments.values())
    if mask.padding.has_holes and (counts or any(isinstance(each, Window) for each in terms)):
        return "it counts positions between tokens, and there is padding between real ones"
    if own.adds_zeros and keys is not None:
        return "its cross-attention makes a bias of all pairs of the packed rows"
    for name, value in arguments.items():
        lengths = (B, T) if keys is None or not _is_of_keys(name) else keys.packing.sizes
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, Tensor) and each.dim() and not _is_as_it_is(name):
                batch, length = (*each.shape, 0)[:2]
                if each.dim() > 3 or length != lengths[1] or batch not in (1, B):
                    return f"{name} has shape {list(each.shape)} in a batch of {B} rows of {T} tokens"
            elif not isinstance(each, (*_PLAIN, Tensor)):
                return f"{name} is a {type(each).__name__}"
    if arguments["hidden_states"].shape[:2] != (B, T):
        return f"hidden_states has shape {list(arguments['hidden_states'].shape)}"
    return None


#: Arguments beside tensors that a packed row takes as they are, or that have a packed form.
_PLAIN: Final = (bool, int, float, str, type(None), PreparedMask, Cache, RelativeBias)
