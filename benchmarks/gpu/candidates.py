"""Who is timed: our GPU backends, and what people run today.

SDPA is called by the name of each of its kernels, times the gate; FlexAttention compiled, its block
mask made beforehand, skipping closed heads and what masks hide; eager PyTorch where it fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.baselines import baselines, times_gate
from heads_kernels.testing import Inputs

Call = Callable[[], Tensor]

SDPA: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
RIVALS: Final = (*SDPA, "eager", "flex")
_REASON = 300  # characters of a refusal that are kept


class NotRun(Exception):
    """A baseline that is not run; the message says why."""


def rival(name: str, inputs: Inputs, flex: bool, matrices: int) -> Call:
    """The baseline as a callable; raises `NotRun`. Eager keeps `matrices` `[B, H, T, S]` at once."""
    if name == "flex":
        if not flex:
            raise NotRun("not compiled for this workload: time")
        return _flex(inputs)
    if name == "eager":
        _must_fit(inputs, matrices)
        return baselines(inputs)["eager"]
    call, backend = baselines(inputs)["sdpa"], SDPA[name]

    def by_name() -> Tensor:
        with sdpa_kernel(backend):
            return call()

    return by_name


def attempt(make: Callable[[], Callable[[], Any]], device: str) -> tuple[Callable[[], Any], Any]:
    """The callable and its first result; raises `NotRun` with the reason of whatever it raises.

    SDPA tells in warnings why a kernel cannot serve a call.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            call = make()
            result = call()
            if device == "cuda":
                torch.cuda.synchronize()
        except NotRun:
            raise
        except Exception as error:
            reasons = [str(error), *(str(warning.message) for warning in said)]
            reasons = [reason.partition(" (Triggered internally")[0] for reason in reasons]
            text = "; ".join(" ".join(reason.split()) for reason in reasons)
            raise NotRun(f"{type(error).__name__}: {text}"[:_REASON]) from error
    return call, result


def _must_fit(inputs: Inputs, matrices: int) -> None:
    """Room for eager's `[B, H, T, S]` matrices, of which it keeps about half of `matrices` at once."""
    if inputs.dout.device.type != "cuda":
        return
    p = inputs.problem()
    needed = matrices * p.B * p.H * p.T * p.S * inputs.dout.element_size()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if needed > free:
        raise NotRun(f"it may take {needed / 2**30:.0f} GiB; {free / 2**30:.0f} are free")


def _flex(inputs: Inputs) -> Call:
    if inputs.operator != "gated_attention":
        raise NotRun(
            "its queries are per head: it would read a materialised mixed query, as SDPA does"
        )
    t, scale = inputs.tensors, inputs.problem().scale
    query, key, value = t["query"], t["key"], t["value"]
    on_gpu = query.is_cuda
    block_mask = _block_mask(inputs)
    torch._dynamo.reset()  # one shape each: no limit of recompilations is near
    torch._functorch.config.donated_buffer = False  # the backward pass is taken many times
    attend: Any = (
        torch.compile(flex_attention, dynamic=False, fullgraph=True) if on_gpu else flex_attention
    )

    def call() -> Tensor:
        out = attend(query, key, value, block_mask=block_mask, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1])  # fmt: skip
        return times_gate(out, inputs)

    return call


def _block_mask(inputs: Inputs) -> BlockMask | None:
    """What the mask hides, and every key of a closed head; None where there is neither."""
    p = inputs.problem()
    is_open, mask = p.open_heads().contiguous(), p.intervals
    by_head, by_batch = not bool(is_open.all()), mask.k_lo is not None
    if mask.key_visible is not None or mask.dense is not None:
        raise NotRun("its block mask is made of intervals here")
    if not by_head and not by_batch and not inputs.options["is_causal"]:
        return None
    lo, hi = mask.k_lo, mask.k_hi
    rows = None if lo is None else torch.arange(p.B, device=lo.device) % lo.shape[0]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j >= i + mask.band_lo) & (j < i + mask.band_hi)
        if lo is not None and hi is not None and rows is not None:
            seen = seen & (j >= lo[rows[b], i]) & (j < hi[rows[b], i])
        return seen & is_open[b, h] if by_head else seen

    # B is 1 unless the batch decides; a closed head is closed in every batch of these workloads.
    return create_block_mask(
        visible, p.B if by_batch else None, p.H if by_head else None, p.T, p.S,
        device=str(p.query.device),
    )  # fmt: skip
