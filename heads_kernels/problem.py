"""`Problem`: a validated call of an operator.

`Problem.gated`, `Problem.collaborative`, `Problem.entmax` and `Problem.statistics` check the arguments of a caller,
with `checks`; ops that are called directly check theirs in `ops/validation.py`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from heads_kernels.batch import (
    GROUPED,
    SHARED,
    Batch,
    flatten_bias,
    flatten_companion,
    flatten_operands,
    unflatten,
)
from heads_kernels.checks import (
    GateActivation,
    check_alpha,
    check_companion,
    check_dropout,
    check_excluded,
    check_flag,
    check_gate,
    check_grouped_heads,
    check_mixing,
    check_scale,
    check_sinks,
    check_sizes,
    check_softcap,
    check_tensors,
    check_value_heads,
    refuse,
    shape_of,
)
from heads_kernels.dtensor import is_sharded
from heads_kernels.flops import backward_flops, forward_flops
from heads_kernels.mask import Intervals, Mask, as_mask
from heads_kernels.mask.intervals import by_identity
from heads_kernels.offset_bias import OffsetBias

#: Features of one mixing chunk: the smallest K step of a tensor core, and one vector of 16 float32 lanes. Chunks of a
#: head's mixing vector that are all zero are skipped.
MIXING_CHUNK: Final = 16


@by_identity
class Problem(NamedTuple):
    """One validated call of an operator (sizes as in the documentation: B, T, S, H, Hk, Hv, D, Dv).

    Batch dimensions are flattened: B is their product, `batch` the original ones (None: one, of size B).
    `query` is `[B, H, T, D]`, `key` `[B, Hk, S, D]`, `value` `[B, Hk, S, Dv]` for gated attention;
    `query` `[B, T, Ds]`, `key` `[B, S, Ds]`, `value` `[B, Hv, S, Dv]`, `mixing` `[H, Ds]`, `content_bias`
    `[B, H, S]` for collaborative attention. `attention_statistics` has either form, without `value` and `gate`.
    """

    operator: str
    query: Tensor
    key: Tensor
    value: Tensor | None
    mixing: Tensor | None
    content_bias: Tensor | None
    gate: Tensor | None
    bias: Tensor | None  # [B1, B2, H, T, S], each 1 where it broadcasts: `batch.flatten_bias`
    offset_bias: Tensor | None  # [H or 1, T + S - 1], of offsets j - i from -(T - 1)
    sinks: Tensor | None  # [H]
    intervals: Intervals
    scale: float
    softcap: float = 0.0  # 0: none
    gate_activation: GateActivation = "identity"
    closed_grad: bool = True
    dropout_p: float = 0.0
    exclude_keys: Tensor | None = None  # bool [B or 1, S]; attention_statistics only
    alpha: Tensor | None = None  # [H] in the compute dtype; entmax_attention only
    batch: Batch = None

    # ------------------------------------------------------------------ constructors
    @classmethod
    def gated(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Mask | Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        gate: Tensor | None = None,
        gate_activation: GateActivation = "identity",
        closed_grad: bool = True,
        bias: Tensor | OffsetBias | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = True,
    ) -> Problem:
        """Check the arguments of `gated_attention`; raises `ValueError` or `TypeError` naming the argument."""
        query, key, value = _autocast(query, key, value)
        check_tensors(query=query, key=key, value=value)
        batch, (query, key, value) = flatten_operands(GROUPED, query, key, value)
        B, H, T, S, D = check_grouped_heads(query, key, enable_gqa)
        check_sizes(B, H, T, S)
        if value.shape[1:3] != key.shape[1:3]:
            was = f"has shape {shape_of(value)}, but key is {shape_of(key)}"
            instead = "make heads and S of value equal to those of key: [..., Hk, S, Dv]"
            refuse("value", was, instead)
        dropout_p = check_dropout(dropout_p)
        check_flag("closed_grad", closed_grad)
        gate = _flatten_gate(gate, batch)
        check_gate(gate, gate_activation, query, (B, H, T, value.shape[3]))
        attn_mask, dense, table = biases_of(attn_mask, bias, query, (B, H, T, S), batch)
        check_sinks(sinks, query, H)
        return cls(
            operator="gated_attention",
            query=query,
            key=key,
            value=value,
            mixing=None,
            content_bias=None,
            gate=gate,
            bias=dense,
            offset_bias=table,
            sinks=sinks,
            intervals=intervals_of(attn_mask, is_causal, query, (B, H, T, S), batch),
            softcap=check_softcap(softcap),
            scale=check_scale(scale, D, query.dtype),
            gate_activation=gate_activation,
            closed_grad=closed_grad,
            dropout_p=dropout_p,
            batch=batch,
        )

    @classmethod
    def entmax(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Mask | Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        alpha: float | Tensor = 1.5,
        gate: Tensor | None = None,
        gate_activation: GateActivation = "identity",
        closed_grad: bool = True,
        bias: Tensor | OffsetBias | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        enable_gqa: bool = True,
    ) -> Problem:
        """Check the arguments of `entmax_attention`; raises `ValueError` or `TypeError` naming the argument."""
        problem = cls.gated(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            gate=gate,
            gate_activation=gate_activation,
            closed_grad=closed_grad,
            bias=bias,
            softcap=softcap,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        for name, given in {**problem._asdict(), "alpha": alpha}.items():
            if is_sharded(given):
                instead = "pass local tensors: entmax_attention serves no DTensors"
                refuse(name, "is a DTensor", instead)
        dtype = torch.float64 if problem.query.dtype == torch.float64 else torch.float32
        return problem._replace(
            operator="entmax_attention",
            alpha=check_alpha(alpha, problem.query, problem.H, dtype),
        )

    @classmethod
    def collaborative(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mixing: Tensor,
        content_bias: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        gate: Tensor | None = None,
        gate_activation: GateActivation = "identity",
        closed_grad: bool = True,
        bias: Tensor | OffsetBias | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Problem:
        """Check the arguments of `collaborative_attention`; raises `ValueError` or `TypeError` naming the argument."""
        query, key, value = _autocast(query, key, value)
        check_tensors(query=query, key=key, value=value)
        batch, (query, key, value) = flatten_operands(SHARED, query, key, value)
        content_bias = _flatten("content_bias", content_bias, batch, "H, S")
        B, H, T, S, Ds = check_mixing(query, key, mixing, content_bias)
        check_sizes(B, H, T, S)
        check_value_heads(value, H, S)
        dropout_p = check_dropout(dropout_p)
        check_flag("closed_grad", closed_grad)
        gate = _flatten_gate(gate, batch)
        check_gate(gate, gate_activation, query, (B, H, T, value.shape[3]))
        attn_mask, dense, table = biases_of(attn_mask, bias, query, (B, H, T, S), batch)
        check_sinks(sinks, query, H)
        return cls(
            operator="collaborative_attention",
            query=query,
            key=key,
            value=value,
            mixing=mixing,
            content_bias=content_bias,
            gate=gate,
            bias=dense,
            offset_bias=table,
            sinks=sinks,
            intervals=intervals_of(attn_mask, is_causal, query, (B, H, T, S), batch),
            softcap=check_softcap(softcap),
            scale=check_scale(scale, Ds / max(H, 1), query.dtype),
            gate_activation=gate_activation,
            closed_grad=closed_grad,
            dropout_p=dropout_p,
            batch=batch,
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
        bias: Tensor | OffsetBias | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        exclude_keys: Tensor | None = None,
    ) -> Problem:
        """Check the arguments of `attention_statistics`; raises `ValueError` or `TypeError` naming the argument."""
        query, key = _autocast(query, key)
        check_tensors(query=query, key=key)
        if mixing is None:
            if content_bias is not None:
                instead = "pass mixing [H, Ds] too, or leave it out"
                refuse("content_bias", "is given without mixing", instead)
            batch, (query, key) = flatten_operands(GROUPED, query, key)
            B, H, T, S, D = check_grouped_heads(query, key)
            width = float(D)
        else:
            batch, (query, key) = flatten_operands(SHARED, query, key)
            content_bias = _flatten("content_bias", content_bias, batch, "H, S")
            B, H, T, S, Ds = check_mixing(query, key, mixing, content_bias)
            width = Ds / max(H, 1)
        check_sizes(B, H, T, S)
        attn_mask, dense, table = biases_of(attn_mask, bias, query, (B, H, T, S), batch)
        check_sinks(sinks, query, H)
        excluded = _flatten("exclude_keys", exclude_keys, batch, "S")
        return cls(
            operator="attention_statistics",
            query=query,
            key=key,
            value=None,
            mixing=mixing,
            content_bias=content_bias,
            gate=None,
            bias=dense,
            offset_bias=table,
            sinks=sinks,
            intervals=intervals_of(attn_mask, is_causal, query, (B, H, T, S), batch),
            softcap=check_softcap(softcap),
            scale=check_scale(scale, width, query.dtype),
            exclude_keys=check_excluded(excluded, query, (B, S)),
            batch=batch,
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
    def Hv(self) -> int:
        """Heads of the value, which divide `H`: those of the key in gated attention. `H` without a value."""
        return self.H if self.value is None else self.value.shape[1]

    @property
    def T(self) -> int:
        return self.query.shape[-2]

    @property
    def S(self) -> int:
        return self.key.shape[-2]

    @property
    def D(self) -> int:
        """Width of query and key: `D` of a head, or the shared `Ds`."""
        return self.query.shape[-1]

    @property
    def Dv(self) -> int:
        return 0 if self.value is None else self.value.shape[-1]

    def unflatten(self, result: Tensor) -> Tensor:
        """`result` `[B, ...]` with the batch dimensions of the call."""
        return unflatten(result, self.batch)

    # ------------------------------------------------------------------ work counts
    def open_heads(self) -> Tensor:
        """`[B, H]` bool: False where an identity gate closes a whole head."""
        closed = closed_heads(self.gate, self.gate_activation)
        if closed is None:
            return torch.ones(self.B, self.H, dtype=torch.bool, device=self.query.device)
        return ~closed.expand(self.B, self.H)

    def visible_pairs(self) -> Tensor:
        """`[B, H]` int64: number of visible (query row, key) pairs."""
        dense = self.intervals.dense
        if dense is not None and dense.shape[1] != 1:
            pairs = self.intervals.to_dense(self.T, self.S).sum((2, 3))
        else:
            pairs = self.intervals.visible_pairs(self.B, self.T, self.S)[:, None]
        return pairs.expand(self.B, self.H)

    def score_widths(self) -> Tensor:
        """`[H]` int64: features that the scores of each head use, without all-zero mixing chunks."""
        if self.mixing is None:
            return torch.full((self.H,), self.D, device=self.query.device)
        return active_widths(self.mixing)

    def flops(self, backward: bool = False, dense: bool = False) -> int:
        """Matrix-product FLOPs (2 per multiply-add) of the forward pass, or of the backward pass only.

        Counts visible pairs of open heads, over the features of each head's active mixing chunks; `dense=True` counts
        every pair, head and feature, as `torch.utils.flop_counter` does. Tiles at the border of a mask compute more.
        The backward pass counts the gradients of query, key and value; if mixing requires a gradient, `dS K` at full
        width `Ds`; if the gate does, one forward pass over the closed heads (neither with `closed_grad=False`). Reads
        the values of mask, gate and mixing, which synchronises with a GPU.
        """
        if backward and self.value is None:
            raise ValueError(f"backward is True, but {self.operator} has no backward pass.")
        if dense:
            count = backward_flops if backward else forward_flops
            return count(self.B * self.H * self.T * self.S, self.D, self.Dv)
        is_open = self.open_heads()
        pairs = self.visible_pairs().to(is_open.device)
        widths = self.score_widths().tolist()
        open_pairs = list(zip((pairs * is_open).sum(0).tolist(), widths, strict=True))
        closed_pairs = zip((pairs * ~is_open).sum(0).tolist(), widths, strict=True)
        if not backward:
            return sum(forward_flops(n, D, self.Dv) for n, D in open_pairs)
        all_features = self.closed_grad and self.mixing is not None and self.mixing.requires_grad
        wide = self.D if all_features else None
        total = sum(backward_flops(n, D, self.Dv, wide) for n, D in open_pairs)
        if self.closed_grad and self.gate is not None and self.gate.requires_grad:
            total += sum(forward_flops(n, D, self.Dv) for n, D in closed_pairs)
        return total


def closed_heads(gate: Tensor | None, activation: str) -> Tensor | None:
    """`[B or 1, H or 1]` bool, True where an identity gate closes a whole head; None where no gate can."""
    if gate is None or activation != "identity":
        return None
    heads = gate[None] if gate.dim() == 1 else gate
    if any(size != 1 for size in heads.shape[2:]):
        return None
    return heads.reshape(heads.shape[:2]) == 0


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the matrix operands to the autocast dtype; gates, mixing and biases keep their own.

    float64 is not cast, as in PyTorch's own operators.
    """
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    )


