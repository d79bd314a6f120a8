"""Times of a workload and of a call alone: every candidate in turn, in this process.

On a GPU they are taken between events, on a cold L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

import heads_kernels as hk
from benchmarks.candidates import RIVALS, Call, NotRun, candidate, explain, further_backends
from benchmarks.floor import Yardstick
from benchmarks.settings import Settings
from benchmarks.workloads import Direction, Workload, flops
from heads_kernels.testing import Timing, time_in_turn

#: A row is disturbed where the median of a candidate is more than this many times its fastest sample.
#: In a full run on a shared machine that was otherwise idle, 2 of 220 rows were.
MOST_SPREAD: Final = 1.5

#: What was found of a workload in one direction, as plain data:
#:
#: workload, table, label, direction
#: backend   that the package chooses
#: threads   of the CPU; None on a GPU
#: flops     that have to be done
#: times     by candidate `{"ms": the median, "fastest_ms", "samples"}`: "ours"; those of `candidates`; "dense", ours on
#:           the workload that this one is compared with; "float32", ours on the same numbers in float32, where the
#:           workload is in a narrower dtype
#: refused   why others were not timed
#: spread    the largest ratio of a median to the fastest sample among these
#: dense_flops, floor   where there are any; kept runs may lack them, and of baselines all but the median
Row = dict[str, Any]

#: A format string of a row's fields, or a function of a row.
Column = str | Callable[[Row], str]


@dataclass
class Found:
    """A table of a part of the benchmark: its rows, how they are shown, and what was wrong.

    `part` is what `--only` picks it by, and the key of its rows in the results file.
    """

    part: str
    title: str
    columns: Mapping[str, Column]
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def disturbed(row: Row) -> bool:
    """Whether something else ran meanwhile, so that the medians are not those of a quiet machine."""
    return bool(row.get("spread", 1.0) > MOST_SPREAD)


def speed(
    workload: Workload,
    dense: Workload | None,
    direction: Direction,
    settings: Settings,
    without: Collection[str] = (),
) -> tuple[Row, dict[str, str]]:
    """The row, and what failed of ours. A row that was disturbed is measured once more, and the calmer one stays."""
    inputs = workload.make(settings.dtype, settings.place)
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    failed: dict[str, str] = {}  # of ours
    rivals = [name for name in RIVALS[settings.device] if name not in without]
    names = ("ours", *further_backends(inputs[0], settings.device), *rivals)
    wanted = {name: (name, workload, inputs) for name in names}
    if dense is not None:
        wanted["dense"] = "ours", dense, dense.make(settings.dtype, settings.place)
    if settings.device == "cpu" and inputs[0].dout.dtype in (torch.bfloat16, torch.float16):
        wanted["float32"] = "ours", workload, tuple(one.to(torch.float32) for one in inputs)
    for key, (name, of, made) in wanted.items():
        try:
            calls[key] = candidate(name, of, made, direction)
        except NotRun as reason:  # noqa: PERF203 (each by itself)
            (refused if key in rivals else failed)[key] = str(reason)
    if "ours" in failed:
        return {}, failed
    yardstick = Yardstick(inputs, direction) if settings.floor else None
    if yardstick:  # right after ours, whose turn then finds the caches as in a run without
        calls = {"ours": calls["ours"], **yardstick.calls, **calls}
    effort = settings.effort()

    def measured() -> Row:
        with torch.set_grad_enabled(direction == "backward"):
            times = time_in_turn(calls, device=settings.place, cold=settings.device == "cuda",
                budget_s=effort.budget_s, least=effort.least, warmup=1)  # fmt: skip
        shown = times.keys() - (yardstick.calls.keys() if yardstick else ())
        row: Row = {
            "workload": workload.name, "table": workload.table, "label": workload.label,
            "direction": direction, "backend": explain(inputs[0]).backend,
            "threads": None if settings.device == "cuda" else torch.get_num_threads(),
            "flops": flops(inputs, direction),
            "times": {name: _plain(times[name]) for name in times if name in shown},
            "refused": refused,
            "spread": max(times[name].median / times[name].minimum for name in shown),
        }  # fmt: skip
        if dense is not None and "dense" in times:
            row["dense_flops"] = flops(wanted["dense"][2], direction)
        if yardstick:
            row["floor"] = asdict(yardstick.floor(times))
        return row

    row = measured()
    if disturbed(row):
        row = min(row, measured(), key=lambda row: float(row["spread"]))
    return row, failed


def _plain(timing: Timing) -> dict[str, Any]:
    return {"ms": timing.median * 1e3, "fastest_ms": timing.minimum * 1e3, "samples": len(timing.samples)}


#: Seconds of a sample in the part `overhead`: dozens of calls, since the first one after another kind takes up to 30 us
#: more.
_SAMPLE_S: Final = 5e-3


def overhead(settings: Settings) -> Iterator[Found]:
    """Microseconds of a call on tensors that are too small to matter, B1 H2 T4 D8, and of a call and its gradients."""
    place = settings.place
    query, key, value = torch.randn(3, 1, 2, 4, 8, device=place)
    shared_query, shared_key = torch.randn(2, 1, 4, 8, device=place)
    gate, mixing = torch.rand(2, device=place), torch.rand(2, 8, device=place)
    real = torch.arange(4, device=place)[None] < 3
    mask, visible = hk.Mask(key_mask=real), real[:, None, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    trained = tuple(each.clone().requires_grad_() for each in (query, key, value))
    dout = torch.randn_like(query)

    def with_gradients(attend: Callable[..., torch.Tensor], **mask: Any) -> Call:
        return lambda: torch.autograd.grad(attend(*trained, **mask), trained, dout)

    calls: dict[str, Call] = {
        "gated_attention": lambda: hk.gated_attention(query, key, value),
        "gated_attention with a gate": lambda: hk.gated_attention(query, key, value, gate=gate),
        "collaborative_attention": lambda: hk.collaborative_attention(shared_query, shared_key, value, mixing),
        "gated_attention with a kept Mask": lambda: hk.gated_attention(query, key, value, mask),
        "SDPA": lambda: sdpa(query, key, value),
        "SDPA with a mask": lambda: sdpa(query, key, value, attn_mask=visible),
        "SDPA times gate": lambda: sdpa(query, key, value) * gate[:, None, None],
        "eager times gate": lambda: (query @ key.mT * 8**-0.5).softmax(-1) @ value * gate[:, None, None],
        "gated_attention and gradients": with_gradients(hk.gated_attention),
        "gated_attention with a kept Mask and gradients": with_gradients(hk.gated_attention, attn_mask=mask),
        "SDPA and gradients": with_gradients(sdpa),
        "SDPA with a mask and gradients": with_gradients(sdpa, attn_mask=visible),
    }
    budget = settings.effort().budget_s
    times = time_in_turn(calls, device=place, budget_s=budget, least=20, warmup=20, sample_s=_SAMPLE_S)
    found = Found("overhead", "Overhead of a call", {"B1 H2 T4 D8": "{call}", "microseconds": "{us:.1f}"})
    found.rows = [{"call": name, "us": timing.median * 1e6} for name, timing in times.items()]
    yield found
