"""Attention layers that gate their output, with gate and attention as one op.

Families differ in how they compute query, key, value and the logits of the gate: each variant is a small class below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from heads_kernels.checks import GateActivation
from heads_kernels.integrations.transformers.replacement import Replacement
from heads_kernels.ops.statistics import AttentionStatistics

Positions = tuple[Tensor, Tensor]


class OutputGated(Replacement):
    """`o_proj(act(logits) * attention)`, gate and attention in one op, with logits from `gate_proj`."""

    gate_activation: GateActivation = "sigmoid"
    #: The name of the function in the stock class's file that applies rotary positions to query and key.
    rotary = "apply_rotary_pos_emb"
    rotate: Callable[..., Positions]  # that function

    @classmethod
    def members(cls, stock: Any) -> dict[str, Any]:
        rotate = getattr(sys.modules[stock.__module__], cls.rotary)
        return {**super().members(stock), "rotate": staticmethod(rotate)}

    def fused(
        self,
        hidden_states: Tensor,
        position_embeddings: Positions | None = None,
        attention_mask: Any = None,
        cache: Any = None,
        attention_scaling: Tensor | None = None,
        cycle_offset: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionStatistics | None]:
        """The forward pass, with the arguments of the stock forwards of all families."""
        query, logits = self.query_and_logits(hidden_states)
        query, key, value = self.positioned(hidden_states, query, position_embeddings)
        if attention_scaling is not None:
            query = (query.float() * attention_scaling).to(query.dtype)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx + cycle_offset)
        key, value = self.expanded(key, value)
        out, statistics = self.attend(
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout,
            scaling=self.scaling,
            sliding_window=getattr(self, "sliding_window", None),
            output_gate=logits,
            gate_activation=self.gate_activation,
            **kwargs,
        )
        return self.o_proj(out), statistics

    def query_and_logits(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """The query `[B, T, H, D]` and the logits of the gate, `[B, H, T]` or `[B, H, T, Dv]`."""
        logits = self.heads(self.gate_proj(hidden_states)).transpose(1, 2)
        return self.heads(self.q_proj(hidden_states)), logits

    def positioned(
        self, hidden_states: Tensor, query: Tensor, position_embeddings: Positions | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query `[B, H, T, D]`, and key and value `[B, Hk, T, ...]` as the cache keeps them."""
        key = self.heads(self.k_proj(hidden_states))
        value = self.heads(self.v_proj(hidden_states)).transpose(1, 2)
        query, key = self.normalised(query, key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if position_embeddings is not None:
            query, key = self.rotate(query, key, *position_embeddings)
        return query, key, value

    def normalised(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key `[B, T, heads, D]` after their norms."""
        return self.q_norm(query), self.k_norm(key)

    def expanded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Key `[B, Hk, S, D]` and value `[B, Hk, S, Dv]` from what the cache keeps."""
        return key, value

    def heads(self, projected: Tensor) -> Tensor:
        """`[B, T, heads * D]` as `[B, T, heads, D]`."""
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


class _QueryHalf(OutputGated):
    """`q_proj` gives the logits too: for each head its query, then its logits."""

    def query_and_logits(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        both = self.q_proj(hidden_states)
        query, logits = both.view(*both.shape[:-1], -1, 2 * self.head_dim).chunk(2, dim=-1)
        return query, logits.transpose(1, 2)


class _PerHead(OutputGated):
    """`g_proj` gives one logit per head or per element; a layer without `g_proj` has no gate."""

    def query_and_logits(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        query = self.heads(self.q_proj(hidden_states))
        if self.g_proj is None:
            return query, None
        logits = self.g_proj(hidden_states)
        if logits.shape[-1] != query.shape[2]:
            logits = self.heads(logits)
        return query, logits.transpose(1, 2)


class _PerHeadSoftplus(_PerHead):
    gate_activation = "softplus"


class _Local(OutputGated):
    """Only layers with local attention have rotary positions."""

    def positioned(
        self, hidden_states: Tensor, query: Tensor, position_embeddings: Positions | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        local = position_embeddings if self.is_local_attention else None
        return super().positioned(hidden_states, query, local)


class _Unnormalised(OutputGated):
    def normalised(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


class _OneNorm(OutputGated):
    """Query and key share a norm, and the query is scaled after it."""

    def normalised(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.qk_norm(query) * self.qk_scale_factor, self.qk_norm(key)


class _Biased(OutputGated):
    """The logits have a bias per head."""

    def query_and_logits(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = self.heads(self.gate_proj(hidden_states)) + self.gate_bias[:, None]
        return self.heads(self.q_proj(hidden_states)), logits.transpose(1, 2)


class _Latent(_PerHead):
    """Multi-head latent attention: the cache keeps the compressed keys and values of all heads."""

    rotary = "apply_rotary_pos_emb_interleave"

    def heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.qk_head_dim)

    def positioned(
        self, hidden_states: Tensor, query: Tensor, position_embeddings: Positions | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        widths = [self.qk_nope_head_dim, self.qk_rope_head_dim]
        query, turned = torch.split(query.transpose(1, 2), widths, dim=-1)
        latent, key = self.kv_a_proj_with_mqa(hidden_states)[:, None].split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        assert position_embeddings is not None
        turned, key = self.rotate(turned, key, *position_embeddings)
        return torch.cat((query, turned), dim=-1), self.kv_a_layernorm(latent), key

    def expanded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        expanded: tuple[Tensor, Tensor] = self.expand_kv(key, value)
        return expanded


#: By the name of the stock class.
OUTPUT_GATED: Final[dict[str, type[Replacement]]] = {
    "AfmoeAttention": _Local,
    "BailingHybridAttention": _Latent,
    "BeamAttention": _Biased,
    "HrmTextAttention": _Unnormalised,
    "LagunaAttention": _PerHeadSoftplus,
    "Lfm3Attention": _PerHead,
    "MuseGlimmerTextAttention": _OneNorm,
    "Qwen3NextAttention": _QueryHalf,
    "Qwen3_5Attention": _QueryHalf,
    "Qwen3_5MoeAttention": _QueryHalf,
    "Step3p7Attention": _PerHead,
}