def _flatten(argument: str, tensor: Tensor | None, batch: Batch, layout: str) -> Tensor | None:
    """`flatten_companion` if `tensor` has batch dimensions; it may not be a tensor, which is checked later."""
    if batch is None or not isinstance(tensor, Tensor) or tensor.dim() <= 1:
        return tensor
    return flatten_companion(argument, tensor, batch, layout)


def _flatten_gate(gate: Tensor | None, batch: Batch) -> Tensor | None:
    """`[*batch, H]`, `[*batch, H, T]` and `[*batch, H, T, Dv]` with one batch dimension."""
    if batch is None or not isinstance(gate, Tensor) or gate.dim() == 1:
        return gate
    layouts = {1: "H", 2: "H, T", 3: "H, T, Dv"}
    layout = layouts.get(gate.dim() - len(batch))
    if layout is None:
        was = f"has {gate.dim()} dimensions, but the call has {len(batch)} batch dimensions"
        refuse("gate", was, "pass [H], [..., H], [..., H, T] or [..., H, T, Dv]")
    return _flatten("gate", gate, batch, layout)


def biases_of(
    attn_mask: Mask | Tensor | None,
    bias: Tensor | OffsetBias | None,
    query: Tensor,
    shape: tuple[int, int, int, int],
    batch: Batch,
) -> tuple[Mask | Tensor | None, Tensor | None, Tensor | None]:
    """(`attn_mask` without a float one, the dense bias, the table of offsets), each None if absent."""
    argument = "bias"
    if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point():
        if bias is not None:
            instead = "pass their sum as bias, or a bool attn_mask"
            refuse("attn_mask", "is a float tensor, and bias is given too", instead)
        attn_mask, bias, argument = None, attn_mask, "attn_mask"
    if bias is None:
        return attn_mask, None, None
    B, H, T, S = shape
    if isinstance(bias, OffsetBias):
        if bias.heads not in (1, H):
            refuse("bias", f"has {bias.heads} heads", f"pass a table of H = {H} heads, or 1")
        table = bias.table(T, S)
        check_companion("bias", table, query)
        return attn_mask, None, table
    check_companion(argument, bias, query)
    lead = (B,) if batch is None else batch
    return attn_mask, flatten_bias(bias, lead, (H, T, S), argument), None


