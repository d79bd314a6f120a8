"""Checks of the tensors of an op, for direct calls of the op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from heads_kernels.checks import (
    check_bias,
    check_gate,
    check_grouped_heads,
    check_mixing,
    check_offset_table,
    check_sinks,
    check_sizes,
    check_tensors,
    check_value_heads,
    refuse,
)
from heads_kernels.ops.buffers import compute_dtype
from heads_kernels.ops.gate import LINEAR
from heads_kernels.ops.philox import SEED_LENGTH

if TYPE_CHECKING:
    from heads_kernels.ops.operator import Call

#: Backends whose extension checks sizes, strides and dtypes itself (csrc/bindings/).
_COMPILED: Final = ("cpu", "cuda")

#: Number of dimensions of the tensors that an op reads.
_RANKS: Final = {
    "query": 4,
    "key": 4,
    "value": 4,
    "alpha": 1,
    "dout": 4,
    "attended": 4,
    "lse": 3,
    "dlse": 3,
}
_SPARSE_RANKS: Final = {**_RANKS, "lse": 4}
_SHARED_RANKS: Final = {**_RANKS, "query": 3, "key": 3, "mixing": 2}

#: For each dimension its size, or the sizes allowed.
_Sizes = Sequence[int | tuple[int, ...]]


def check_operands(
    backend: str | None,
    required: Sequence[str],
    call: Call,
    *,
    excluded: Tensor | None = None,
    saved: Mapping[str, Tensor | None] | None = None,
) -> None:
    """Refuse tensors of an op that are None or do not fit each other; `backend` is None in its fake.

    `required` names the operands of the operator that may not be None, `saved` is `dout`, `attended`, `lse` and `dlse`
    (which may be None) of a backward pass. The package's own calls come from a `Problem` and pass. In direct calls of
    an op, a `Tensor` of its schema may be None, and a GPU kernel would read past the end of a tensor that is too small.
    """
    saved = {name: t for name, t in (saved or {}).items() if t is not None or name != "dlse"}
    query, key, mixing = call.query, call.key, call.mixing
    shared = mixing is not None or "mixing" in required
    sparse = "alpha" in required
    ranks = _SHARED_RANKS if shared else _SPARSE_RANKS if sparse else _RANKS
    tensors = {name: getattr(call, name) for name in required}
    for name, given in (*tensors.items(), *saved.items()):
        if given is None:
            refuse(name, "is None", "pass a tensor: this op reads it", TypeError)
        if given.dim() != ranks[name]:
            refuse(name, f"has shape {list(given.shape)}", f"pass {ranks[name]} dimensions")
    if backend in _COMPILED:
        return
    operands = {name: given for name, given in tensors.items() if name not in ("mixing", "alpha")}
    check_tensors(**operands)
    value = operands.get("value")
    if mixing is None:
        B, H, T, S, _ = check_grouped_heads(query, key)
        Hv = key.shape[1]
    else:
        B, H, T, S, _ = check_mixing(query, key, mixing, call.content_bias)
        Hv = H if value is None else check_value_heads(value, H, S)
    check_sizes(B, H, T, S)
    Dv = 0 if value is None else value.shape[-1]
    activation = "identity" if call.gate_activation == LINEAR else call.gate_activation
    check_gate(call.gate, activation, query, (B, H, T, Dv))
    check_bias(call.bias, query, (B, H, T, S))
    check_offset_table(call.offset_bias, query, (H, T, S))
    check_sinks(call.sinks, query, H)
    heads, rows, keys = (B, H, T, Dv), ((1, B), T), ((1, B), S)
    intervals = call.intervals
    dtype, device, compute = query.dtype, query.device, compute_dtype(query.dtype)
    exact: tuple[tuple[str, Tensor | None, Sequence[int], torch.dtype], ...] = (
        ("key", key, (B, *key.shape[1:]), dtype),
        ("value", value, (B, Hv, S, Dv), dtype),
        ("dout", saved.get("dout"), heads, dtype),
        ("attended", saved.get("attended"), heads, dtype),
        ("lse", saved.get("lse"), (2, *heads[:3]) if sparse else heads[:3], compute),
        ("dlse", saved.get("dlse"), heads[:3], compute),
        ("alpha", call.alpha, (H,), compute),
        ("seed", call.seed, (SEED_LENGTH,), torch.int64),
    )
    for name, tensor, size, wanted in exact:
        if tensor is None or (
            tensor.shape == size and tensor.dtype == wanted and tensor.device == device
        ):
            continue
        _check_one(name, tensor, size, wanted, device)
    ranges: tuple[tuple[str, Tensor | None, _Sizes, torch.dtype], ...] = (
        ("k_lo", intervals.k_lo, rows, torch.int32),
        ("k_hi", intervals.k_hi, rows, torch.int32),
        ("key_visible", intervals.key_visible, keys, torch.bool),
        ("dense_mask", intervals.dense, ((1, B), (1, H), (1, T), (1, S)), torch.bool),
        ("excluded", excluded, keys, torch.bool),
    )
    for name, tensor, sizes, wanted in ranges:
        if tensor is not None:
            _check_one(name, tensor, sizes, wanted, device)
    if (intervals.k_lo is None) != (intervals.k_hi is None):
        refuse("k_lo", "comes without k_hi, or the other way around", "pass both, or neither")
    if backend == "triton":  # its kernels compute addresses from these strides
        of_rows = saved.get("lse"), saved.get("dlse"), intervals.k_lo, intervals.k_hi
        dense = *of_rows, intervals.key_visible, excluded
        if not all(tensor is None or tensor.is_contiguous() for tensor in dense):
            names = "lse, dlse, k_lo, k_hi, key_visible or excluded"
            refuse(names, "is not contiguous", "copy it")
        for name, tensor in (*operands.items(), ("attended", saved.get("attended"))):
            if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                refuse(name, f"has stride {tensor.stride(-1)} in its last dimension", "it needs 1")


def _check_one(
    name: str, tensor: Tensor, sizes: _Sizes, dtype: torch.dtype, device: torch.device
) -> None:
    allowed = [size if isinstance(size, tuple) else (size,) for size in sizes]
    if tensor.dim() != len(allowed) or any(
        got not in those for got, those in zip(tensor.shape, allowed, strict=True)
    ):
        words = ", ".join(" or ".join(map(str, those)) for those in allowed)
        refuse(name, f"has shape {list(tensor.shape)}", f"pass [{words}]")
    if tensor.dtype != dtype:
        refuse(name, f"has dtype {tensor.dtype}", f"pass {dtype}", TypeError)
    if tensor.device != device:
        refuse(name, f"is on {tensor.device}, but query is on {device}", "move it there")
