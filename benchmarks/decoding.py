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
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Case:
    B: int
    H: int
    Hk: int
    S: int
    D: int
    dtype: torch.dtype

    def __str__(self) -> str:
        heads = f"H{self.H}" if self.Hk == self.H else f"H{self.H} Hk{self.Hk}"
        return f"B{self.B} {heads} S{self.S} D{self.D} {word(self.dtype)}"

    @property
    def cache_bytes(self) -> int:
        return 2 * self.B * self.S * self.Hk * self.D * self.dtype.itemsize

    @property
    def collaborative(self) -> bool:
        """Whether collaborative attention of the same model width stands beside it."""
        return self.Hk == self.H and self.D == 64


def cases(settings: Settings) -> list[Case]:
    """Those of a form; on a GPU all are in the dtype of the run."""
    on_gpu = settings.device == "cuda"
    narrow = (settings.dtype,) if on_gpu else (torch.float32, torch.bfloat16)
    if settings.form == "smoke":
        return [Case(2, 12, 12, 32, 64, dtype) for dtype in narrow] + [
            Case(2, 16, 4, 32, 64, dtype) for dtype in narrow
        ]
    if settings.form == "quick":
        shapes = [(1, 12, 12, 512, 64), (8, 12, 12, 4096, 64), (1, 16, 4, 4096, 128)]
        return [Case(*shape, narrow[0]) for shape in shapes]
    every = (
        Case(B, H, Hk, S, D, dtype)
        for (H, Hk), D, B, S, dtype in product(
            ((12, 12), (16, 4)), (64, 128), (1, 8, 64), (512, 4096), narrow
        )
    )
    return [case for case in every if case.cache_bytes <= MOST_BYTES]


def calls_of(case: Case, place: torch.device) -> dict[str, Inputs]:
    """The calls of ours by candidate; both layouts of the cache are of the same memory."""
    B, H, Hk, S, D = case.B, case.H, case.Hk, case.S, case.D
    first = GatedCase("decoding", B, H, 1, S, D=D, Dv=D, Hk=Hk).make(
        case.dtype, place, drawn_on=place
    )
    cached = {
        name: first.tensors[name].view(B, S, Hk, D).transpose(1, 2) for name in ("key", "value")
    }
    tokens = replace(first, tensors={**first.tensors, **cached})
    found = {"ours, heads first": first, "ours, tokens first": tokens}
    if case.collaborative:
        shared = CollaborativeCase("decoding", B, H, 1, S, Ds=_SHARED, Dv=D, scale=D**-0.5,
            layout="transposed")  # fmt: skip
        found["ours, collaborative"] = shared.make(case.dtype, place, drawn_on=place)
    return found


def sdpa(inputs: Inputs) -> Tensor:
    """SDPA with the query heads of a group as rows of one key head."""
    query, key, value = (inputs.tensors[name] for name in ("query", "key", "value"))
    rows = query.view(key.shape[0], key.shape[1], -1, query.shape[-1])
    return F.scaled_dot_product_attention(rows, key, value).view(query.shape)


def check(case: Case, calls: dict[str, Inputs]) -> list[str]:
    """What breaks the accuracy rule, in the first sequence of the batch."""
    failures = []
    for name, inputs in calls.items():
        tensors = {k: t if k == "mixing" else t[:1] for k, t in inputs.tensors.items()}
        first = replace(inputs, tensors=tensors, dout=inputs.dout[:1])
        report = accuracy.compare(accuracy.reference(first, backward=False), None, name)
        if not report.ok:
            failures.append(f"decoding, {case}: {report}")
    return failures


def measure(settings: Settings) -> Iterator[Found]:
    """Every case in its own dtype, on a CPU in full on all threads and on one."""
    found = Found("decoding", "Decoding: one query row against a cache", _COLUMNS)
    own = torch.get_num_threads()
    for case in cases(settings):
        calls = calls_of(case, settings.place)
        failures = check(case, calls)
        found.failures += failures
        for threads in () if failures else settings.threads(own):
            with on_threads(threads):
                found.rows += rows(case, calls, settings)
    found.notes.append(
        "x SDPA: the faster SDPA of the case by this. of memory: by the rate of PyTorch's fastest reduction of as many "
        "bytes."
    )
    yield found


def rows(case: Case, calls: dict[str, Inputs], settings: Settings) -> list[Row]:
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
    read, readers = _readers(min(case.cache_bytes, _MOST_READ), settings.place)
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
            "case": str(case), "candidate": name, "threads": torch.get_num_threads(),
            "ms": timing.median * 1e3, "times_sdpa": best / timing.median, "token_bytes": size // (case.B * case.S),
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
