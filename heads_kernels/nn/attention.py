"""Multi-head attention with gated heads, as a module that stands in for `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads_kernels.checks import check_size, refuse
from heads_kernels.functional import gated_attention
from heads_kernels.nn.multihead import Multihead, head_width
from heads_kernels.nn.state_dict import load_torch_projections, split_projections


class GatedMultiheadAttention(Multihead):
    r"""Multi-head attention (Vaswani et al. 2017) whose heads can be gated, closed and pruned.

    .. math:: \sum_h g_h \cdot softmax(scale \cdot X W_Q^h (Y W_K^h)^T + bias_h) Y W_V^h W_O^h + b_O

    Three uses: encoder (`layer(x, key_padding_mask=...)`), decoder (`layer(x, is_causal=True)`), encoder-decoder
    (`layer(x, memory, key_padding_mask=...)`). It takes the place of the attention in PyTorch's own layers, all of a
    model by `hk.nn.replace_attention_(model)`, or one:

        layer.self_attn = hk.nn.GatedMultiheadAttention.from_torch(layer.self_attn)

    The state dict of a `torch.nn.MultiheadAttention` of the same sizes loads as it is; it does not hold the number
    of heads.

    Args:
        embed_dim: width of the query's input and of the output.
        num_heads: H.
        num_key_heads: Hk, of which H is a multiple (grouped-query attention); default H.
        kdim, vdim: widths of the inputs of key and value; default `embed_dim`.
        head_dim: D, width of a head's query and key; default `embed_dim / num_heads`.
        value_dim: Dv, width of a head's value; default `head_dim`.
        bias: whether projections have biases.
        dropout: probability of dropping an attention probability, in training only.
        scale: factor of the scores; default `head_dim ** -0.5`.
        output_gate: gates from the query's input, `sigmoid(X W_g + b_g)` (`gate_proj`): one per token and head
            ("head"), per token and element of a head ("element"), or None.
        batch_first: inputs and output are `[B, T, embed_dim]`, or with False `[T, B, embed_dim]`. Everything else,
            masks, caches and statistics, has the batch first either way.
        device, dtype: of the parameters.

    Attributes:
        head_gate: a `HeadGate`, None at first. It multiplies heads beside an output gate too: the operator takes
            the head gate, so that closed heads cost nothing, and the output gate is applied behind it.

    Raises:
        TypeError, ValueError: an argument that does not fit, named with its value and what would do.
    """

    operator = staticmethod(gated_attention)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
        output_gate: str | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        E, H = check_size("embed_dim", embed_dim), check_size("num_heads", num_heads)
        Hk = H if num_key_heads is None else check_size("num_key_heads", num_key_heads)
        if H % Hk:
            refuse("num_key_heads", f"is {Hk}, but num_heads is {H}", "pass a divisor of it")
        D = head_width("head_dim", E, H, head_dim)
        Dv = D if value_dim is None else check_size("value_dim", value_dim)
        super().__init__(
            E,
            H,
            (H * D, Hk * D, Hk * Dv),
            value_dim=Dv,
            kdim=kdim,
            vdim=vdim,
            bias=bias,
            qk_bias=bias,
            dropout=dropout,
            scale=D**-0.5 if scale is None else scale,
            output_gate=output_gate,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self.num_key_heads = Hk
        self.head_dim = D
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(load_torch_projections)  # type: ignore[no-untyped-call]

    @classmethod
    def from_torch(cls, attention: nn.MultiheadAttention) -> GatedMultiheadAttention:
        """The same attention with a copy of the weights: same outputs at rows that see a key, and same training mode.

        Raises:
            TypeError, ValueError: `attention` is no `torch.nn.MultiheadAttention`, or has `add_bias_kv` or
                `add_zero_attn`.
        """
        if not isinstance(attention, nn.MultiheadAttention):
            was = f"is a {type(attention).__name__}"
            refuse("attention", was, "pass a torch.nn.MultiheadAttention", TypeError)
        if attention.add_zero_attn:
            refuse("attention", "has add_zero_attn", "use a module without it")
        made = cls(
            attention.embed_dim,
            attention.num_heads,
            kdim=attention.kdim,
            vdim=attention.vdim,
            bias=attention.in_proj_bias is not None,
            dropout=attention.dropout,
            batch_first=attention.batch_first,
            device=attention.out_proj.weight.device,
            dtype=attention.out_proj.weight.dtype,
        )
        made.load_state_dict(attention.state_dict())
        with torch.enable_grad():  # parts of a weight ask for gradients where the weight does
            weights: dict[str, Tensor] = dict(attention.named_parameters())
            split_projections(weights)
        for name, weight in weights.items():
            made.get_parameter(name).requires_grad_(weight.requires_grad)
        return made.train(attention.training)

    def source(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        heads = *key.shape[:2], self.num_key_heads
        return (
            self.k_proj(key).view(*heads, self.head_dim),
            self.v_proj(value).view(*heads, self.value_dim),
        )

    def operands(self, query: Tensor, source: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
        key, value = source  # [B, S, Hk, D], [B, S, Hk, Dv]
        query = self.q_proj(query).view(*query.shape[:2], self.num_heads, self.head_dim)
        return {
            "query": query.transpose(1, 2),
            "key": key.transpose(1, 2),
            "value": value.transpose(1, 2),
        }

    def extra_repr(self) -> str:
        heads = f"num_key_heads={self.num_key_heads}, head_dim={self.head_dim}"
        return f"{heads}, {super().extra_repr()}"
