"""Merged attention: attention to an encoder, plus the average of a decoder's rows so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads_kernels.checks import refuse
from heads_kernels.mask import Mask
from heads_kernels.mask.terms import Bounds, Documents, QueryLengths, QueryMask
from heads_kernels.nn.attention import GatedMultiheadAttention
from heads_kernels.nn.cache import KeyValueCache


class MergedAttention(GatedMultiheadAttention):
    """Self-attention and encoder-decoder attention of a decoder in one layer (Zhang, Titov, Sennrich 2019, MAtt).

    Self-attention is replaced by the average of the rows up to each row, which shares the values' projection with
    encoder-decoder attention, and both share the output projection:

        out = sum_h g_h * (softmax(scale * X W_Q^h (Y W_K^h)^T) Y W_V^h + mean(X) W_V^h) W_O^h + b_O
        mean(X)_t = (x_1 + ... + x_t) / t

    Call it as `layer(x, memory, key_padding_mask=...)`. A gate multiplies both parts of a head, so that a closed head
    can be pruned. The average is over real rows: those that the `query_mask` or `query_lengths` of `mask` hides are
    left out, and are 0 before `out_proj`. With a `KeyValueCache`, which holds the sum of earlier rows, a decoding step
    takes constant time.

    Args:
        embed_dim, num_heads, options: as in `GatedMultiheadAttention`. `vdim` is `embed_dim`, since rows and memory
            have one projection.

    Raises:
        ValueError: a call without `key`, with packed documents or rows by position (their averages would mix), or under
            context parallelism.
    """

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        if self.vdim != self.embed_dim:
            was = f"is {self.vdim}, but embed_dim is {self.embed_dim}"
            refuse("vdim", was, "make them equal: rows and memory have one projection")

    def beside(self, query: Tensor, mask: Mask, cache: KeyValueCache | None) -> Tensor:
        if self.context is not None:
            was = "is set, but the average is over all earlier rows of a sequence"
            refuse("context", was, "set it to None, and pass whole sequences")
        real = _real_rows(mask, query)
        means = _means(query, real, cache).to(query.dtype)
        heads = self.by_head("v_proj", means, self.num_key_heads, self.value_dim).transpose(1, 2)
        heads = heads.repeat_interleave(self.num_heads // max(1, self.num_key_heads), 1)
        return heads if real is None else heads.where(real[:, None, :, None], 0.0)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if key is query:
            refuse("key", "is None or query", "pass the output of the encoder")
        super()._check(query, key, value)


def _real_rows(mask: Mask, query: Tensor) -> Tensor | None:
    """bool `[B or 1, T]`: the rows that `mask` does not hide as padding; None: all."""
    B, T, _ = query.shape
    for term in mask.terms:
        if isinstance(term, (Documents, Bounds)):
            was = f"has {term.argument}, but the average is over all earlier rows"
            refuse("mask", was, "pass sequences as [B, T, embed_dim] with padding masks")
    padding = (term for term in mask.terms if isinstance(term, (QueryMask, QueryLengths)))
    of_one_key = Mask.of(tuple(padding)).intervals(B, 1, T, 1, query.device)
    return None if of_one_key.k_hi is None else of_one_key.k_hi[:, 0] > 0


def _means(x: Tensor, real: Tensor | None, cache: KeyValueCache | None) -> Tensor:
    """The mean of the real rows up to each row, `[B, T, E]`, or 0; those of earlier calls are in `cache`."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if real is None:
        real = torch.ones((), dtype=torch.bool, device=x.device)
    else:
        x = x.where(real[..., None], 0.0)
    counts = real.to(x.dtype).expand(x.shape[:2])[..., None]
    before = x.new_zeros(x.shape[0], 1, x.shape[2] + 1)
    if cache is not None and cache.running is not None:
        before = cache.running
    sums = torch.cat((before, torch.cat((x, counts), 2)), 1).cumsum(1)
    if cache is not None:
        cache.running = sums[:, -1:].clone()
    return sums[:, 1:, :-1] / sums[:, 1:, -1:].clamp(min=1.0)
