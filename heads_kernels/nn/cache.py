"""Keys and values of earlier decoding steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from heads_kernels.checks import check_tensor, refuse


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

    Its capacity doubles when it is full. A call that fails leaves it as it was.

    Raises:
        TypeError, ValueError: a call has another batch, width or dtype than the cache, or fills it while gradients are
            recorded (decode under `torch.no_grad()`); one cache is used in self-attention and in encoder-decoder
            attention; or the layer has other key heads than the one that filled it, as after pruning or conversion.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Empty the cache: the next call starts a new sequence."""
        self._stored: tuple[Tensor, ...] = ()  # each [B, capacity, ...]
        #: S: number of cached positions.
        self.length = 0
        self._appended = False
        self._holds = ""  # in words
        #: What a layer carries from row to row, `[B, ...]`, or None.
        self.running: Tensor | None = None

    def length_after(self, positions: int, appended: bool) -> int:
        """`length` after a call with `positions` keys: self-attention appends them, other calls fill an empty cache."""
        if appended:
            return self.length + positions
        return self.length if self._stored else positions

    @contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """If this block fails, the cache is as before; tensors may have changed past `length`, which is never read."""
        before = self._stored, self.length, self._appended, self._holds, self.running
        try:
            yield
        except BaseException:
            self._stored, self.length, self._appended, self._holds, self.running = before
            raise

    def __repr__(self) -> str:
        return f"KeyValueCache(length={self.length}, {_kinds(self._stored) or 'empty'})"

    def hold(self, holds: str) -> None:
        """Prepare a call of a layer that reads what these words say; one that holds something else is refused."""
        if self._holds not in ("", holds):
            was = f"holds {self._holds}, but the layer reads {holds}"
            refuse("cache", was, "use one for each layer, and reset it after pruning or conversion")
        self._holds = holds
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            # Outside of the mode that made them, tensors can be neither changed nor saved for a backward pass.
            self._stored = tuple(each.clone() if each.is_inference() else each for each in self._stored)

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append `new`, each `[B, positions, ...]`; returns views `[B, length, ...]` of everything cached."""
        if self._stored and not self._appended:
            refuse("cache", "holds the source of encoder-decoder attention", "use one for each")
        _check_unrecorded(new)
        start, length = self.length, self.length + new[0].shape[1]
        self._reserve(new, length)
        for stored, tensor in zip(self._stored, new, strict=True):
            stored[:, start:length] = tensor
        self.length, self._appended = length, True
        return tuple(stored[:, :length] for stored in self._stored)

    def once(self, source: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The tensors `[B, S, ...]` that `source()` returned in the first call."""
        if self._appended:
            refuse("cache", "holds the tokens of self-attention", "use one for each")
        if not self._stored:
            stored = source()
            _check_unrecorded(stored)
            self._stored, self.length = stored, stored[0].shape[1]
        return self._stored

    def reorder(self, beams: Tensor) -> None:
        """For beam search: row b continues with the cache of row `beams[b]`; integers, one per new row."""
        check_tensor("beams", beams, "pass an int64 or int32 tensor of one dimension", (1,), (torch.int64, torch.int32))
        self._stored = tuple(stored.index_select(0, beams) for stored in self._stored)
        if self.running is not None:
            self.running = self.running.index_select(0, beams)

    def _reserve(self, new: tuple[Tensor, ...], length: int) -> None:
        """Allocate `length` positions for tensors like `new`."""
        held, come = _kinds(self._stored), _kinds(new)
        if held and held != come:
            was = f"holds {held}, but the call appends {come}"
            refuse("cache", was, "use it with one layer, batch and dtype, or reset it")
        capacity = self._stored[0].shape[1] if held else 0
        if length > capacity or not held:  # without tokens too: of no positions
            capacity = max(length, 2 * capacity)
            grown = tuple(t.new_empty((t.shape[0], capacity, *t.shape[2:])) for t in new)
            for old, stored in zip(self._stored, grown, strict=False):
                stored[:, : self.length] = old[:, : self.length]
            self._stored = grown


def _check_unrecorded(tensors: tuple[Tensor, ...]) -> None:
    """Refuse to record gradients: the cache would keep their graph alive."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        refuse("cache", "is filled while gradients are recorded", "use torch.no_grad()")


def _kinds(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    """Batch size, widths and dtype of each."""
    return [(*t.shape[:1], *t.shape[2:], t.dtype) for t in tensors]
