"""Gated attention with pair bias, as in networks of protein structure, and weights in their reference layout.

The algorithms are those of the supplements of AlphaFold 2 (Jumper et al. 2021) and AlphaFold 3 (Abramson et al. 2024).
The operator adds the bias to its scores and computes its gradient: scores are never in memory, and a bias that rows of
an alignment or of a pair representation share is not repeated for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor, nn

import heads_kernels as hk


def gated(width: int, heads: int, head_dim: int, biased: tuple[str, ...]) -> hk.nn.GatedMultiheadAttention:
    """Attention with a sigmoid gate for each element; only the projections in `biased` have biases."""
    made = hk.nn.GatedMultiheadAttention(width, heads, head_dim=head_dim, output_gate="element")
    for name, projection in made.named_children():
        if name not in biased:
            projection.register_parameter("bias", None)
    return made


class MSARowAttention(nn.Module):
    """AlphaFold 2, algorithm 7: rows of an alignment, each with the bias of the pairs of its columns.

    Args:
        c_m, c_z: widths of the alignment and of the pair representation.
    """

    def __init__(self, c_m: int, c_z: int, heads: int = 8, head_dim: int = 32) -> None:
        super().__init__()
        self.norm, self.norm_z = nn.LayerNorm(c_m), nn.LayerNorm(c_z)
        self.bias = nn.Linear(c_z, heads, bias=False)
        self.attention = gated(c_m, heads, head_dim, ("gate_proj", "out_proj"))

    def forward(self, m: Tensor, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """`m` `[..., S, N, c_m]`, `z` `[..., N, N, c_z]`; `mask` `[..., S, N]`, True = real."""
        bias = self.bias(self.norm_z(z)).movedim(-1, -3).unsqueeze(-4)  # [..., 1, H, N, N]
        out: Tensor = self.attention(self.norm(m), bias=bias, key_padding_mask=_hidden(mask))[0]
        return out


class TriangleAttention(nn.Module):
    """AlphaFold 2, algorithms 13 and 14: pairs that share their first residue, or with `ending` their last.

    Pair ij attends to pairs ik with the bias of jk, the third side of the triangle; with `ending` to kj with the bias
    of ki, which is the same on the transposed representation.
    """

    def __init__(self, c_z: int, heads: int = 4, head_dim: int = 32, ending: bool = False) -> None:
        super().__init__()
        self.ending = ending
        self.norm = nn.LayerNorm(c_z)
        self.bias = nn.Linear(c_z, heads, bias=False)
        self.attention = gated(c_z, heads, head_dim, ("gate_proj", "out_proj"))

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """`z` `[..., N, N, c_z]`; `mask` `[..., N, N]`, True = real."""
        if self.ending:
            z, mask = z.transpose(-2, -3), None if mask is None else mask.mT
        z = self.norm(z)
        bias = self.bias(z).movedim(-1, -3).unsqueeze(-4)  # [..., 1, H, N, N]
        out: Tensor = self.attention(z, bias=bias, key_padding_mask=_hidden(mask))[0]
        return out.transpose(-2, -3) if self.ending else out


class AttentionWithPairBias(nn.Module):
    """AlphaFold 3, algorithm 24: tokens with the bias of their pairs.

    Args:
        c_a, c_z: widths of the tokens and of the pair representation.
        c_s: width of the conditioning; with it, the norm is adaptive (algorithm 26) and the output is gated by it.
    """

    def __init__(self, c_a: int, c_z: int, c_s: int | None = None, heads: int = 16, head_dim: int = 24) -> None:
        super().__init__()
        self.norm, self.norm_z = (
            nn.LayerNorm(c_a, elementwise_affine=c_s is None),
            nn.LayerNorm(c_z),
        )
        self.bias = nn.Linear(c_z, heads, bias=False)
        self.attention = gated(c_a, heads, head_dim, ("q_proj",))
        if c_s is not None:
            self.norm_s = nn.LayerNorm(c_s, bias=False)
            self.scale, self.shift = nn.Linear(c_s, c_a), nn.Linear(c_s, c_a, bias=False)
            self.open = nn.Linear(c_s, c_a)
            nn.init.constant_(self.open.bias, -2.0)

    def forward(self, a: Tensor, z: Tensor, s: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
        """`a` `[..., N, c_a]`, `z` `[..., N, N, c_z]`, `s` `[..., N, c_s]`; `beta` `[..., N, N]` is one more bias."""
        a = self.norm(a)
        if s is not None:
            normed = self.norm_s(s)
            a = self.scale(normed).sigmoid() * a + self.shift(normed)
        bias = self.bias(self.norm_z(z)).movedim(-1, -3)  # [..., H, N, N]
        if beta is not None:
            bias = bias + beta.unsqueeze(-3)
        out: Tensor = self.attention(a, bias=bias)[0]
        return out if s is None else self.open(s).sigmoid() * out


def _hidden(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else ~mask


# ---------------------------------------------------------------------- weights
#: Names of the reference layout, here those of OpenFold's modules, and where the weights are in the modules above.
REFERENCE: Final = {
    "linear_q": "attention.q_proj",
    "linear_k": "attention.k_proj",
    "linear_v": "attention.v_proj",
    "linear_g": "attention.gate_proj",
    "linear_o": "attention.out_proj",
    "linear_b": "bias",
    "linear_z": "bias",
    "linear": "bias",
    "layer_norm": "norm",
    "layer_norm_a": "norm",
    "layer_norm_m": "norm",
    "layer_norm_z": "norm_z",
}


def load_reference(module: nn.Module, state: Mapping[str, Tensor], names: Mapping[str, str] = REFERENCE) -> None:
    """Load a state dict of the reference layout: `linear_q.weight`, `mha.linear_q.weight` and so on.

    Heads are contiguous rows of `linear_q`, `linear_k`, `linear_v` and `linear_g`, and columns of `linear_o`, in both
    layouts, so the tensors are used unchanged.

    Raises:
        KeyError: a name that is not in `names`.
        RuntimeError: weights that are missing, or of other sizes.
    """
    found = {}
    for key, tensor in state.items():
        path, _, kind = key.rpartition(".")
        found[f"{names[path.rpartition('.')[2]]}.{kind}"] = tensor
    module.load_state_dict(found)
