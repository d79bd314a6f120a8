"""Replacements for forwards of transformers whose scores have a bias.

Those that compute attention themselves call the operator. T5 and its relatives hand on what is small, not `[H, T, S]`.

ALiBi stays the bias by key position that BLOOM and MPT compute: it is as small as a table of offsets and, unlike a
function of the distance, exact if padding has holes.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from heads_kernels.heads.interface import NAME
from heads_kernels.integrations.transformers.masks import RelativeBias
from heads_kernels.integrations.transformers.replacement import Replacement
from heads_kernels.ops.statistics import AttentionStatistics


class Biased(Replacement):
    """A layer whose stock forward computes attention itself."""

    calls_operator = True

    def by_heads(self, hidden_states: Tensor, *projections: Any) -> list[Tensor]:
        """What each of these projections gives, `[B, H, T, D]`."""
        found = (each(hidden_states) for each in projections)
        return [each.unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2) for each in found]

    def attend(self, *operands: Any, **options: Any) -> tuple[Tensor, AttentionStatistics | None]:
        """Without a mask every row sees every key, as in the stock forward."""
        return super().attend(*operands, is_causal=False, **options)


# ---------------------------------------------------------------------- T5: layers hand the bias of the first on
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
            bias: Tensor = self.stock("compute_bias", query_length, key_length, device, past_seen_tokens)
            return bias
        return RelativeBias(self, past_seen_tokens)

    def offset_table(self, T: int, S: int, start: int) -> Tensor:
        """The bias at every offset of keys from T rows that start at position `start`, `[H, T + S - 1]`: that of the
        last row and as many more keys."""
        row: Tensor = self.stock("compute_bias", 1, max(T + S - 1, 1), None, start + T - 1)
        return row[0, :, 0]  # of [1, H, 1, T + S - 1]


class RelativePositions(OwnRelativePositions):
    """Layers that take the bias of the first. In cross-attention nothing is added in the place of zeros."""

    def forward(self, hidden_states: Tensor, *args: Any, position_bias: Any = None, **kwargs: Any) -> Any:
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


# ---------------------------------------------------------------------- MPNet
class MPNetBias(Replacement):
    """The encoder, which computes the bias of all layers: per offset instead of `[B, H, T, T]`."""

    def compute_position_bias(
        self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32
    ) -> RelativeBias | Tensor:
        if self.config._attn_implementation != NAME or position_ids is not None:
            bias: Tensor = self.stock("compute_position_bias", x, position_ids, num_buckets)
            return bias
        return RelativeBias(self)

    def offset_table(self, T: int, S: int, start: int) -> Tensor:
        """The stock bias at every offset of keys from T rows that start at position `start`, `[H, T + S - 1]`."""
        weight = self.relative_attention_bias.weight
        offsets = torch.arange(max(T + S - 1, 1), device=weight.device) + (1 - T - start)
        table: Tensor = weight[self.relative_position_bucket(offsets)].mT
        return table


class MPNet(Biased):
    """Attention with the encoder's bias, then the projection `o`."""

    def fused(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_bias: RelativeBias | Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        heads = self.by_heads(hidden_states, self.q, self.k, self.v)
        out, statistics = self.attend(*heads, attention_mask, position_bias=position_bias, dropout=self.dropout.p)
        return (self.o(out), statistics) if output_attentions else (self.o(out),)


# ---------------------------------------------------------------------- ALiBi
class Bloom(Biased):
    """ALiBi by the position of the key among the real tokens, `[B * H, 1, S]`, the same for all rows."""

    is_causal = True

    def fused(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        bias = alibi.view(-1, self.num_heads, 1, alibi.shape[-1])  # [B, H, 1, S]
        terms = {"position_bias": bias, "dropout": self.attention_dropout.p}
        out, statistics = self.attend(query, key, value, attention_mask, **terms)
        is_summed = self.pretraining_tp > 1 and self.slow_but_exact  # by slices, without the bias of `dense`
        hidden = linear(out, self.dense.weight) if is_summed else self.dense(out)
        hidden = torch.dropout(hidden, self.hidden_dropout, self.training)
        return residual + hidden, statistics


class Mpt(Biased):
    """ALiBi by the distance of the key from the last one, `[H, 1, positions]`, the same for all rows.

    A mask of pairs, which a caller prepared, is True where a pair is hidden. Rows in which all are hidden give 0; the
    stock forward averages their values.
    """

    is_causal = True

    def fused(
        self,
        hidden_states: Tensor,
        position_bias: Tensor | None,
        cache: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        projected = self.Wqkv(hidden_states)
        if self.clip_qkv:
            projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            each.view(*each.shape[:-1], self.n_heads, -1).transpose(1, 2) for each in projected.chunk(3, dim=2)
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if position_bias is not None:
            position_bias = position_bias[None, ..., -key.shape[2] :]
        if isinstance(attention_mask, Tensor):
            attention_mask = ~attention_mask
        terms = {"scaling": self.softmax_scale, "dropout": self.attn_dropout_p}
        out, statistics = self.attend(query, key, value, attention_mask, position_bias=position_bias, **terms)
        return self.out_proj(out), statistics


# ---------------------------------------------------------------------- Swin v2
class Swinv2(Biased):
    """Cosine attention with a scale per head and a relative position bias, `[windows or 1, H, T, T]`.

    The model makes the mask of its shifted windows itself, with any attention function.
    """

    def fused(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> Any:
        query, key, value = self.by_heads(hidden_states, self.query, self.key, self.value)
        scale = self.logit_scale.clamp(max=math.log(100)).exp()  # [H, 1, 1]
        query, key = normalize(query, dim=-1) * scale, normalize(key, dim=-1)
        table = self.continuous_position_bias_mlp(self.relative_coords_table).flatten(0, 2)
        bias = 16 * table[self.relative_position_index].permute(2, 0, 1).sigmoid()[None]
        if attention_mask is not None:  # [windows, T, T]; the stock forward adds it twice
            bias = bias + 2 * attention_mask[:, None]
            bias = bias.repeat(len(query) // len(attention_mask), 1, 1, 1)
        terms = {"position_bias": bias, "scaling": 1.0, "dropout": self.dropout.p}
        out, statistics = self.attend(query, key, value, None, **terms)
        return (out, statistics) if output_attentions else (out,)


#: By the name of the stock class.
BIASED: Final[dict[str, type[Replacement]]] = {
    "BloomAttention": Bloom,
    "LongT5Attention": RelativePositions,
    "MPNetEncoder": MPNetBias,
    "MPNetSelfAttention": MPNet,
    "MT5Attention": RelativePositions,
    "MptAttention": Mpt,
    "Pix2StructTextAttention": RelativePositions,
    "Pop2PianoAttention": RelativePositions,
    "Swin2SRSelfAttention": Swinv2,
    "Swinv2SelfAttention": Swinv2,
    "SwitchTransformersAttention": PaddedRelativePositions,
    "T5Attention": RelativePositions,
    "UMT5Attention": OwnRelativePositions,
    "UdopAttention": RelativePositions,
}
