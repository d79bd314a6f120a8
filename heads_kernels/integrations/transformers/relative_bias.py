"""Relative position biases of T5 and its relatives, whose layers hand the bias of the first on to the others."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from heads_kernels.heads.configs import NAME
from heads_kernels.integrations.transformers.replacement import Replacement
from heads_kernels.offset_bias import OffsetBias


class RelativeBias:
    """The `position_bias` that layers hand on, in place of a tensor `[1, H, T, S]`.

    It keeps the module that has the embedding rather than its values: a layer that is checkpointed runs again in the
    backward pass, and has to look them up again for the embedding to get its gradient.

    Args:
        module: the module that has the embedding, whose `offset_table(T, S, start)` is the table of a call's
            `OffsetBias`; None: nothing is added, as in cross-attention.
        start: position of the first query row.
    """

    def __init__(self, module: Replacement | None, start: int = 0) -> None:
        self.module = module
        self.start = start
        self.found: OffsetBias
        self.call: tuple[Any, ...] | None = None  # the call that `found` is for, without gradients

    def offsets(
        self, kept_heads: Tensor | None, sizes: tuple[int, int], device: torch.device
    ) -> OffsetBias | None:
        """The bias of a call of sizes (T, S), of these heads or of all of them; None where nothing is added.

        Without gradients it is worked out once for all layers that this object is handed to.
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


class OwnRelativePositions(Replacement):
    """Attention with T5's biases, which looks them up in an embedding of its own: nothing of size `[H, T, S]` is made.

    UMT5's stock forward takes no bias of another layer: it adds zeros in cross-attention, where it has no embedding.
    """

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> RelativeBias | Tensor:
        """What the stock forward adds to the scores. While decoding with a static cache, whose length is a tensor, it
        is the stock tensor of one row."""
        if self.config._attn_implementation != NAME or isinstance(past_seen_tokens, Tensor):
            return self._stock_bias(query_length, key_length, device, past_seen_tokens)
        return RelativeBias(self, past_seen_tokens)

    def _stock_bias(self, *args: Any) -> Tensor:
        stock: Any = super()
        bias: Tensor = stock.compute_bias(*args)
        return bias

    def offset_table(self, T: int, S: int, start: int) -> Tensor:
        """The bias at every offset of keys from T rows that start at position `start`, `[H, T + S - 1]`: that of the
        last row and as many more keys."""
        row = self._stock_bias(1, max(T + S - 1, 1), None, start + T - 1)  # [1, H, 1, T + S - 1]
        return row[0, :, 0]


class RelativePositions(OwnRelativePositions):
    """Layers that take the bias of the first. In cross-attention nothing is added in the place of zeros."""

    def forward(
        self, hidden_states: Tensor, *args: Any, position_bias: Any = None, **kwargs: Any
    ) -> Any:
        is_ours = self.config._attn_implementation == NAME
        if is_ours and position_bias is None and not self.has_relative_attention_bias:
            position_bias = RelativeBias(None)
        return super().forward(hidden_states, *args, position_bias=position_bias, **kwargs)


class PaddedRelativePositions(RelativePositions):
    """Switch Transformers', whose encoder makes a mask of floats `[B, 1, 1, S]` of its padding: 0 where visible."""

    def forward(self, hidden_states: Tensor, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation == NAME and isinstance(mask, Tensor):
            mask = mask == 0
        return super().forward(hidden_states, mask, *args, **kwargs)


#: Stock class -> what stands before it, and the folder of transformers.models that it is in.
T5_LIKE: Final[dict[str, tuple[type[Replacement], str]]] = {
    "LongT5Attention": (RelativePositions, "longt5"),
    "MT5Attention": (RelativePositions, "mt5"),
    "Pix2StructTextAttention": (RelativePositions, "pix2struct"),
    "Pop2PianoAttention": (RelativePositions, "pop2piano"),
    "SwitchTransformersAttention": (PaddedRelativePositions, "switch_transformers"),
    "T5Attention": (RelativePositions, "t5"),
    "UMT5Attention": (OwnRelativePositions, "umt5"),
    "UdopAttention": (RelativePositions, "udop"),
}
