"""From the arguments of the public functions to a `Call`.

`form` builds the call and checks only what it has to read for that; `check` checks the tensors of a call; `parse` does
both. To save time, a call on the CPU goes from `form` straight to the extension (`ops/direct.py`). The extension
refuses the calls that `check` refuses, but its messages are not written for users; `check` then raises the error.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from heads_kernels.batch import GROUPED, SHARED, Batch, flatten_bias, flatten_companion, flatten_operands
from heads_kernels.call import LAYOUTS, Call, Layouts, compute_dtype
from heads_kernels.checks import (
    GATE_ACTIVATIONS,
    check_alpha,
    check_choice,
    check_companion,
    check_dropout,
    check_excluded,
    check_flag,
    check_operands,
    check_row_weights,
    check_scale,
    check_sizes,
    check_softcap,
    check_tensor,
    check_whole_sequence,
    refuse,
    shape_of,
)
from heads_kernels.dtensor import is_sharded
from heads_kernels.mask import Intervals, Mask, as_mask
from heads_kernels.offset_bias import OffsetBias


# ---------------------------------------------------------------------- public arguments
def parse(*args: Any, **kwargs: Any) -> tuple[Call, Batch]:
    """Build and check a call from the arguments of `form`; returns it and its batch dimensions.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it, its value and what would work.
    """
    call, batch = form(*args, **kwargs)
    check(call)
    return call, batch


def form(
    operator: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    mixing: Tensor | None = None,
    content_bias: Tensor | None = None,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    alpha: float | Tensor | None = None,
    gate: Tensor | None = None,
    gate_activation: str = "identity",
    closed_grad: bool = True,
    bias: Tensor | OffsetBias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    exclude_keys: Tensor | None = None,
    received: bool | Tensor | None = None,
) -> tuple[Call, Batch]:
    """Build a call from the arguments of the public function `operator`; returns it and its batch dimensions.

    Tensors are not checked. Arguments that the operator does not take keep their defaults. `seed` is None: it is drawn
    when the call runs.
    """
    shared = mixing is not None or operator == "collaborative_attention"
    operands: tuple[Any, ...] = (query, key, value)
    if value is None and operator == "attention_statistics":
        operands = (query, key)
    batch: Batch = None
    try:
        check_whole_sequence()
        device = "cpu" if query.is_cpu else query.device.type  # the type takes longer
        if device != "meta" and torch.is_autocast_enabled(device):
            # Gates, mixing and biases keep their dtypes, and float64 is not cast, as in PyTorch's own operators.
            dtype = torch.get_autocast_dtype(device)
            cast = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in operands)
            query, key, *values = operands = tuple(cast)
            value = values[0] if values else None
        rows, columns, rank = query.shape, key.shape, 3 if shared else 4
        of_value = columns if len(operands) == 2 else value.shape  # type: ignore[union-attr]
        if not (  # one batch dimension, as nearly always: the general case takes longer
            len(rows) == len(columns) == rank
            and (len(of_value) == 4 or len(operands) == 2)
            and rows[0] == columns[0] == of_value[0]
        ):
            batch, (query, key, *values) = flatten_operands(SHARED if shared else GROUPED, *operands)
            value = values[0] if values else None
            rows, columns = query.shape, key.shape
            if batch is not None:
                content_bias = flatten_companion("content_bias", content_bias, batch, "H, S")
        H = mixing.shape[0] if shared else rows[1]  # type: ignore[union-attr]
        check_flag("is_causal", is_causal)
        mask, dense_bias, table = _CAUSAL if is_causal else _EVERY_PAIR, None, None
        if attn_mask is not None or bias is not None:
            sizes = rows[0], H, rows[-2], columns[-2]
            check_sizes(*sizes)  # before memory is taken for the mask
            attn_mask, dense_bias, table = _biases(attn_mask, bias, query, sizes, batch)
            if attn_mask is not None:
                mask = _mask(attn_mask, is_causal, query, sizes, batch)
    except Exception:
        # If one of these is not a tensor or does not fit the others, that is the error to report.
        check_operands(*operands)
        if shared:
            check_tensor("mixing", mixing, "pass a tensor [H, Ds] of a floating dtype", (2,))
        raise
    row_weights = None
    if operator == "entmax_attention":
        alpha = check_alpha(alpha, query, H, compute_dtype(query.dtype))
    elif operator == "attention_statistics":
        lead = (rows[0],) if batch is None else batch
        sizes_of_rows = (*lead, H, rows[-2])
        row_weights = check_row_weights(received, query, sizes_of_rows, compute_dtype(query.dtype))
        if batch is not None:
            row_weights = flatten_companion("received", row_weights, batch, "H, T")
            exclude_keys = flatten_companion("exclude_keys", exclude_keys, batch, "S")
        exclude_keys = check_excluded(exclude_keys, query, (rows[0], columns[-2]))
    if batch is not None:
        gate = _flatten_gate(gate, batch)
    if enable_gqa is not True:
        check_flag("enable_gqa", enable_gqa)
        if columns[1] not in (1, H):
            was = f"is False, but query has {H} heads and key has {columns[1]}"
            refuse("enable_gqa", was, "pass True, or as many heads of key and value as of query (or 1)")
    check_flag("closed_grad", closed_grad)
    fields = (  # in their order; `Call` with 25 names would take four times as long
        query,
        key,
        value,
        mixing,
        content_bias,
        gate,
        dense_bias,
        table,
        sinks,
        alpha,
        mask.k_lo,
        mask.k_hi,
        mask.first_keys,
        mask.key_visible,
        mask.dense_mask,
        exclude_keys,
        row_weights,
        None,  # seed
        mask.band_lo,
        mask.band_hi,
        check_scale(scale, rows[-1] / max(H, 1) if shared else rows[-1], query.dtype),
        check_softcap(softcap),
        check_dropout(dropout_p),
        gate_activation,
        closed_grad,
    )
    return Call._make(fields), batch


def _flatten_gate(gate: Tensor | None, batch: tuple[int, ...]) -> Tensor | None:
    """Flatten the batch dimensions of a gate `[*batch, H]`, `[*batch, H, T]` or `[*batch, H, T, Dv]`."""
    if not isinstance(gate, Tensor) or gate.dim() == 1:
        return gate
    layouts = {1: "H", 2: "H, T", 3: "H, T, Dv"}
    layout = layouts.get(gate.dim() - len(batch))
    if layout is None:
        was = f"has {gate.dim()} dimensions, but the call has {len(batch)} batch dimensions"
        refuse("gate", was, "pass [H], [..., H], [..., H, T] or [..., H, T, Dv]")
    return flatten_companion("gate", gate, batch, layout)


def _biases(
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


_EVERY_PAIR: Final = Intervals()
_CAUSAL: Final = Intervals(band_hi=1)


def _mask(
    attn_mask: Mask | Tensor, is_causal: bool, query: Tensor, shape: tuple[int, int, int, int], batch: Batch
) -> Intervals:
    """The mask of a call of `shape` = (B, H, T, S)."""
    if batch is not None and isinstance(attn_mask, Tensor) and 3 < attn_mask.dim() <= len(batch) + 3:
        missing = len(batch) + 3 - attn_mask.dim()
        flat = flatten_companion("attn_mask", attn_mask[(None,) * missing], batch, "H, T, S")
        mask = as_mask(flat, shape)
    else:
        mask = as_mask(attn_mask, shape)
    read = mask.intervals if mask is attn_mask else mask.compute_intervals
    intervals = read(*shape, device=query.device)
    return intervals & _CAUSAL if is_causal else intervals


# ---------------------------------------------------------------------- calls
#: Tensors beside query, key and value that `check` checks. Biases are checked when they are flattened.
_COMPANIONS: Final = ("mixing", "content_bias", "gate", "sinks")


def check(call: Call) -> None:
    """Check that the tensors of a call from `form` fit each other.

    Raises:
        ValueError, TypeError: the message names the argument, its value and what would work.
    """
    check_operands(*call[: 2 if call.value is None else 3])
    sizes = call.named_sizes()
    H, name, letter, heads = sizes["H"], "value", "Hv", sizes["Hv"]
    if call.mixing is None:
        if call.content_bias is not None:
            refuse("content_bias", "is given without mixing", "pass mixing [H, Ds] too, or leave it out")
        name, letter, heads = "key", "Hk", sizes["Hk"]
        sizes["Hv"] = heads
    if (H == 0) != (heads == 0) or (heads and H % heads):
        refuse(name, f"has {heads} heads, but the call has {H}", f"H must be a multiple of {letter} (grouped heads)")
    check_sizes(sizes["B"], H, sizes["T"], sizes["S"])
    if call.gate_activation != "identity":
        check_choice("gate_activation", call.gate_activation, GATE_ACTIVATIONS)
        if call.gate is None:
            refuse("gate_activation", f"is {call.gate_activation!r}, but gate is None", "pass the logits as gate")
    for name in ("key", "value", *_COMPANIONS):
        tensor = getattr(call, name)
        if tensor is not None:
            if name in _COMPANIONS:
                check_companion(name, tensor, call.query)
            check_layout(name, tensor, LAYOUTS[name], sizes)
    if call.alpha is not None:
        for name, field in zip(call._fields, call, strict=True):
            if is_sharded(field):
                refuse(name, "is a DTensor", "pass local tensors: entmax_attention serves no DTensors")


def check_layout(name: str, tensor: Tensor, layouts: Layouts, sizes: dict[str, int]) -> None:
    """Check that a tensor has one of these layouts, with these sizes of dimensions."""
    layout = layouts.get(tensor.dim())
    if layout is not None:
        for got, (dimension, may_be_1) in zip(tensor.shape, layout, strict=True):
            if got != sizes[dimension] and not (may_be_1 and got == 1):
                break
        else:
            return
    used = {dimension.name for each in layouts.values() for dimension in each}
    known = ", ".join(f"{each} = {size}" for each, size in sizes.items() if each in used)
    forms = [", ".join(f"{n} or 1" if may_be_1 else n for n, may_be_1 in each) for each in layouts.values()]
    written = " or ".join(f"[{form}]" for form in forms)
    refuse(name, f"has shape {shape_of(tensor)}", f"pass {written}, with {known}")
