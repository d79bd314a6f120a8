"""A call, parsed: holding a `Problem` proves that its tensors agree with each other.

`Problem.gated`, `Problem.collaborative` and `Problem.statistics` are the only places where arguments are checked.
Everything behind them (dispatch, ops, kernels, FLOP counts) reads a `Problem` and never checks again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch import Tensor

from heads_kernels.mask import Intervals, Mask, as_mask

GATE_ACTIVATIONS: Final = ("identity", "sigmoid", "softplus")
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: Features of one mixing chunk: the smallest K step of a tensor core, and one vector of 16 float32 lanes. A head's
#: mixing vector is read in chunks of this many features and a chunk that is all zero costs nothing.
MIXING_CHUNK: Final = 16


@dataclass(frozen=True, eq=False)
class Problem:
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
        _check_tensors(query=query, key=key, value=value)
        _check_grouped_heads(query, key)
        if value.dim() != 4:
            _refuse("value", f"has shape {_shape(value)}", "pass [B, Hk, S, Dv]")
        if value.shape[:3] != key.shape[:3]:
            _refuse(
                "value",
                f"has shape {_shape(value)}, but key is {_shape(key)}",
                "make batch, heads and S of value equal to those of key: [B, Hk, S, Dv]",
            )
        B, H, T, D = query.shape
        dropout_p = _check_dropout(dropout_p)
        _check_gate(gate, gate_activation, query, (B, H, T, value.shape[3]))
        return cls(
            operator="gated_attention",
            query=query,
            key=key,
            value=value,
            mixing=None,
            content_bias=None,
            gate=gate,
            intervals=_intervals(attn_mask, is_causal, query, (B, H, T, key.shape[2])),
            scale=_check_scale(scale, D),
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
        _check_tensors(query=query, key=key, value=value)
        _check_mixing(query, key, mixing, content_bias)
        B, T, Ds = query.shape
        H, S = mixing.shape[0], key.shape[1]
        if value.dim() != 4 or value.shape[:3] != (B, H, S):
            _refuse(
                "value",
                f"has shape {_shape(value)}, but batch, heads and S are [{B}, {H}, {S}] by query, mixing and key",
                "pass [B, H, S, Dv]",
            )
        dropout_p = _check_dropout(dropout_p)
        _check_gate(gate, gate_activation, query, (B, H, T, value.shape[3]))
        return cls(
            operator="collaborative_attention",
            query=query,
            key=key,
            value=value,
            mixing=mixing,
            content_bias=content_bias,
            gate=gate,
            intervals=_intervals(attn_mask, is_causal, query, (B, H, T, S)),
            scale=_check_scale(scale, Ds / max(H, 1)),
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
    ) -> Problem:
        """Check the arguments of `attention_statistics`; raises `ValueError` or `TypeError` naming the argument."""
        _check_tensors(query=query, key=key)
        if mixing is None:
            if content_bias is not None:
                _refuse("content_bias", "comes without mixing", "pass mixing [H, Ds] too, or leave it out")
            _check_grouped_heads(query, key)
            B, H, T, D = query.shape
            S, width = key.shape[2], float(D)
        else:
            _check_mixing(query, key, mixing, content_bias)
            B, T, Ds = query.shape
            H, S = mixing.shape[0], key.shape[1]
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
            scale=_check_scale(scale, width),
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

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of scores, softmax, lse and accumulators: float64 for float64 inputs, else float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------- checks, one per kind of argument
def _refuse(argument: str, was: str, instead: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"{argument} {was}; {instead}.")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _check_tensors(**tensors: Tensor) -> None:
    """`query`, `key` and `value` are tensors of one supported dtype on one device."""
    query = tensors["query"]
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            _refuse(name, f"is a {type(tensor).__name__}", "pass a torch.Tensor", TypeError)
        if tensor.dtype not in DTYPES:
            _refuse(name, f"has dtype {tensor.dtype}", "pass float32, bfloat16, float16 or float64", TypeError)
        if tensor.dtype != query.dtype:
            _refuse(name, f"has dtype {tensor.dtype}, but query has {query.dtype}", "cast them to one dtype", TypeError)
        if tensor.device != query.device:
            _refuse(name, f"is on {tensor.device}, but query is on {query.device}", "move them to one device")


def _check_grouped_heads(query: Tensor, key: Tensor) -> None:
    if query.dim() != 4:
        _refuse("query", f"has {query.dim()} dimensions (shape {_shape(query)})", "pass [B, H, T, D]")
    if key.dim() != 4:
        _refuse("key", f"has {key.dim()} dimensions (shape {_shape(key)})", "pass [B, Hk, S, D]")
    if key.shape[0] != query.shape[0]:
        _refuse("key", f"has batch {key.shape[0]}, but query has batch {query.shape[0]}", "make them equal")
    if key.shape[3] != query.shape[3]:
        _refuse("key", f"has width {key.shape[3]}, but query has width {query.shape[3]}", "make D equal")
    H, Hk = query.shape[1], key.shape[1]
    if (H == 0) != (Hk == 0) or (Hk and H % Hk):
        _refuse("key", f"has {Hk} heads, but query has {H}", "H must be a multiple of Hk (grouped-query heads)")


def _check_mixing(query: Tensor, key: Tensor, mixing: Tensor, content_bias: Tensor | None) -> None:
    if query.dim() != 3:
        _refuse("query", f"has {query.dim()} dimensions (shape {_shape(query)})", "pass [B, T, Ds], shared by all heads")
    if key.dim() != 3:
        _refuse("key", f"has {key.dim()} dimensions (shape {_shape(key)})", "pass [B, S, Ds], shared by all heads")
    if key.shape[0] != query.shape[0]:
        _refuse("key", f"has batch {key.shape[0]}, but query has batch {query.shape[0]}", "make them equal")
    if key.shape[2] != query.shape[2]:
        _refuse("key", f"has width {key.shape[2]}, but query has width {query.shape[2]}", "make Ds equal")
    _check_companion("mixing", mixing, query)
    if mixing.dim() != 2 or mixing.shape[1] != query.shape[2]:
        _refuse("mixing", f"has shape {_shape(mixing)}, but query has width {query.shape[2]}", "pass [H, Ds]")
    if content_bias is not None:
        _check_companion("content_bias", content_bias, query)
        expected = [query.shape[0], mixing.shape[0], key.shape[1]]
        if list(content_bias.shape) != expected:
            _refuse("content_bias", f"has shape {_shape(content_bias)}", f"pass [B, H, S] = {expected}")


def _check_companion(name: str, tensor: Tensor, query: Tensor) -> None:
    """A floating tensor beside the query: any floating dtype, the same device."""
    if not isinstance(tensor, Tensor):
        _refuse(name, f"is a {type(tensor).__name__}", "pass a torch.Tensor", TypeError)
    if tensor.dtype not in DTYPES:
        _refuse(name, f"has dtype {tensor.dtype}", "pass float32, bfloat16, float16 or float64", TypeError)
    if tensor.device != query.device:
        _refuse(name, f"is on {tensor.device}, but query is on {query.device}", "move it there")


def _check_gate(
    gate: Tensor | None, activation: str, query: Tensor, full: tuple[int, int, int, int]
) -> None:
    if activation not in GATE_ACTIVATIONS:
        _refuse("gate_activation", f"is {activation!r}", f"use one of {', '.join(map(repr, GATE_ACTIVATIONS))}")
    if gate is None:
        return
    _check_companion("gate", gate, query)
    rank = gate.dim()
    if not 1 <= rank <= 4:
        _refuse("gate", f"has {rank} dimensions", "pass [H], [B, H], [B, H, T] or [B, H, T, Dv]")
    expected = full[1:2] if rank == 1 else full[:rank]
    if any(got not in (1, want) for got, want in zip(gate.shape, expected, strict=True)):
        names = ("H",) if rank == 1 else ("B", "H", "T", "Dv")[:rank]
        _refuse(
            "gate",
            f"has shape {_shape(gate)}",
            f"a gate of {rank} dimensions is [{', '.join(names)}] = {list(expected)}, or 1 where it broadcasts",
        )


def _check_dropout(dropout_p: float) -> float:
    if not 0.0 <= dropout_p < 1.0:
        _refuse("dropout_p", f"is {dropout_p}", "pass a probability in [0, 1)")
    return float(dropout_p)


def _check_scale(scale: float | None, width: float) -> float:
    if scale is None:
        return float(width) ** -0.5 if width else 1.0
    if isinstance(scale, Tensor):
        _refuse("scale", "is a tensor", "pass a float (scale.item())", TypeError)
    if scale != scale or scale in (float("inf"), float("-inf")):
        _refuse("scale", f"is {scale}", "pass a finite float")
    return float(scale)


def _intervals(
    attn_mask: Mask | Tensor | None, is_causal: bool, query: Tensor, shape: tuple[int, int, int, int]
) -> Intervals:
    mask = as_mask(attn_mask, shape)
    if is_causal:
        mask = mask & Mask(causal=True)
    return mask.intervals(*shape, device=query.device)
