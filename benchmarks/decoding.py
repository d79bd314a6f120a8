"""One query row against a cache: time, and the rate at which keys and values are read.

The cache has its heads first, as in transformers, or its tokens first, as in `hk.nn.KeyValueCache`; SDPA reads the same
numbers with the query heads of a group as rows of one key head, and the faster of its two times is what ours are
compared with. Where all heads have keys of their own at width 64, collaborative attention of the same model width
stands beside them.

The rate is that of all keys and values of a call, each read once. The rate of memory beside it is the highest that a
sum, a maximum and a dot product of PyTorch reach, in turn with the calls, on as many bytes as the call reads, so that
they have the caches that the call has. A call can come out above them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

import heads_kernels as hk
from benchmarks.candidates import Call
from benchmarks.measure import Row, disturbed
from benchmarks.results import Column, Found
from benchmarks.settings import Settings, on_threads, word
from heads_kernels.testing import CollaborativeCase, GatedCase, Inputs, accuracy, time_in_turn

#: Larger caches are left out.
MOST_BYTES: Final = 1 << 31
#: Past this reads run at the speed of memory, whatever the size.
_MOST_READ: Final = 1 << 28
#: Width of the shared query and key beside 12 heads of 64, as in BERT-base's workloads.
_SHARED: Final = 256


def case(B: int, H: int, Hk: int, S: int, D: int) -> GatedCase:
    """By the name that its rows have."""
    heads = f"H{H}" if Hk == H else f"H{H} Hk{Hk}"
    return GatedCase(f"B{B} {heads} S{S} D{D}", B, H, 1, S, D=D, Dv=D, Hk=Hk)


def cases(settings: Settings) -> list[tuple[GatedCase, torch.dtype]]:
    """Those of a form with their dtypes; on a GPU all are in the dtype of the run."""
    on_gpu = settings.device == "cuda"
    dtypes = (settings.dtype,) if on_gpu else (torch.float32, torch.bfloat16)
    shapes = [(1, 12, 12, 512, 64), (8, 12, 12, 4096, 64), (1, 16, 4, 4096, 128)]
    if settings.form == "smoke":
        shapes = [(2, 12, 12, 32, 64), (2, 16, 4, 32, 64)]
    elif settings.form == "quick":
        dtypes = dtypes[:1]
    else:
        shapes = [
            (B, *heads, S, D)
            for heads, D, B, S in product(((12, 12), (16, 4)), (64, 128), (1, 8, 64), (512, 4096))
        ]
    return [
        (case(B, H, Hk, S, D), dtype)
        for B, H, Hk, S, D in shapes
        for dtype in dtypes
        if 2 * B * Hk * S * D * dtype.itemsize <= MOST_BYTES
    ]


def calls_of(case: GatedCase, dtype: torch.dtype, place: torch.device) -> dict[str, Inputs]:
    """The calls of ours by candidate; both layouts of the cache are of the same memory."""
    B, H, S, D = case.B, case.H, case.S, case.D
    first = case.make(dtype, place, drawn_on=place)
    cached = {
        name: first.tensors[name].view(B, S, case.Hk, D).transpose(1, 2)
        for name in ("key", "value")
    }
    tokens = replace(first, tensors={**first.tensors, **cached})
    found = {"ours, heads first": first, "ours, tokens first": tokens}
    if case.Hk == H and D == 64:
        shared = CollaborativeCase("decoding", B, H, 1, S, Ds=_SHARED, Dv=D, scale=D**-0.5,
            layout="transposed")  # fmt: skip
        found["ours, collaborative"] = shared.make(dtype, place, drawn_on=place)
    return found


def sdpa(inputs: Inputs) -> Tensor:
    """SDPA with the query heads of a group as rows of one key head."""
    query, key, value = (inputs.tensors[name] for name in ("query", "key", "value"))
    rows = query.view(key.shape[0], key.shape[1], -1, query.shape[-1])
    return F.scaled_dot_product_attention(rows, key, value).view(query.shape)


def check(calls: dict[str, Inputs]) -> list[str]:
    """What breaks the accuracy rule, in the first sequence of the batch."""
    failures = []
    for name, inputs in calls.items():
        tensors = {k: t if k == "mixing" else t[:1] for k, t in inputs.tensors.items()}
        first = replace(inputs, tensors=tensors, dout=inputs.dout[:1])
        report = accuracy.compare(accuracy.reference(first, backward=False), None, name)
        if not report.ok:
            failures.append(str(report))
    return failures


def measure(settings: Settings) -> Iterator[Found]:
    """Every case in its own dtype, on a CPU in full on all threads and on one."""
    found = Found("decoding", "Decoding: one query row against a cache", _COLUMNS)
    own = torch.get_num_threads()
    for case, dtype in cases(settings):
        calls, label = calls_of(case, dtype, settings.place), f"{case} {word(dtype)}"
        failures = check(calls)
        found.failures += [f"decoding, {label}: {failure}" for failure in failures]
        for threads in () if failures else settings.threads(own):
            with on_threads(threads):
                found.rows += rows(label, calls, settings)
    found.notes.append(
        "x SDPA: the faster SDPA of the case by this. of memory: by the rate of PyTorch's fastest reduction of as many "
        "bytes."
    )
    yield found


def rows(label: str, calls: dict[str, Inputs], settings: Settings) -> list[Row]:
    """All candidates in turn, on the present number of threads.

    `times_sdpa` is the median of the faster SDPA by that of the candidate, `memory_gbytes` the rate of memory.
    """
    effort = settings.effort(has_goal=False)
    compared: dict[str, Call] = {
        name: partial(getattr(hk, inputs.operator), **inputs.arguments())
        for name, inputs in calls.items()
    }
    compared |= {
        name.replace("ours", "SDPA"): partial(sdpa, inputs)
        for name, inputs in calls.items()
        if inputs.operator == "gated_attention"
    }
    first = calls["ours, heads first"].tensors
    tokens = first["key"].shape[0] * first["key"].shape[2]  # of the cache
    whole = first["key"].nbytes + first["value"].nbytes
    read, readers = _readers(min(whole, _MOST_READ), settings.place)
    with torch.inference_mode():
        times = time_in_turn(compared | readers, device=settings.place, cold=settings.device == "cuda",
            budget_s=effort.budget_s, least=effort.least, warmup=1)  # fmt: skip
    memory = max(read / times[name].minimum for name in readers) * 1e-9
    best = min(timing.median for name, timing in times.items() if name.startswith("SDPA"))
    found = []
    for name in compared:
        timing, cached = times[name], calls[name.replace("SDPA", "ours")].tensors
        size = cached["key"].nbytes + cached["value"].nbytes
        found.append({
            "case": label, "candidate": name, "threads": torch.get_num_threads(),
            "ms": timing.median * 1e3, "times_sdpa": best / timing.median, "token_bytes": size // tokens,
            "gbytes": size / timing.median * 1e-9, "memory_gbytes": memory,
            "spread": timing.median / timing.minimum,
        })  # fmt: skip
    return found


_COLUMNS: Final[dict[str, Column]] = {
    "": "{case}",
    "candidate": "{candidate}",
    "thr": "{threads}",
    "bytes a token": "{token_bytes:,}",
    "ms": "{ms:.3f}",
    "x SDPA": "{times_sdpa:.2f}x",
    "GB/s": "{gbytes:.1f}",
    "of memory": lambda row: f"{row['gbytes'] / row['memory_gbytes']:.0%}",
    "spread": lambda row: f"{row['spread']:.1f}x" if disturbed(row) else "",
}


def _readers(size: int, place: torch.device) -> tuple[int, dict[str, Call]]:
    """Bytes that each reads, and the calls."""
    numbers = torch.ones(max(size // 8, 1), dtype=torch.int64, device=place)
    reals = numbers.view(torch.float32)
    return numbers.nbytes, {
        "sum": reals.sum,
        "maximum": numbers.max,
        "dot": lambda: torch.dot(reals, reals),
    }
