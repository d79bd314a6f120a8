"""Who is timed: our operator, and what people run today.

On a CPU those are eager PyTorch and SDPA times the gate. On a GPU SDPA is called by the name of each of its kernels;
FlexAttention is compiled, its block mask made beforehand, skipping closed heads and what masks hide; flash-attn is
timed where it is installed; eager PyTorch where it fits. Further GPU backends of ours stand beside the one that the
package chooses.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import heads_kernels as hk
from benchmarks.baselines import baselines, times_gate
from benchmarks.settings import Device
from benchmarks.workloads import Direction, Workload
from heads_kernels.backends import BackendName
from heads_kernels.testing import Inputs

Call = Callable[[], object]
Attention = Callable[[], Tensor]

_SDPA: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
#: In the order in which they are tried and shown.
RIVALS: Final[dict[Device, tuple[str, ...]]] = {
    "cpu": ("eager", "sdpa"),
    "cuda": (*_SDPA, "flex", "flash_attn", "eager"),
}
BASELINES: Final = {name for names in RIVALS.values() for name in names}
#: Kernels of SDPA, in whatever name.
SDPA: Final = ("sdpa", *_SDPA)
#: Matrices `[B, H, T, S]` that eager may hold at once; it keeps about half of them.
MATRICES: Final[dict[Direction, int]] = {"forward": 4, "backward": 8}
_REASON = 300  # characters of a refusal that are kept


class NotRun(Exception):
    """A candidate that is not run; the message says why."""


def candidate(name: str, workload: Workload, inputs: tuple[Inputs, ...], direction: Direction) -> Call:
    """One candidate, called once; raises `NotRun`. Backward, the graphs are made here, and the call takes gradients."""
    make = partial(attention, name, flex=workload.flex, direction=direction)
    if direction == "backward":
        inputs = tuple(one.requires_grad() for one in inputs)
    return _called(inputs, make, direction)


def further_backends(inputs: Inputs, device: Device) -> list[str]:
    """The GPU backends that can serve this call beside the one that the package chooses."""
    if device == "cpu":
        return []
    others = [name for name in get_args(BackendName) if name not in ("cpu", "eager", explain(inputs).backend)]
    return [name for name in others if explain(inputs, name).backend]


def explain(inputs: Inputs, backend: BackendName | None = None) -> hk.Choice:
    """Which backend runs this call."""
    return hk.explain(inputs.operator, **inputs.arguments(), backend=backend)


def _called(leaves: tuple[Inputs, ...], make: Callable[[Inputs], Attention], direction: Direction) -> Call:
    """The callable, after its first call; raises `NotRun` with the reason of whatever that raises.

    SDPA says in warnings why a kernel cannot serve a call.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            calls: list[Call] = []
            for one in leaves:
                attend = make(one)
                calls.append(attend if direction == "forward" else gradients(one, attend()))
            call = calls[0] if len(calls) == 1 else lambda: [each() for each in calls]
            with torch.set_grad_enabled(direction == "backward"):
                call()
            if leaves[0].dout.is_cuda:
                torch.cuda.synchronize()
        except NotRun:
            raise
        except Exception as error:
            reasons = [str(error), *(str(warning.message) for warning in said)]
            reasons = [reason.partition(" (Triggered internally")[0] for reason in reasons]
            text = "; ".join(" ".join(reason.split()) for reason in reasons)
            raise NotRun(f"{type(error).__name__}: {text}"[:_REASON]) from error
    return call


def gradients(inputs: Inputs, out: Tensor) -> Call:
    """The backward pass from `out`, again and again."""
    leaves = list(inputs.tensors.values())
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def attention(name: str, inputs: Inputs, *, flex: bool, direction: Direction) -> Attention:
    """A baseline, "ours" or one of our backends as a callable; raises `NotRun`."""
    if name == "ours":
        return inputs.call
    if name not in BASELINES:
        return partial(inputs.call, name)
    if name == "flex":
        if not flex:
            raise NotRun("not compiled for this workload: time")
        return _flex(inputs)
    if name == "flash_attn":
        return _flash_attn(inputs)
    known = baselines(inputs)
    if name == "eager":
        _must_fit(inputs, direction)
        return known["eager"]
    if "sdpa" not in known:
        raise NotRun("SDPA has no cap, no sinks and no entmax")
    if name == "sdpa":
        return known["sdpa"]

    def by_name() -> Tensor:
        with sdpa_kernel(_SDPA[name]):
            return known["sdpa"]()

    return by_name


