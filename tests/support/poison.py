"""Memory that must not be read: NaN in hidden elements, and in memory allocated next."""

from dataclasses import replace

import torch
from torch import Tensor

from heads_kernels.batch import expand_bias
from heads_kernels.testing.case import Inputs


def dirty_allocator(like: Tensor, largest: int = 1 << 20) -> None:
    """Fill and free blocks of all sizes up to `largest` bytes: memory allocated next holds NaN.

    An output that a kernel leaves unwritten is then NaN instead of an accidental zero.
    """
    blocks = []
    size = 64
    while size <= largest:
        for numel in (size // 8, size * 3 // 16):
            blocks += [torch.full((numel,), float("nan"), device=like.device, dtype=torch.float64)]
        size *= 2
    del blocks


def hide(inputs: Inputs, bad: float) -> tuple[Inputs, dict[str, Tensor]]:
    """Write `bad` into every key and value that no row sees and every row that sees no key.

    Into the gate, dout and dlse of such a row too. Also returns which elements those are, by argument.
    """
    p = inputs.parsed()
    masked = p.intervals.to_dense(p.T, p.S, p.query.device).expand(p.B, p.H, p.T, p.S)
    visible = masked if p.bias is None else masked & (expand_bias(p.bias, p.B) > -torch.inf)
    fully_masked, unseen = ~visible.any(3), ~visible.any(2)  # [B, H, T], [B, H, S]
    of_group = unseen.reshape(p.B, p.Hv, p.H // p.Hv, p.S).all(2)  # [B, Hv, S]
    if p.mixing is None:
        places = {"query": fully_masked, "key": of_group, "value": of_group}
    else:
        places = {"query": fully_masked.all(1), "key": unseen.all(1), "value": of_group}
        places["content_bias"] = unseen
    tensors = dict(inputs.tensors)
    for name, place in places.items():
        if name in tensors:
            whole = place if name == "content_bias" else place[..., None]
            tensors[name] = tensors[name].masked_fill(whole, bad)
    if p.bias is not None:  # where the mask hides the pair from all that share an element
        shape = tensors["bias"].shape
        seen = masked.int().sum_to_size((1,) * (4 - len(shape)) + tuple(shape))
        tensors["bias"] = tensors["bias"].masked_fill(seen.reshape(shape) == 0, bad)
    if p.gate is not None and p.gate.dim() > 2:  # where all rows that share an element see nothing
        shape = tensors["gate"].shape
        read = (~fully_masked).int().sum_to_size(shape[:3])
        unread = (read == 0).reshape(*shape[:3], *(1,) * (len(shape) - 3))
        tensors["gate"] = tensors["gate"].masked_fill(unread, bad)
    dout, dlse = inputs.dout.masked_fill(fully_masked[..., None], bad), inputs.dlse
    if dlse is not None and p.sinks is None:  # else the lse of such a row is its sink
        dlse = dlse.masked_fill(fully_masked, bad)
    poisoned = replace(inputs, tensors=tensors, dout=dout, dlse=dlse)
    return poisoned, {name: places[name] for name in tensors if name in places}
