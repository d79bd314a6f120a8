"""`Mask`, as callers write it: a tuple of terms, one per argument, combined by AND."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from heads_kernels.checks import MAX_LENGTH, check_broadcast, check_int, is_int, refuse, shown
from heads_kernels.mask.intervals import Device, Intervals, device_of
from heads_kernels.mask.kept import capturing, is_unchanged, is_watched, readable, state_of
from heads_kernels.mask.terms import (
    INTEGERS,
    Alignment,
    Bounds,
    Causal,
    Dense,
    KeyLengths,
    KeyMask,
    Prefix,
    QueryLengths,
    QueryMask,
    Term,
    parse_causal,
    parse_documents,
    parse_lengths,
    parse_tensor,
    parse_windows,
)


class Mask:
    """Which keys each query row may see. Several arguments, like `a & b`, hide every pair that any of them hides.

    For row i of T, key j of S, batch b and head h:

    causal          True or "upper_left": `j <= i`, as in `scaled_dot_product_attention`;
                    "lower_right": `j <= i + S - T`, for decoding with a cache
    key_lengths     integers `[B]` or `[1]`: `j < key_lengths[b]`
    query_lengths   integers `[B]` or `[1]`: rows `i >= query_lengths[b]` see no key
    key_mask        bool `[B or 1, S]`, True = real key: padding on either side, holes anywhere
    query_mask      bool `[B or 1, T]`, True = real row: other rows see no key
    window          `(left, right)`, -1 unlimited: `i - left <= j <= i + right`;
                    with causal="lower_right", i + S - T replaces i. One for each head: a list of H such pairs, or
                    integers `[H, 2]`
    first_keys      an int, a list of H ints or integers `[H]`, only with window: the left side of the window does not
                    hide keys `j < first_keys[h]`. The right side, causal and other arguments hide them as usual
    document_ids    integers `[S]` or `[B or 1, S]` (T == S), ascending, or a pair `(query_ids, key_ids)`,
                    key_ids ascending: row i sees the keys with its own id
    prefix_lengths  integers `[B]` or `[1]`, only with causal: `j < prefix_lengths[b]` is visible too

    `window`, `first_keys` and `prefix_lengths` are aligned by the `causal` of the same Mask: in
    `Mask(causal="lower_right") & Mask(window=...)` the window is still upper-left aligned.

    Tensors are not copied, have no gradient and must be on the device of the query. Lengths may also be a list of ints,
    which is copied to a GPU once. Calls of the same sizes, such as the layers of a model, share what is computed from
    the mask, until PyTorch writes to one of its tensors. On a GPU, make a new Mask after a write that PyTorch does not
    count: through `tensor.data`, in a kernel of your own or in the replay of a CUDA graph. (A call that is captured in
    a graph always computes it anew.) For a compiled training step, make it outside of `torch.inference_mode`, whose
    tensors compiled code cannot save for a backward pass.

    Raises TypeError or ValueError that names the argument: at construction for its type and rank, in a call if it does
    not fit B, T and S. Values (lengths in range, ids ascending) are checked only on the CPU and outside
    `torch.compile`, where reading them is free. Elsewhere lengths are clamped to [0, S] or [0, T], and the result for
    unsorted ids is unspecified.

        hk.Mask(causal=True, key_mask=tokens != pad)
        hk.Mask(causal="lower_right", window=(4095, 0))
        hk.Mask(causal=True, window=[(-1, 0), (255, 0)], first_keys=[0, 64])
        hk.Mask.from_cu_seqlens(cu_seqlens, total) & hk.Mask(causal=True)
    """

    _terms: tuple[Term, ...]
    _tensors: tuple[Tensor, ...]  # of the terms
    _last: tuple[object, object, Intervals] | None = None  # the last (call, state, its intervals)

    def __init__(
        self,
        causal: bool | Alignment = False,
        key_lengths: Tensor | Sequence[int] | None = None,
        query_lengths: Tensor | Sequence[int] | None = None,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        window: tuple[int, int] | Sequence[tuple[int, int]] | Tensor | None = None,
        document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        prefix_lengths: Tensor | Sequence[int] | None = None,
        first_keys: Tensor | Sequence[int] | int | None = None,
    ) -> None:
        align = parse_causal(causal)
        terms: tuple[Term, ...] = ()
        if prefix_lengths is not None:
            if align is None:
                refuse("prefix_lengths", "is given without causal", "pass causal=True or causal='lower_right' too")
            terms += (Prefix(parse_lengths("prefix_lengths", prefix_lengths), align),)
        elif align is not None:
            terms += (Causal(align),)
        if window is not None:
            terms += (parse_windows(window, first_keys, align or "upper_left"),)
        elif first_keys is not None:
            refuse("first_keys", "is given without window", "pass window=(left, right) too")
        if key_lengths is not None:
            terms += (KeyLengths(parse_lengths("key_lengths", key_lengths)),)
        if query_lengths is not None:
            terms += (QueryLengths(parse_lengths("query_lengths", query_lengths)),)
        if key_mask is not None:
            layout = "pass a bool tensor [B, S], True = real key"
            terms += (KeyMask(parse_tensor("key_mask", key_mask, (torch.bool,), (2,), layout)),)
        if query_mask is not None:
            layout = "pass a bool tensor [B, T], True = real row"
            real = parse_tensor("query_mask", query_mask, (torch.bool,), (2,), layout)
            terms += (QueryMask(real),)
        if document_ids is not None:
            terms += (parse_documents(document_ids),)
        self._set(terms)

    def _set(self, terms: tuple[Term, ...]) -> None:
        values = (value for term in terms for value in term.values())
        self._terms = terms
        self._tensors = tuple(dict.fromkeys(v for v in values if isinstance(v, Tensor)))

    @property
    def terms(self) -> tuple[Term, ...]:
        """One per argument, in a fixed order."""
        return self._terms

    @classmethod
    def of(cls, terms: tuple[Term, ...]) -> Mask:
        """The mask of these terms."""
        mask = cls()
        mask._set(terms)
        return mask

    def snapshot(self) -> Mask:
        """A copy of the mask and its tensors: later writes to the original tensors do not change it."""
        terms = (type(term)(*(v.clone() if isinstance(v, Tensor) else v for v in term.values())) for term in self.terms)
        return Mask.of(tuple(terms))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, total: int) -> Mask:
        """Packed documents by their borders: document d is [cu_seqlens[d], cu_seqlens[d + 1]).

        `cu_seqlens`: integers `[documents + 1]`, ascending from 0. `total`: T = S, an int; padding from
        `cu_seqlens[-1]` to `total` is one more document.
        """
        layout = "pass an integer tensor [documents + 1]"
        cu_seqlens = parse_tensor("cu_seqlens", cu_seqlens, INTEGERS, (1,), layout)
        check_int("total", total, "pass the packed length as an int")
        if is_int(total) and not 0 <= total <= MAX_LENGTH:
            refuse("total", f"is {shown(total)}", f"pass a length from 0 to {MAX_LENGTH}")
        if readable(cu_seqlens):
            borders = cu_seqlens.tolist()
            if borders[:1] != [0] or borders != sorted(borders) or borders[-1] > total:
                refuse("cu_seqlens", f"is {borders}", f"pass ascending borders, from 0 to at most total = {total}")
        j = torch.arange(total, device=cu_seqlens.device)
        return cls(document_ids=torch.searchsorted(cu_seqlens.to(torch.int64), j, right=True))

    def __and__(self, other: Mask) -> Mask:
        if isinstance(other, Tensor):
            instead = "write mask & hk.Mask(key_mask=tensor) for padding [B, S], or"
            instead += " attn_mask=mask.to_dense(B, H, T, S) & tensor for a dense mask"
            refuse("&", "joins a Mask and a Tensor", instead, TypeError)
        if not isinstance(other, Mask):
            return NotImplemented
        if not self.terms or not other.terms:
            return self if self.terms else other
        return Mask.of(self.terms + other.terms)

    __rand__ = __and__  # for Tensor & Mask, which raises the same error
    __iand__ = __and__  # for Dynamo of PyTorch 2.11, which traces no &= without it

    def intervals(self, B: int, H: int, T: int, S: int, device: Device | None = None) -> Intervals:
        """The `Intervals` of the mask for a call of these sizes on `device` (default: the device of its tensors).

        The last result is cached and reused while the tensors hold the same values (`kept.is_unchanged`), so that the
        layers of a model share it.
        """
        if not isinstance(device, torch.device):
            device = device_of(self._tensors) if device is None else torch.device(device)
        if is_watched():
            return self.compute_intervals(B, H, T, S, device)
        # A tensor made in inference mode cannot be saved for a backward pass.
        call = B, H, T, S, device, torch.is_inference_mode_enabled()
        last = self._last  # read once: another thread may replace it
        if last is not None and last[0] == call and not capturing(device):
            _, state, intervals = last
            if is_unchanged(self._tensors, state, device):
                return intervals
        state = state_of(self._tensors, device)
        intervals = self.compute_intervals(B, H, T, S, device)
        if state is None:
            return intervals
        if capturing(device):
            self._last = _CAPTURED
        elif self._last is not _CAPTURED:
            self._last = call, state, intervals
        return intervals

    def rows(self, positions: Tensor, B: int, H: int, T: int, S: int) -> Mask:
        """The mask of the query rows at `positions` of a call of these sizes.

        In a call with only these rows, in this order, each row sees the same keys as in the whole call. Context
        parallelism uses this for the rows of a process.

        Args:
            positions: integers `[rows]` in [0, T), on the device of the query.
            B, H, T, S: sizes of the whole call.
        """
        layout = "pass an integer tensor [rows]"
        index = parse_tensor("positions", positions, INTEGERS, (1,), layout).to(torch.int64)
        if readable(index) and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < T:
            refuse("positions", f"is from {int(index.min())} to {int(index.max())}", f"T is {T}")
        whole = self.intervals(B, H, T, S, positions.device)
        lo, hi = (x[..., index].clamp(0, S) for x in whole.bounds(T, index.device))
        terms: tuple[Term, ...] = (Bounds(lo, hi, whole.first_keys),)
        if whole.key_visible is not None:
            terms += (KeyMask(whole.key_visible),)
        if (dense := whole.dense_mask) is not None:
            terms += (Dense(dense if dense.shape[2] == 1 else dense[:, :, index]),)
        return Mask.of(terms)

    def compute_intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        """The `Intervals` of the mask, not cached: for a mask that is used once."""
        if not self.terms:
            return Intervals()
        parts = [term.intervals(B, H, T, S, device) for term in self.terms]
        for at, part in enumerate(parts):
            others = parts[:at] + parts[at + 1 :]
            if part.first_keys is not None and any(each.limits_first_keys for each in others):
                parts[at] = Intervals(dense_mask=part.to_dense(T, S, device))
        return reduce(and_, parts).laid_out(T).recordable()

    def __getstate__(self) -> dict[str, object]:
        return {"_terms": self.terms}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set(state["_terms"])

    def to_dense(self, B: int, H: int, T: int, S: int, device: Device | None = None) -> Tensor:
        """A bool tensor `[B or 1, H or 1, T, S]`, True = visible."""
        return self.intervals(B, H, T, S, device).to_dense(T, S, device)

    def __repr__(self) -> str:
        return f"Mask({', '.join(map(str, self.terms))})"


#: Replaces the cached intervals once a CUDA graph was captured with the mask: PyTorch does not count what replays
#: write to its tensors.
_CAPTURED: Final = (None, None, Intervals())


def as_mask(attn_mask: Mask | Tensor | None, shape: tuple[int, int, int, int]) -> Mask:
    """The `attn_mask` of an operator as a `Mask`, for a call of `shape` = (B, H, T, S).

    A bool tensor is as in `scaled_dot_product_attention`: True = may attend, broadcastable to
    `[B, H, T, S]`, so 2-D is `[T, S]`. `[B|1, 1, 1, S|1]` becomes a key mask, `[B|1, 1, T, 1]` a query
    mask, anything else a dense mask. An expanded dimension (stride 0) counts as one of size 1.
    """
    if attn_mask is None:
        return Mask()
    if isinstance(attn_mask, Mask):
        return attn_mask
    instead = "pass a hk.Mask, or a bool tensor with True = may attend (a float tensor is a bias)"
    parse_tensor("attn_mask", attn_mask, (torch.bool,), range(5), instead)
    check_broadcast("attn_mask", attn_mask, shape)
    for dim, stride in enumerate(attn_mask.stride()):
        if stride == 0:
            attn_mask = attn_mask.narrow(dim, 0, min(1, attn_mask.shape[dim]))
    b, h, t, s = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    if h == 1 and t == 1:
        return Mask.of((KeyMask(attn_mask.reshape(b, s).expand(-1, shape[3]), "attn_mask"),))
    if h == 1 and s == 1:
        return Mask.of((QueryMask(attn_mask.reshape(b, t), "attn_mask"),))
    return Mask.of((Dense(attn_mask.reshape(b, h, t, s)),))


# ---------------------------------------------------------------------- a pytree, whose leaves are its tensors
#: In the context of the tree, the place of a leaf.
_LEAF: Final = True


def _constant(value: object) -> bool:
    return value is None or isinstance(value, (str, tuple))


def _flatten(mask: Mask) -> tuple[list[Any], Any]:
    rows = [(type(term), term.values()) for term in mask.terms]
    leaves = [value for _, row in rows for value in row if not _constant(value)]
    return leaves, tuple((kind, tuple(value if _constant(value) else _LEAF for value in row)) for kind, row in rows)


def _flatten_with_keys(mask: Mask) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, context = _flatten(mask)
    return [(pytree.SequenceKey(at), leaf) for at, leaf in enumerate(leaves)], context


def _unflatten(leaves: Iterable[Any], context: Any) -> Mask:
    rest = iter(leaves)
    return Mask.of(tuple(kind(*(next(rest) if value is _LEAF else value for value in row)) for kind, row in context))


def _to_json(context: Any) -> Any:
    return [[kind.__name__, row] for kind, row in context]


def _from_json(context: Any) -> Any:
    kinds = {kind.__name__: kind for kind in Term.__subclasses__()}
    return tuple((kinds[name], _as_tuples(row)) for name, row in context)


def _as_tuples(value: Any) -> Any:
    """JSON has lists for tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


pytree.register_pytree_node(
    Mask,
    _flatten,
    _unflatten,
    serialized_type_name="heads_kernels.Mask",
    to_dumpable_context=_to_json,
    from_dumpable_context=_from_json,
    flatten_with_keys_fn=_flatten_with_keys,
)
# for torch.load(weights_only=True)
torch.serialization.add_safe_globals([Mask, *Term.__subclasses__()])
