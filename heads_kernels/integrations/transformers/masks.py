"""The masks of transformers' mask functions as `hk.Mask`s, and the biases that T5's layers hand on to each other.

A forward pass has one mask, in the form of a flex attention mask, which models pass on unread. What intervals cannot
express becomes a bool tensor; what is added to scores becomes the operator's `bias`. Padded query rows are computed,
since some models read them; the modules of `hk.nn` hide them in self-attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from heads_kernels.checks import refuse
from heads_kernels.mask import Mask
from heads_kernels.mask.kept import is_watched
from heads_kernels.mask.terms import Alignment, Causal, KeyMask, Term, Window
from heads_kernels.nn.multihead import Context
from heads_kernels.offset_bias import OffsetBias

MaskFunction = Callable[..., Any]
Shape = tuple[int, int, int, int]

#: Modules that compute with the masks of a pass, which are no tensors, and what they do.
_COMPUTE_WITH_MASKS: Final = {
    "BigBirdPegasusEncoderAttention": "adds masks to its scores",
    "DogeAttention": "makes masks of its own and drops those of flex attention",
    "GitSelfAttention": "adds masks to its scores",
    "InformerProbSparseAttention": "adds masks to its scores",
    "T5Gemma2MergedAttention": "is given two masks concatenated",
}


def computes_with_masks(kind: type) -> str | None:
    """What modules of this class, or of a class that it is made of, compute with the masks of a pass."""
    names = (base.__name__ for base in kind.__mro__)
    return next((_COMPUTE_WITH_MASKS[name] for name in names if name in _COMPUTE_WITH_MASKS), None)


_BLOCKS: Final = (
    "attention_mask has blocks of tokens that see one another, in compiled code or in chunks: "
    "use attn_implementation='eager' or 'sdpa'"
)


class PreparedMask(BlockMask):
    """The mask of a forward pass, shared by all layers. Only `attention_forward` can read it.

    As a `BlockMask` it passes in transformers for a mask that is already prepared. Model code may read its shape, dtype
    and device and pass it on. Any other use is refused: code that computes attention itself would add True and False to
    its scores, which hides nothing.
    """

    dtype = torch.bool
    ndim = 4

    def __init__(
        self, mask: Mask | Tensor, shape: Shape, device: torch.device | str, first: int | Tensor | None = None
    ) -> None:
        self.mask = mask  # the visible pairs; a bool tensor [B, 1, T, S] where `hk.Mask` cannot express them
        self.first = first  # that of `AttentionCall`, if known
        self.sizes = shape  # (B, 1, T, S) of the call
        self.device = device  # of the tensors of the call
        self.derived: dict[Any, Any] = {}  # what layers compute from it (`once`)

    @property
    def shape(self) -> Shape:
        """(B, 1, T, S)."""
        return self.sizes

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` computes, once for all layers that share the mask."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def contiguous(self) -> PreparedMask:
        """Returns itself; `generate` calls it."""
        return self

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.sizes if dim is None else self.sizes[dim]

    def to(self, device: torch.device | torch.dtype | str, *, non_blocking: bool = False) -> PreparedMask:
        """The mask on another device, for models that are spread over several; `to(torch.bool)` returns itself."""
        if device is torch.bool:
            return self
        if isinstance(device, (torch.dtype, Tensor)):
            _refuse_use("to")
        mask, first = tree_map_only(
            Tensor, lambda each: each.to(device, non_blocking=non_blocking), (self.mask, self.first)
        )
        return PreparedMask(mask, self.sizes, device, first)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        _refuse_use(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        _refuse_use(getattr(function, "__name__", str(function)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mask!r}, shape={self.sizes})"

    __str__ = __repr__


def _refuse_use(operation: str) -> NoReturn:
    """Refuse `operation` on a `PreparedMask`; the traceback has the line of the model that computes with it."""
    was = f"of attn_implementation='heads_kernels' is computed with ({operation})"
    refuse("attention_mask", was, "load the model with attn_implementation='eager' or 'sdpa'")


def _refusing(operation: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: _refuse_use(operation)


#: Operations of flex attention's masks and of tensors that are refused. Public names that only tensors have reach
#: `__getattr__`.
_REFUSED: Final = (
    "as_tuple", "from_kv_blocks", "numel", "sparsity", "to_dense", "to_string",
    *(f"__{name}__" for name in ("getitem", "setitem", "len", "iter", "bool", "invert", "neg", "float", "int")),
    *(f"__{side}{name}__" for side in ("", "r", "i")
      for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")),
    *(f"__{name}__" for name in ("lt", "le", "gt", "ge")),
)  # fmt: skip
for _name in _REFUSED:
    setattr(PreparedMask, _name, _refusing(_name))


def prepare_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> PreparedMask | None:
    """The mask of a forward pass: a mask function of transformers (`AttentionMaskInterface`).

    What transformers' own functions express (causal, bidirectional, windows, chunks, packed sequences; padding on
    either side; a growing or sliding cache) becomes an `hk.Mask`. Of data on a device no values are read, so nothing
    waits for it, but where transformers itself has read them, to see that sequences are packed.

    Args:
        batch_size, q_length, kv_length: B, T and S.
        q_offset, kv_offset: position of the first row, and of the first key: an int, or a tensor.
        mask_function: True where a key is visible, of (batch, head, position of the row, position of the key).
        attention_mask: bool `[B, positions]`, True = real key.
        local_size: size of the window or chunk, in keys.
        use_vmap: True where the caller wrote the function.

    Returns:
        A `PreparedMask`; None where a bidirectional pass has no padding. It holds the bool tensor of stock `sdpa_mask`
        for functions that the caller wrote, and where an offset is a tensor (decoding with a static cache: T = 1, and
        `[B, 1, 1, S]` has the shape of a key mask).
    """
    align = _alignment(q_length, kv_length, q_offset, kv_offset)
    sides = "allow_is_bidirectional_skip" in kwargs  # passed for bidirectional masks only
    first = None if sides else q_offset - kv_offset
    chunked = getattr(kwargs.get("config"), "attention_chunk_size", None) is not None
    mask: Mask | None = None
    if use_vmap or align is None:
        pass
    elif mask_function is bidirectional_mask_function:
        if attention_mask is None and kwargs.get("allow_is_bidirectional_skip", False):
            return None
        mask = Mask()
    elif mask_function is causal_mask_function:
        mask = Mask(causal=align)
    elif sides:  # a window on both sides
        if align == "upper_left" and local_size is not None:
            mask = Mask(window=(local_size, local_size))
    elif local_size is None and attention_mask is not None:
        pass  # blocks of tokens that see one another
    elif q_length == 1 or not _has_blocks(mask_function, (batch_size, kv_length, kv_offset), device, chunked):
        # The window of this size contains the chunk of this size.
        mask = Mask(causal=align, window=None if local_size is None else (local_size - 1, 0))
        if attention_mask is None or chunked:
            ids = _segments(mask_function, (batch_size, kv_length, kv_offset), device)
            rows = ids[:, :q_length] if align == "upper_left" else ids[:, kv_length - q_length :]
            mask = mask & Mask(document_ids=(rows, ids))
    if mask is None:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        dense: Any = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
        return PreparedMask(dense, tuple(dense.shape), device, first)
    if attention_mask is not None:
        mask = mask & Mask(key_mask=_real_keys(attention_mask, kv_length, kv_offset))
    mask = mask.snapshot()  # as stock masks, which are made once for a pass
    return PreparedMask(mask, (batch_size, 1, q_length, kv_length), device, first)


def _alignment(q_length: int, kv_length: int, q_offset: Any, kv_offset: Any) -> Alignment | None:
    """How rows are aligned with keys; None where `hk.Mask` cannot express it."""
    if isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor):
        return None
    if q_offset == kv_offset:
        return "upper_left"
    return "lower_right" if q_offset - kv_offset == kv_length - q_length else None


def _neighbours(sizes: tuple[int, int, int], device: torch.device | str) -> tuple[Tensor, ...]:
    """Arguments of mask functions: examples, heads, positions of keys from the second on, and of those before them."""
    batch_size, kv_length, kv_offset = sizes
    position = torch.arange(1, kv_length, device=device)[None] + kv_offset
    batch = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return batch, head, position, position - 1


def _has_blocks(
    mask_function: MaskFunction, sizes: tuple[int, int, int], device: torch.device | str, chunked: bool
) -> bool:
    """Whether a key is visible to the row before it: in blocks of tokens that see one another.

    It is asked of positions on the CPU: a window is known without waiting for the device. Where values cannot be read,
    and of chunks, which have data, the device asserts that there are no blocks.
    """
    unread = chunked or is_watched()
    batch, head, position, before = _neighbours(sizes, device if unread else "cpu")
    found = mask_function(batch, head, before, position).any()
    if not unread:
        return bool(found)
    torch._assert_async(~found, _BLOCKS)
    return False


def _segments(mask_function: MaskFunction, sizes: tuple[int, int, int], device: torch.device | str) -> Tensor:
    """The index of each key's packed sequence or chunk, int64 `[B or 1, S]`: a key that cannot see the one before it
    starts the next."""
    ends = ~mask_function(*_neighbours(sizes, device))  # [B or 1, S - 1]
    return torch.nn.functional.pad(ends.cumsum(1), (1, 0))


def _real_keys(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """`attention_mask` at the positions of the keys, `[B, S]`; positions beyond its end are hidden."""
    end = kv_offset + kv_length
    missing = end - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset:end]


def whole_mask(module: nn.Module, context: Context, attention_mask: PreparedMask | Tensor) -> Mask:
    """The mask of whole sequences whose part is `attention_mask`; made once for a pass.

    It has the same causal and window terms, and the padding of all parts.
    """
    if not isinstance(attention_mask, PreparedMask) or isinstance(attention_mask.mask, Tensor):
        was = f"of {type(module).__name__} is a tensor of pairs, of which this process has a part"
        refuse("attention_mask", was, "pass a padding mask [B, T], or none")
    found = attention_mask.mask

    def join() -> Mask:
        terms: list[Term] = []
        for term in found.terms:
            if isinstance(term, KeyMask):
                terms.append(KeyMask(context.join(term.real.to(torch.uint8), 1).bool()))
            elif isinstance(term, (Causal, Window)):
                terms.append(term)
            else:
                was = f"of {type(module).__name__} has {term}, of which this process has a part"
                instead = "pass attention_mask, of ones without padding; packed sequences and chunks are not split"
                refuse("attention_mask", was, instead)
        return Mask.of(tuple(terms))

    whole: Mask = attention_mask.once("whole", join)
    return whole


# ---------------------------------------------------------------------- biases by the distance of keys
class RelativeBias:
    """The `position_bias` that layers hand on, in place of a tensor `[1, H, T, S]`.

    It keeps the module that has the embedding: a layer that is checkpointed runs again in the backward pass, and has to
    look its values up again for the embedding to get its gradient. The module's `offset_table(T, S, start)` is the
    table of a call's `OffsetBias`.
    """

    def __init__(self, module: Any, start: int = 0) -> None:
        self.module = module  # None: nothing is added, as in cross-attention
        self.start = start  # position of the first query row
        self.found: OffsetBias
        self.call: tuple[Any, ...] | None = None  # the call that `found` is for, without gradients

    def offsets(self, kept_heads: Tensor | None, sizes: tuple[int, int], device: torch.device) -> OffsetBias | None:
        """The bias of a call of sizes (T, S), of these heads or of all of them; None where nothing is added.

        Without gradients it is computed once for all layers that this object is handed to.
        """
        if self.module is None or (kept_heads is not None and len(kept_heads) == 0):
            return None
        call = (*sizes, device)
        if torch.is_grad_enabled() or self.call != call:
            table = self.module.offset_table(*sizes, self.start)
            self.found = OffsetBias(table.to(device).contiguous(), first=1 - sizes[0])
            self.call = None if torch.is_grad_enabled() else call
        found = self.found
        return found if kept_heads is None else OffsetBias(found.values[kept_heads], found.first)
