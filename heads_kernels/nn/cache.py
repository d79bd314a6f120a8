"""Keys and values of earlier decoding steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heads_kernels.checks import check_size, check_tensor, refuse


class KeyValueCache:
    """Keys and values of one attention layer, kept between decoding steps.

    Call the layer with the same cache in every step. In self-attention it appends the keys and values of the new
    tokens, whose rows see all cached keys; `is_causal=True` is then aligned at the last key. In encoder-decoder
    attention the first call fills the cache, and later calls ignore their key and value. Collaborative attention
    keeps the shared key `[B, S, Ds]`, the values `[B, S, Hv, Dv]` and the content bias; merged attention also the sum
    of earlier rows.

        cache = hk.nn.KeyValueCache()
        for token in tokens.split(1, dim=1):  # [B, 1, embed_dim]
            out, _ = layer(token, is_causal=True, cache=cache)

    Args:
        max_length: number of positions to reserve in the first step of self-attention; longer sequences raise an
            error. None: the capacity doubles when it is full.

    Raises:
        TypeError, ValueError: `max_length` is not a positive int; a call has another batch, width or dtype than the
            cache, or fills it while gradients are recorded (decode under `torch.no_grad()`); one cache is used in
            self-attention and in encoder-decoder attention.
    """

    def __init__(self, max_length: int | None = None) -> None:
        if max_length is not None:
            check_size("max_length", max_length)
        self.max_length = max_length
        self.reset()

    def reset(self) -> None:
        """Empty the cache: the next call starts a new sequence."""
        self._stored: tuple[Tensor, ...] = ()  # each [B, capacity, ...]
        self._length = 0
        self._appended = False
        #: What a layer carries from row to row, `[B, ...]`, or None.
        self.running: Tensor | None = None

    @property
    def length(self) -> int:
        """S: number of cached positions."""
        return self._length

    def length_after(self, positions: int, appended: bool) -> int:
        """`length` after a call with `positions` keys: self-attention appends them, other calls fill an empty cache."""
        if appended:
            return self._length + positions
        return self._length if self._stored else positions

    def __repr__(self) -> str:
        capacity = "" if self.max_length is None else f" of {self.max_length}"
        if not self._stored:
            return f"KeyValueCache(empty, max_length={self.max_length})"
        kind = "self-attention" if self._appended else "encoder-decoder attention"
        held = f"length={self._length}{capacity}, {kind}, {_layouts(self._stored)}"
        return f"KeyValueCache({held})"

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append `new`, each `[B, positions, ...]`; returns views `[B, length, ...]` of everything cached."""
        if self._stored and not self._appended:
            refuse("cache", "holds the source of encoder-decoder attention", "use one for each")
        _check_unrecorded(new)
        start, length = self._length, self._length + new[0].shape[1]
        self._reserve(new, length)
        for stored, tensor in zip(self._stored, new, strict=True):
            stored[:, start:length] = tensor
        self._length, self._appended = length, True
        return tuple(stored[:, :length] for stored in self._stored)

    def once(self, source: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The tensors `[B, S, ...]` that `source()` returned in the first call."""
        if self._appended:
            refuse("cache", "holds the tokens of self-attention", "use one for each")
        if not self._stored:
            stored = source()
            _check_unrecorded(stored)
            self._stored, self._length = stored, stored[0].shape[1]
        return self._stored

    def reorder(self, beams: Tensor) -> None:
        """For beam search: row b continues with the cache of row `beams[b]`; integers, one per new row."""
        instead = "pass an int64 or int32 tensor of one dimension"
        check_tensor("beams", beams, instead, (1,), (torch.int64, torch.int32))
        self._stored = tuple(stored.index_select(0, beams) for stored in self._stored)
        if self.running is not None:
            self.running = self.running.index_select(0, beams)

    def _reserve(self, new: tuple[Tensor, ...], length: int) -> None:
        """Allocate `length` positions for tensors like `new`."""
        if self.max_length is not None and length > self.max_length:
            was = f"is {self.max_length}, but {length} positions are needed"
            refuse("max_length", was, "create a longer cache")
        held = tuple((s.shape[:1] + s.shape[2:], s.dtype) for s in self._stored)
        come = tuple((t.shape[:1] + t.shape[2:], t.dtype) for t in new)
        if held and held != come:
            was = f"holds {_layouts(self._stored)}, but the call appends {_layouts(new)}"
            refuse("cache", was, "use it with one layer, batch and dtype, or reset it")
        capacity = self._stored[0].shape[1] if held else 0
        if length > capacity:
            capacity = self.max_length or max(length, 2 * capacity)
            grown = tuple(t.new_empty((t.shape[0], capacity, *t.shape[2:])) for t in new)
            for old, stored in zip(self._stored, grown, strict=False):
                stored[:, : self._length] = old[:, : self._length]
            self._stored = grown


def _check_unrecorded(tensors: tuple[Tensor, ...]) -> None:
    """Refuse to record gradients: the cache would keep their graph alive."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        refuse("cache", "is filled while gradients are recorded", "use torch.no_grad()")


def _layouts(tensors: tuple[Tensor, ...]) -> str:
    return " and ".join(
        f"{str(t.dtype).removeprefix('torch.')}[{t.shape[0]}, S, {', '.join(map(str, t.shape[2:]))}]"
        for t in tensors
    )
