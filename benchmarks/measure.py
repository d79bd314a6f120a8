"""Speed, peak memory and overhead per call: every candidate in turn, in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import heads_kernels as hk
from benchmarks.baselines import baselines
from benchmarks.floor import Floor, Yardstick
from benchmarks.goals import Versus
from benchmarks.problems import DIRECTIONS, Direction, Workload
from heads_kernels.testing import Inputs, peak_memory, time_in_turn

Call = Callable[[], object]
_GIB = 2.0**30
#: A row is disturbed where the median of a candidate is more than this many times its fastest sample.
#: In a full run on a shared machine that was otherwise idle, 2 of 220 rows were.
MOST_SPREAD = 1.5


@dataclass(frozen=True)
class Effort:
    """Seconds for all candidates of one measurement, and the least samples of each."""

    budget_s: float
    least: int


@dataclass(frozen=True)
class Speed:
    """Medians in milliseconds; `gflops` are executed FLOPs by our own median, `fastest_ms` ours.

    `spread` is the largest ratio of a median to the fastest sample among all that was timed in this row.

    `dense_ms` and `dense_gflops` are ours on the dense workload, `float32_ms` is ours on the same
    numbers in float32, where the workload is in a narrower dtype. `sdpa_ms` is None where SDPA can't
    do it. `floor` is there where asked for.
    """

    workload: str
    table: str
    label: str
    direction: Direction
    backend: str
    threads: int
    samples: int
    ms: float
    fastest_ms: float
    spread: float
    gflops: float
    eager_ms: float
    sdpa_ms: float | None
    dense_ms: float | None = None
    dense_gflops: float | None = None
    float32_ms: float | None = None
    floor: Floor | None = None

    @property
    def disturbed(self) -> bool:
        """Whether something else ran meanwhile, so that the medians are not those of a quiet machine."""
        return self.spread > MOST_SPREAD

    def ratio(self, versus: Versus) -> float | None:
        """How well ours does against that, see `Versus`; None where it was not measured."""
        if versus == "dense rate":
            return self.gflops / self.dense_gflops if self.dense_gflops else None
        if versus == "sgemm":
            return self.gflops / self.floor.sgemm if self.floor else None
        best = min(self.eager_ms, self.eager_ms if self.sdpa_ms is None else self.sdpa_ms)
        other = {"eager": self.eager_ms, "sdpa": self.sdpa_ms, "best": best, "dense": self.dense_ms,
            "float32": self.float32_ms}  # fmt: skip
        milliseconds = other[versus]
        return None if milliseconds is None else milliseconds / self.ms


@dataclass(frozen=True)
class Memory:
    """Bytes beyond the inputs and the result at the peak of one call; None with a reason why."""

    case: str
    direction: Direction
    candidate: str
    extra: int | None
    how: str


@dataclass(frozen=True)
class Overhead:
    """Microseconds of one call on tensors that are too small to matter."""

    call: str
    us: float


def speed(
    workload: Workload,
    dense: Workload | None,
    dtype: torch.dtype,
    direction: Direction,
    effort: Effort,
    with_floor: bool = False,
) -> Speed:
    """Time our operator, the baselines and, where there is one, our operator on the dense workload."""
    inputs = workload.make(dtype)
    measured = candidates(inputs, direction)
    yardstick = Yardstick(workload, direction, inputs) if with_floor else None
    if yardstick:  # right after ours, whose turn then finds the caches as in a run without
        measured = {"ours": measured["ours"], **yardstick.calls, **measured}
    if dense is not None:
        measured["dense"] = candidates(dense.make(dtype), direction)["ours"]
    if inputs[0].dout.dtype in (torch.bfloat16, torch.float16):
        widened = tuple(one.to(torch.float32) for one in inputs)
        measured["float32"] = candidates(widened, direction)["ours"]
    with torch.set_grad_enabled(direction == "backward"):
        times = time_in_turn(measured, budget_s=effort.budget_s, least=effort.least, warmup=1)
    ms = {name: timing.median * 1e3 for name, timing in times.items()}
    compared = times.keys() - (yardstick.calls.keys() if yardstick else ())
    return Speed(
        workload.name,
        workload.table,
        workload.label,
        direction,
        explain(inputs[0]).backend or "none",
        torch.get_num_threads(),
        len(times["ours"].samples),
        ms["ours"],
        times["ours"].minimum * 1e3,
        max(times[name].median / times[name].minimum for name in compared),
        workload.flops(direction) / ms["ours"] * 1e-6,
        ms["eager"],
        ms.get("sdpa"),
        ms.get("dense"),
        dense.flops(direction) / ms["dense"] * 1e-6 if dense is not None else None,
        ms.get("float32"),
        yardstick.floor(times) if yardstick else None,
    )


def explain(inputs: Inputs) -> hk.Choice:
    """Which backend runs this call."""
    return hk.explain(inputs.operator, **inputs.arguments())


def candidates(inputs: tuple[Inputs, ...], direction: Direction) -> dict[str, Call]:
    """`ours`, and `eager` and `sdpa` as far as `baselines` has them: each does all of these calls, on the same leaves.

    Backward, the graphs are made here, and only gradients are taken by the call.
    """
    leaves = [one.requires_grad() for one in inputs]
    others = [baselines(one) for one in leaves]
    calls: dict[str, list[tuple[Inputs, Callable[[], Tensor]]]] = {
        "ours": [(one, one.call) for one in leaves],
        **{
            name: [(one, other[name]) for one, other in zip(leaves, others, strict=True)]
            for name in others[0]
        },
    }
    return {name: _prepare(pairs, direction) for name, pairs in calls.items()}


def _prepare(pairs: list[tuple[Inputs, Callable[[], Tensor]]], direction: Direction) -> Call:
    """One callable that does all of them; for the backward pass the graphs are made beforehand."""
    calls: list[Call] = [call for _, call in pairs]
    if direction == "backward":
        calls = [gradients(inputs, call()) for inputs, call in pairs]
    if len(calls) == 1:
        return calls[0]
    return lambda: [call() for call in calls]


def gradients(inputs: Inputs, out: Tensor) -> Call:
    """The backward pass from `out`, again and again."""
    leaves = list(inputs.tensors.values())
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def memory(inputs: Inputs, name: str, *, eager_backward: bool) -> list[Memory]:
    """Peak of the forward pass, and of forward and backward together; `inputs` has no mask.

    Eager keeps about two `[T, S]` matrices of all heads at once in the forward pass and about five
    with gradients. It is run where the machine has memory for 4 and 8, and with gradients only where
    asked for.
    """
    problem = inputs.problem()
    matrix = problem.B * problem.H * problem.T * problem.S * inputs.dout.element_size()
    rows = []
    for direction in DIRECTIONS:
        needed = matrix * (4 if direction == "forward" else 8)
        for candidate in ("ours", "eager", "sdpa"):
            free = _available_bytes()
            if candidate == "eager" and direction == "backward" and not eager_backward:
                continue
            if candidate == "eager" and free is not None and free < needed:
                how = f"not run: {free / _GIB:.1f} GiB free of {needed / _GIB:.1f} that it may take"
                rows.append(Memory(name, direction, candidate, None, how))
                continue
            _step(_first_rows(inputs), candidate, direction)()  # thread pools, code
            peak = peak_memory(_step(inputs, candidate, direction))
            rows.append(Memory(name, direction, candidate, peak.extra, peak.how))
    return rows


def _step(inputs: Inputs, candidate: str, direction: Direction) -> Call:
    leaves = inputs.requires_grad()
    call = leaves.call if candidate == "ours" else baselines(leaves)[candidate]

    def forward() -> object:
        with torch.no_grad():
            return call()

    def both() -> object:
        out = call()
        return out.detach(), torch.autograd.grad(out, list(leaves.tensors.values()), leaves.dout)

    return forward if direction == "forward" else both


def _first_rows(inputs: Inputs) -> Inputs:
    tensors = {n: t[:, :, :64] if t.dim() == 4 else t for n, t in inputs.tensors.items()}
    if "bias" in tensors:
        tensors["bias"] = tensors["bias"][..., :64]
    return replace(inputs, tensors=tensors, dout=inputs.dout[:, :, :64])


def _available_bytes() -> int | None:
    """Memory that can be had without swapping, by the kernel and by the container; None: unknown."""
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(s.split()[1]) * 1024 for s in lines if s.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            limits.append(int(limit) - int((group / "memory.current").read_text()))
    except OSError:
        pass  # another system, or no container
    return min(limits, default=None)


def overhead(effort: Effort) -> list[Overhead]:
    """One call without gradients on B1 H2 T4 D8."""
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    shared_query, shared_key = torch.randn(2, 1, 4, 8)
    gate, mixing = torch.rand(2), torch.rand(2, 8)
    real = torch.arange(4)[None] < 3
    mask = hk.Mask(key_mask=real)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Call] = {
        "gated_attention": lambda: hk.gated_attention(query, key, value),
        "gated_attention with a gate": lambda: hk.gated_attention(query, key, value, gate=gate),
        "collaborative_attention": lambda: hk.collaborative_attention(
            shared_query, shared_key, value, mixing
        ),
        "gated_attention with a kept Mask": lambda: hk.gated_attention(query, key, value, mask),
        "SDPA": lambda: sdpa(query, key, value),
        "SDPA with a mask": lambda: sdpa(query, key, value, attn_mask=real[:, None, None]),
        "SDPA times gate": lambda: sdpa(query, key, value) * gate[:, None, None],
        "eager times gate": lambda: (
            (query @ key.mT * 8**-0.5).softmax(-1) @ value * gate[:, None, None]
        ),
    }
    times = time_in_turn(calls, budget_s=effort.budget_s, least=20, warmup=20)
    return [Overhead(name, timing.median * 1e6) for name, timing in times.items()]
