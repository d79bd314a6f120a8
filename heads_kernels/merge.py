"""Attention over all keys from results over parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from heads_kernels.checks import check_tensor, refuse, shape_of

_NEG_INF: Final = float("-inf")


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint sets of keys, computed with `return_lse=True`, into attention over all of them.

        lse = log(sum_n exp(lse_n))
        out = sum_n exp(lse_n - lse) * out_n

    Apply a gate to each part or to the result. Pass `sinks` to one of the calls only, or add a part whose output is 0
    and whose `lse` is the sink. Differentiable.

    Args:
        outs: `[..., Dv]` each, of one shape, dtype and device.
        lses: `[...]` each, in the order of `outs`; -inf in rows that see no key of the part, whose output is not read.

    Returns:
        `(out, lse)`, in the dtypes of the parts. In rows that see no key in any part, `out` is 0, `lse` is -inf and
        gradients are 0.

    Raises:
        ValueError, TypeError: the parts do not fit each other; the message names the argument.
    """
    outs, lses = list(outs), list(lses)
    if not outs:
        refuse("outs", "is empty", "pass at least one part")
    if len(outs) != len(lses):
        refuse("lses", f"has {len(lses)} parts, outs {len(outs)}", "pass one lse for each output")
    if check_tensor("outs", outs[0]).dim() == 0:
        refuse("outs", "has a part of shape []", "pass [..., Dv]")
    device = outs[0].device
    for name, parts, shape in (("outs", outs, outs[0].shape), ("lses", lses, outs[0].shape[:-1])):
        for part in parts:
            check_tensor(name, part)
            if part.shape != shape:
                refuse(name, f"has a part of shape {shape_of(part)}", f"pass {list(shape)}")
            if part.dtype != parts[0].dtype:
                refuse(name, f"has parts of {part.dtype} and {parts[0].dtype}", "cast one of them")
            if part.device != device:
                was = f"has a part on {part.device}, but the first of outs is on {device}"
                refuse(name, was, f"move it to {device}")
    stacked = torch.stack(lses)  # [n, ...]
    hidden = stacked == _NEG_INF
    blank = hidden.all(0)
    stacked = stacked.masked_fill(blank, 0.0)  # the derivative of a row of -inf is NaN
    lse = torch.logsumexp(stacked, 0).masked_fill(blank, _NEG_INF)
    out = torch.zeros_like(outs[0], dtype=lse.dtype)
    for part, unread, share in zip(outs, hidden, torch.softmax(stacked, 0), strict=True):
        out = out + share[..., None] * part.to(lse.dtype).masked_fill(unread[..., None], 0.0)
    return out.to(outs[0].dtype), lse
