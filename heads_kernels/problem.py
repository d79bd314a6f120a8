"""A call, parsed: holding a `Problem` proves that its tensors agree with each other.

`Problem.gated`, `Problem.collaborative` and `Problem.statistics` are the only places where arguments are checked.
Everything behind them (dispatch, ops, kernels, FLOP counts) reads a `Problem` and never checks again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from heads_kernels.checks import (
    check_dropout,
    check_excluded,
    check_flag,
    check_gate,
    check_grouped_heads,
    check_mixing,
    check_scale,
    check_tensors,
    shape_of,
)
from heads_kernels.errors import refuse
from heads_kernels.flops import backward_flops, forward_flops
from heads_kernels.mask import Intervals, Mask, as_mask
from heads_kernels.mask.intervals import by_identity

#: Features of one mixing chunk: the smallest K step of a tensor core, and one vector of 16 float32 lanes. A head's
#: mixing vector is read in chunks of this many features and a chunk that is all zero costs nothing.
MIXING_CHUNK: Final = 16


@by_identity
class Problem(NamedTuple):
    """One validated call of an operator (sizes as in the documentation: B, T, S, H, Hk, D, Dv).

    `query` is `[B, H, T, D]`, `key` `[B, Hk, S, D]`, `value` `[B, Hk, S, Dv]` for gated attention;
    `query` `[B, T, Ds]`, `key` `[B, S, Ds]`, `value` `[B, H, S, Dv]`, `mixing` `[H, Ds]`, `content_bias` `[B, H, S]`
    for collaborative attention. `attention_statistics` takes either form, without `value` and `gate`.
    """

    operator: str
    query: Tensor
    key: Tensor
    value: Tensor | None
    mixing: Tensor | None
    content_bias: Tensor | None
    gate: Tensor | None
    intervals: Intervals
    scale: float
    gate_activation: str = "identity"
    closed_grad: bool = True
    dropout_p: float = 0.0
    exclude_keys: Tensor | None = None  # bool [B or 1, S]; attention_statistics alone

    # ------------------------------------------------------------------ the three ways to make one
    @classmethod
    def gated(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor | None = None,
        *,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        gate_activation: str = "identity",
        closed_grad: bool = True,
        dropout_p: float = 0.0,
    ) -> Problem:
        """Check the arguments of `gated_attention`; raises `ValueError` or `TypeError` naming the argument."""
        query, key, value = _autocast(query, key, value)
        check_tensors(query=query, key=key, value=value)
        B, H, T, S, D = check_grouped_heads(query, key)
        if value.dim() != 4:
            refuse("value", f"has shape {shape_of(value)}", "pass [B, Hk, S, Dv]")
        if value.shape[:3] != key.shape[:3]:
            refuse(
                "value",
                f"has shape {shape_of(value)}, but key is {shape_of(key)}",
                "make batch, heads and S of value equal to those of key: [B, Hk, S, Dv]",
            )
        dropout_p = check_dropout(dropout_p)
        check_flag("closed_grad", closed_grad)
        check_gate(gate, gate_activation, query, (B, H, T, value.shape[3]))
        return cls(
            operator="gated_attention",
            query=query,
            key=key,
            value=value,
            mixing=None,
            content_bias=None,
            gate=gate,
            intervals=_intervals(attn_mask, is_causal, query, (B, H, T, S)),
            scale=check_scale(scale, D),
            gate_activation=gate_activation,
            closed_grad=closed_grad,
            dropout_p=dropout_p,
        )

    @classmethod
    def collaborative(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mixing: Tensor,
        content_bias: Tensor | None = None,
        gate: Tensor | None = None,
        *,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        gate_activation: str = "identity",
        closed_grad: bool = True,
        dropout_p: float = 0.0,
    ) -> Problem:
        """Check the arguments of `collaborative_attention`; raises `ValueError` or `TypeError` naming the argument."""
        query, key, value = _autocast(query, key, value)
        check_tensors(query=query, key=key, value=value)
        B, H, T, S, Ds = check_mixing(query, key, mixing, content_bias)
        if value.dim() != 4 or value.shape[:3] != (B, H, S):
            refuse(
                "value",
                f"has shape {shape_of(value)}, but batch, heads and S are [{B}, {H}, {S}] by query, mixing and key",
                "pass [B, H, S, Dv]",
            )
        dropout_p = check_dropout(dropout_p)
        check_flag("closed_grad", closed_grad)
        check_gate(gate, gate_activation, query, (B, H, T, value.shape[3]))
        return cls(
            operator="collaborative_attention",
            query=query,
            key=key,
            value=value,
            mixing=mixing,
            content_bias=content_bias,
            gate=gate,
            intervals=_intervals(attn_mask, is_causal, query, (B, H, T, S)),
            scale=check_scale(scale, Ds / max(H, 1)),
            gate_activation=gate_activation,
            closed_grad=closed_grad,
            dropout_p=dropout_p,
        )

    @classmethod
    def statistics(
        cls,
        query: Tensor,
        key: Tensor,
        *,
        mixing: Tensor | None = None,
        content_bias: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        exclude_keys: Tensor | None = None,
    ) -> Problem:
        """Check the arguments of `attention_statistics`; raises `ValueError` or `TypeError` naming the argument."""
        query, key = _autocast(query, key)
        check_tensors(query=query, key=key)
        if mixing is None:
            if content_bias is not None:
                refuse(
                    "content_bias",
                    "comes without mixing",
                    "pass mixing [H, Ds] too, or leave it out",
                )
            B, H, T, S, D = check_grouped_heads(query, key)
            width = float(D)
        else:
            B, H, T, S, Ds = check_mixing(query, key, mixing, content_bias)
            width = Ds / max(H, 1)
        return cls(
            operator="attention_statistics",
            query=query,
            key=key,
            value=None,
            mixing=mixing,
            content_bias=content_bias,
            gate=None,
            intervals=_intervals(attn_mask, is_causal, query, (B, H, T, S)),
            scale=check_scale(scale, width),
            exclude_keys=check_excluded(exclude_keys, query, (B, S)),
        )

    # ------------------------------------------------------------------ sizes
    @property
    def B(self) -> int:
        return self.query.shape[0]

    @property
    def H(self) -> int:
        return self.query.shape[1] if self.mixing is None else self.mixing.shape[0]

    @property
    def Hk(self) -> int:
        """Heads of the key: `H` or fewer for gated attention, 1 (shared) for collaborative attention."""
        return self.key.shape[1] if self.mixing is None else 1

    @property
    def T(self) -> int:
        return self.query.shape[-2]

    @property
    def S(self) -> int:
        return self.key.shape[-2]

    @property
    def D(self) -> int:
        """Width of a score: `D` of a head, or the shared `Ds`."""
        return self.query.shape[-1]

    @property
    def Dv(self) -> int:
        return 0 if self.value is None else self.value.shape[-1]

    # ------------------------------------------------------------------ what is computed
    def open_heads(self) -> Tensor:
        """`[B, H]` bool: False where an identity gate shuts a whole head exactly."""
        closed = closed_heads(self.gate, self.gate_activation)
        if closed is None:
            return torch.ones(self.B, self.H, dtype=torch.bool, device=self.query.device)
        return ~closed.expand(self.B, self.H)

    def visible_pairs(self) -> Tensor:
        """`[B, H]` int64: pairs of a query row and a key that it sees."""
        dense = self.intervals.dense
        if dense is not None and dense.shape[1] != 1:
            pairs = self.intervals.to_dense(self.T, self.S).sum((2, 3))
        else:
            pairs = self.intervals.visible_pairs(self.B, self.T, self.S)[:, None]
        return pairs.expand(self.B, self.H)

    def score_widths(self) -> Tensor:
        """`[H]` int64: features that the scores of a head run over, all-zero mixing chunks left out."""
        if self.mixing is None:
            return torch.full((self.H,), self.D, device=self.query.device)
        return active_widths(self.mixing)

    def flops(self, backward: bool = False, dense: bool = False) -> int:
        """Matrix-product FLOPs (2 per multiply-add) of the forward pass, or of the backward pass alone.

        Counted are visible pairs of open heads, over the features of each head's active mixing chunks; `dense=True`
        is what `torch.utils.flop_counter` counts: every pair, head and feature. Tiles at the border of a mask
        compute more than this. The backward pass counts the gradients of query, key and value; where mixing requires
        a gradient, `dS K` at full width `Ds`; where the gate does, one forward pass over the closed heads (neither
        with `closed_grad=False`). Reads the mask, gate and mixing: on a GPU it waits for them.
        """
        if backward and self.value is None:
            raise ValueError(f"backward is True; {self.operator} has no backward pass.")
        if dense:
            return (backward_flops if backward else forward_flops)(
                self.B * self.H * self.T * self.S, self.D, self.Dv
            )
        is_open = self.open_heads()
        pairs = self.visible_pairs().to(is_open.device)
        open_pairs: list[int] = (pairs * is_open).sum(0).tolist()
        closed_pairs: list[int] = (pairs * ~is_open).sum(0).tolist()
        widths: list[int] = self.score_widths().tolist()
        if not backward:
            return sum(
                forward_flops(n, D, self.Dv) for n, D in zip(open_pairs, widths, strict=True)
            )
        wide = (
            self.D
            if self.closed_grad and self.mixing is not None and self.mixing.requires_grad
            else None
        )
        total = sum(
            backward_flops(n, D, self.Dv, wide) for n, D in zip(open_pairs, widths, strict=True)
        )
        if self.closed_grad and self.gate is not None and self.gate.requires_grad:
            total += sum(
                forward_flops(n, D, self.Dv) for n, D in zip(closed_pairs, widths, strict=True)
            )
        return total


def closed_heads(gate: Tensor | None, activation: str) -> Tensor | None:
    """`[B or 1, H or 1]` bool, True where an identity gate shuts a whole head exactly; None where no gate can."""
    if gate is None or activation != "identity":
        return None
    heads = gate[None] if gate.dim() == 1 else gate
    if any(size != 1 for size in heads.shape[2:]):
        return None
    return heads.reshape(heads.shape[:2]) == 0


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the matrix operands take the autocast dtype; gates, mixing and biases keep their own.

    float64 is left alone, as autocast does with PyTorch's own operators.
    """
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    )


def _intervals(
    attn_mask: Mask | Tensor | None,
    is_causal: bool,
    query: Tensor,
    shape: tuple[int, int, int, int],
) -> Intervals:
    mask = as_mask(attn_mask, shape)
    check_flag("is_causal", is_causal)
    read = mask.intervals if mask is attn_mask else mask.work_out
    intervals = read(*shape, device=query.device)
    return intervals & Intervals(band_hi=1) if is_causal else intervals


def active_widths(mixing: Tensor) -> Tensor:
    """`[H]` int64: features that each head of `mixing` `[H, Ds]` runs over, chunks that are all zero left out."""
    Ds = mixing.shape[1]
    borders = torch.arange(0, Ds, MIXING_CHUNK, device=mixing.device)
    sizes = (Ds - borders).clamp(max=MIXING_CHUNK)  # [chunks]
    padded = torch.nn.functional.pad(mixing, (0, -Ds % MIXING_CHUNK))
    active = (padded != 0).reshape(len(mixing), sizes.numel(), MIXING_CHUNK).any(2)  # [H, chunks]
    widths: Tensor = (active * sizes).sum(1)
    return widths