def intervals_of(
    attn_mask: Mask | Tensor | None,
    is_causal: bool,
    query: Tensor,
    shape: tuple[int, int, int, int],
    batch: Batch,
) -> Intervals:
    """The mask of a call of `shape` = (B, H, T, S)."""
    check_flag("is_causal", is_causal)
    if attn_mask is None:
        return Intervals(band_hi=1) if is_causal else Intervals()
    if (
        batch is not None
        and isinstance(attn_mask, Tensor)
        and 3 < attn_mask.dim() <= len(batch) + 3
    ):
        missing = len(batch) + 3 - attn_mask.dim()
        attn_mask = _flatten("attn_mask", attn_mask[(None,) * missing], batch, "H, T, S")
    mask = as_mask(attn_mask, shape)
    read = mask.intervals if mask is attn_mask else mask.work_out
    intervals = read(*shape, device=query.device)
    return intervals & Intervals(band_hi=1) if is_causal else intervals


def active_widths(mixing: Tensor) -> Tensor:
    """`[H]` int64: features that each head of `mixing` `[H, Ds]` uses, without chunks that are all zero."""
    Ds = mixing.shape[1]
    borders = torch.arange(0, Ds, MIXING_CHUNK, device=mixing.device)
    sizes = (Ds - borders).clamp(max=MIXING_CHUNK)  # [chunks]
    padded = torch.nn.functional.pad(mixing, (0, -Ds % MIXING_CHUNK))
    active = (padded != 0).reshape(len(mixing), sizes.numel(), MIXING_CHUNK).any(2)  # [H, chunks]
    widths: Tensor = (active * sizes).sum(1)
    return widths
