"""Collaborative multi-head attention: a module whose heads share one query and one key."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from heads_kernels.checks import check_flag, check_scale, check_size, refuse
from heads_kernels.functional import collaborative_attention
from heads_kernels.nn.initialization import mixing_init_
from heads_kernels.nn.multihead import Multihead, head_width


class CollaborativeMultiheadAttention(Multihead):
    """Heads that share a query and a key and mix their features (Cordonnier, Loukas, Jaggi 2020, eq. 7 and 12).

        out = sum_h g_h * softmax(scale * (X W_Q diag(m_h) (Y W_K)^T + 1 (Y v_h)^T)) Y W_V^h W_O^h + b_O

    `m_h` are the rows of `mixing`, `v_h` those of `content_proj`. With biases of query and key, X W_Q is `q_proj(X)`
    and Y W_K is `k_proj(Y)`. Use, masks, gates and cache are those of `GatedMultiheadAttention`; the cache holds one
    key of `shared_dim` numbers per token for all heads.

    `hk.convert.collaborate` makes it of ordinary attention, exactly if `shared_dim` is `num_heads * head_dim`.

    Args:
        embed_dim: width of the query's input and of the output.
        num_heads: H.
        shared_dim: Ds, width of the shared query and key.
        kdim, vdim: widths of the inputs of key and value; default `embed_dim`.
        value_dim: Dv, width of a head's value; default `embed_dim / num_heads`.
        num_value_heads: Hv, a divisor of H: that many neighbouring heads share a value; default H.
        bias: whether `v_proj`, `out_proj` and `gate_proj` have biases.
        qk_bias: whether `q_proj` and `k_proj` have biases.
        content_bias: whether keys have a bias per head, from the key's input (`content_proj`, initially 0).
        mixing_init: "concatenate", "ones", "normal" or "xavier"; see `mixing_init_`.
        ragged: whether entries of `mixing` that are 0 stay 0 in training, so that chunks of zeros cost nothing
            (`closed_grad=False`). False trains all entries; closed heads then cost work in the backward pass, since
            `closed_grad` applies to both.
        scale: factor of scores and content bias; default `(embed_dim / num_heads) ** -0.5` for any `shared_dim`.
        dropout, output_gate, batch_first, device, dtype: as in `GatedMultiheadAttention`.

    Attributes:
        mixing: parameter `[H, Ds]`.
        head_gate: as in `GatedMultiheadAttention`; `ragged` replaces its `closed_grad`.
    """

    operator = staticmethod(collaborative_attention)
    mixing: nn.Parameter
    content_proj: nn.Linear | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        shared_dim: int,
        *,
        value_dim: int | None = None,
        num_value_heads: int | None = None,
        qk_bias: bool = False,
        content_bias: bool = True,
        mixing_init: str = "concatenate",
        ragged: bool = False,
        scale: float | None = None,
        **options: Any,
    ) -> None:
        E, H = check_size("embed_dim", embed_dim), check_size("num_heads", num_heads)
        Ds = check_size("shared_dim", shared_dim)
        Dv = head_width("value_dim", E, H, value_dim)
        Hv = H if num_value_heads is None else check_size("num_value_heads", num_value_heads)
        if H % Hv:
            refuse("num_value_heads", f"is {Hv}, but num_heads is {H}", f"pass a divisor of {H}")
        check_flag("qk_bias", qk_bias)
        check_flag("content_bias", content_bias)
        check_flag("ragged", ragged)
        scale = check_scale(scale, E / H)
        rows = Ds, Ds, Hv * Dv
        super().__init__(E, H, rows, value_dim=Dv, scale=scale, qk_bias=qk_bias, **options)
        self.shared_dim = Ds
        self.num_value_heads = Hv
        self.mixing_init = mixing_init
        self.ragged = ragged
        like = self.out_proj.weight.detach()
        self.mixing = nn.Parameter(like.new_empty(H, Ds))
        content = nn.Linear(self.kdim, H, bias=False, device=like.device, dtype=like.dtype)
        self.content_proj = content if content_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform weights, biases and content bias of 0, and mixing by `mixing_init`."""
        super().reset_parameters()
        mixing_init_(self.mixing, self.mixing_init)
        if self.content_proj is not None:
            nn.init.zeros_(self.content_proj.weight)

    @property
    def closed_grad(self) -> bool:
        return not self.ragged

    def source(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        heads = self.by_head("v_proj", value, self.num_value_heads, self.value_dim)
        shared = self.k_proj(key), heads
        return shared if self.content_proj is None else (*shared, self.content_proj(key))

    def operands(self, query: Tensor, source: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
        key, value, *content_bias = source  # [B, S, Ds], [B, S, Hv, Dv], [B, S, H]
        return {
            "query": self.q_proj(query),
            "key": key,
            "value": value.transpose(1, 2),
            "mixing": self.mixing,
            "content_bias": content_bias[0].transpose(1, 2) if content_bias else None,
        }

    def extra_repr(self) -> str:
        sizes = f"shared_dim={self.shared_dim}, num_value_heads={self.num_value_heads}"
        return f"{sizes}, {super().extra_repr()}"
