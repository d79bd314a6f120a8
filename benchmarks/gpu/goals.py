"""What the kernels should reach on a GPU of the H100's class, and what they did. Reported, never asserted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from benchmarks.gpu.candidates import SDPA
from benchmarks.gpu.settings import Row
from benchmarks.problems import DIRECTIONS, Direction
from benchmarks.results import Outcome

#: Of the time of cuDNN, and TFLOP/s of collaborative attention.
_OF_CUDNN: Final[dict[Direction, float]] = {"forward": 0.75, "backward": 0.6}
_TFLOPS: Final[dict[Direction, float]] = {"forward": 250.0, "backward": 120.0}
#: TFLOP/s of the `cuda` backend, of dense calls; by D of gated attention, by Ds of collaborative.
_OF_CUDA: Final[dict[str, dict[Direction, dict[int, float]]]] = {
    "gated_attention": {"forward": {64: 280.0, 128: 320.0}, "backward": {64: 220.0, 128: 220.0}},
    "collaborative_attention": {
        "forward": {256: 250.0, 512: 250.0},
        "backward": {256: 150.0, 512: 150.0},
    },
}
#: Lengths that the goals of gated attention speak of.
_LENGTHS: Final = (4096, 8192, 16384)
NOT_MEASURED: Final = "not measured"
#: Twice the length may take twice the memory, and a tenth for what does not divide evenly.
_LINEAR: Final = 2.2


def milliseconds(row: Row, direction: Direction, name: str) -> float | None:
    """The median of a candidate; None where it was not timed."""
    found: float | None = row.get(direction, {}).get("times", {}).get(name, {}).get("ms")
    return found


def ours(row: Row, direction: Direction) -> float | None:
    """The median of the backend that the package chooses."""
    return milliseconds(row, direction, str(row.get("default")))


def best(row: Row, direction: Direction, names: tuple[str, ...]) -> float | None:
    times = [ms for name in names if (ms := milliseconds(row, direction, name)) is not None]
    return min(times, default=None)


def tflops(row: Row, direction: Direction, name: str) -> float | None:
    """Executed FLOPs by the median."""
    ms = milliseconds(row, direction, name)
    return None if ms is None else float(row[direction]["flops"]) / ms * 1e-9


def goals(timing: list[Row], memory: list[Row]) -> list[Outcome]:
    timed = [row for row in timing if row.get("dtype") == "bfloat16"]
    return [
        *_against_cudnn(timed),
        *_skipping(timed),
        *_shared(timed),
        *_of_cuda(timed),
        *_linear(memory),
    ]


def _against_cudnn(rows: list[Row]) -> Iterator[Outcome]:
    for direction, wanted in _OF_CUDNN.items():
        for D in (64, 128):
            for kind in ("dense", "causal"):
                some = _pick(rows, "gated_attention", kind, D=D)
                found = [
                    _ratio(milliseconds(row, direction, "cudnn"), ours(row, direction))
                    for row in some
                    if row["T"] in _LENGTHS
                ]
                yield _lowest(
                    f"gated {direction} D{D} {kind}, T 4k to 16k", "cuDNN times gate", wanted, found
                )


def _skipping(rows: list[Row]) -> Iterator[Outcome]:
    for kind, text, wanted in (
        ("closed_50", "half of the heads closed", 1.8),
        ("closed_75", "three quarters closed", 3.4),
    ):
        for direction in DIRECTIONS:
            found = [
                _ratio(
                    milliseconds(row, direction, f"{row['default']} whole"), ours(row, direction)
                )
                for row in _pick(rows, "gated_attention", kind)
            ]
            yield _lowest(f"gated {direction}, {text}", "own time, all open", wanted, found)
    for direction in DIRECTIONS:
        found = [
            _ratio(best(row, direction, tuple(SDPA)), ours(row, direction))
            for row in _pick(rows, "gated_attention", "half_padded")
        ]
        yield _lowest(f"gated {direction}, half padded", "best SDPA with a mask", 1.7, found)


def _shared(rows: list[Row]) -> Iterator[Outcome]:
    for direction, wanted in _TFLOPS.items():
        for Ds in (256, 512):
            some = _pick(rows, "collaborative_attention", "dense", Ds=Ds)
            rates = [tflops(row, direction, str(row["default"])) for row in some]
            text = f"collaborative {direction} Ds{Ds}"
            yield _lowest(text, "", wanted, rates, " TFLOP/s")
            ratios = [
                _ratio(best(row, direction, (*SDPA, "eager")), ours(row, direction)) for row in some
            ]
            yield _lowest(text, "best baseline", 3.0, ratios)


def _of_cuda(rows: list[Row]) -> Iterator[Outcome]:
    for operator, directions in _OF_CUDA.items():
        size = "D" if operator == "gated_attention" else "Ds"
        for direction, wanted in directions.items():
            for width, rate in wanted.items():
                some = _pick(rows, operator, "dense", **{size: width})
                rates = [tflops(row, direction, "cuda") for row in some if row["T"] >= _LENGTHS[0]]
                text = f"{operator} {direction} {size}{width} on cuda, T 4k and up"
                yield _lowest(text, "", rate, rates, " TFLOP/s")


def _linear(rows: list[Row]) -> Iterator[Outcome]:
    for row in rows:
        if (
            row.get("candidate") in (*SDPA, "eager")
            or row.get("operator") != "collaborative_attention"
        ):
            continue
        for direction, text in (("forward", "forward"), ("both", "forward and backward")):
            peaks, lengths = row.get(direction, []), row.get("lengths", [])
            if len(peaks) == 2:
                growth = peaks[1] / max(peaks[0], 1)
                # What a kernel does not allocate does not grow.
                met = growth <= _LINEAR or peaks[1] < 1 << 20
                yield Outcome(
                    f"collaborative memory linear in T, {text}, on {row['candidate']}", "",
                    f"at most {_LINEAR}x",
                    f"{peaks[1] / 2**20:.0f} MiB at T {lengths[1]}, {growth:.2f}x of T {lengths[0]}", met,
                )  # fmt: skip


def _pick(rows: list[Row], operator: str, kind: str, **sizes: Any) -> list[Row]:
    return [
        row
        for row in rows
        if (row.get("operator"), row.get("kind")) == (operator, kind)
        and all(row.get(name) == value for name, value in sizes.items())
    ]


def _ratio(other: float | None, own: float | None) -> float | None:
    return None if other is None or own is None else other / own


def _lowest(
    text: str, against: str, wanted: float, found: list[float | None], unit: str = "x"
) -> Outcome:
    """The lowest of what was found has to reach the goal."""
    digits = 2 if unit == "x" else 0
    values = [value for value in found if value is not None]
    goal = f"{wanted:.{digits}f}{unit}"
    if not values:
        return Outcome(text, against, goal, NOT_MEASURED, False)
    got = f"{min(values):.{digits}f} to {max(values):.{digits}f}{unit}"
    if len(values) < len(found):
        got += f" ({len(found) - len(values)} of {len(found)} not measured)"
    return Outcome(text, against, goal, got, min(values) >= wanted)