def _must_fit(inputs: Inputs, direction: Direction) -> None:
    """Refuse eager PyTorch where its matrices may take more memory than there is."""
    p, free = inputs.parsed(), _free_bytes(inputs.dout.device)
    needed = MATRICES[direction] * p.B * p.H * p.T * p.S * inputs.dout.element_size()
    if needed > free:
        raise NotRun(f"{free / 2**30:.1f} GiB free of {needed / 2**30:.1f} that it may take")


def _free_bytes(device: torch.device) -> float:
    """Memory that can be had without swapping, on the CPU by the kernel and by the container."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    limits = [math.inf]
    with contextlib.suppress(OSError):  # another system, or no container
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(s.split()[1]) * 1024 for s in lines if s.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit = float((group / "memory.max").read_text().replace("max", "inf"))
        limits.append(limit - int((group / "memory.current").read_text()))
    return min(limits)


def _plain(inputs: Inputs, name: str) -> None:
    """Refuse what is no gated attention on scores alone."""
    terms = {"bias", "offset_table", "sinks", "alpha"} & inputs.tensors.keys()
    if inputs.operator != "gated_attention" or terms or "softcap" in inputs.options:
        raise NotRun(f"{name} is timed on gated attention without score terms")


def _flash_attn(inputs: Inputs) -> Attention:
    """The flash-attn package, times the gate; its tensors have the tokens before the heads."""
    _plain(inputs, "flash-attn")
    try:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]
    except ImportError as error:
        raise NotRun(f"flash-attn is not installed ({error})") from error
    if "attn_mask" in inputs.options:
        raise NotRun("flash-attn takes no mask")
    t, scale = inputs.tensors, inputs.parsed().scale
    causal = bool(inputs.options.get("is_causal"))
    if causal and t["query"].shape[2] != t["key"].shape[2]:
        raise NotRun("its causal mask is aligned to the lower right")
    query, key, value = (t[name].transpose(1, 2) for name in ("query", "key", "value"))

    def call() -> Tensor:
        out: Tensor = flash_attn_func(query, key, value, softmax_scale=scale, causal=causal)
        return times_gate(out.transpose(1, 2), inputs)

    return call


def _flex(inputs: Inputs) -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    _plain(inputs, "FlexAttention")
    t, scale = inputs.tensors, inputs.parsed().scale
    query, key, value = t["query"], t["key"], t["value"]
    block_mask = _block_mask(inputs)
    torch._dynamo.reset()  # one shape each: no limit of recompilations is near
    torch._functorch.config.donated_buffer = False  # the backward pass is taken many times
    attend: Any = flex_attention
    if query.is_cuda:
        attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call() -> Tensor:
        out = attend(query, key, value, block_mask=block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        return times_gate(out, inputs)

    return call


def _block_mask(inputs: Inputs) -> Any:
    """What the mask hides, and every key of a closed head; None where there is neither."""
    from torch.nn.attention.flex_attention import create_block_mask

    p = inputs.parsed()
    is_open, mask = p.open_heads().contiguous(), p.intervals
    by_batch = mask.k_lo is not None
    by_head = not bool(is_open.all()) or (mask.k_lo is not None and mask.k_lo.shape[1] != 1)
    if any(part is not None for part in (mask.key_visible, mask.dense_mask, mask.first_keys)):
        raise NotRun("its block mask is made of intervals here")
    if not by_head and not by_batch and not inputs.options.get("is_causal"):
        return None
    bounds = None
    if mask.k_lo is not None and mask.k_hi is not None:
        bounds = [bound.expand(p.B, p.H, p.T) for bound in (mask.k_lo, mask.k_hi)]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j >= i + mask.band_lo) & (j < i + mask.band_hi)
        if bounds is not None:
            seen = seen & (j >= bounds[0][b, h, i]) & (j < bounds[1][b, h, i])
        return seen & is_open[b, h] if by_head else seen

    # B is 1 unless the batch decides; a closed head is closed in every batch of these workloads.
    return create_block_mask(
        visible, p.B if by_batch else None, p.H if by_head else None, p.T, p.S,
        device=str(p.query.device),
    )  # fmt: skip
