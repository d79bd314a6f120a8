"""The floor of the benchmarks: peaks of the processor, and what a call needs at least."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "rich", reason="the benchmark prints with rich: pip install 'heads_kernels[bench]'"
)

from benchmarks import __main__ as cli
from benchmarks import floor, problems
from benchmarks.problems import Workload
from heads_kernels import _cpu
from heads_kernels.testing import Timing

pytestmark = pytest.mark.release


def floor_of(workload: Workload, direction: problems.Direction, **seconds: float) -> floor.Floor:
    """With `ours` at 1 s, products at 2e9 FLOP/s, 1e9 exp/s and a copy that takes a second.

    Slower samples of these three count for nothing.
    """
    yardstick = floor.Yardstick(workload, direction, workload.make(torch.float32))
    for one in yardstick.calls.values():
        one()
    taken = {"ours": 1.0, "products": yardstick._products / 1e9, "copy": 1.0,
        "powers": yardstick._powers / 1e9, "sgemm": floor._SIDE**3 / 1e9, **seconds}  # fmt: skip
    assert {"ours", *yardstick.calls} == {*taken}
    samples = {name: (value,) * 2 + (9 * value,) for name, value in taken.items()}
    return yardstick.floor({name: Timing(times, 1) for name, times in samples.items()})


def test_floor_adds_products_and_exponentials() -> None:
    (workload,) = (w for w in problems.standard(64) if w.name == "gated_closed_50")
    for direction, features in (("forward", 2), ("backward", 5)):
        found = floor_of(workload, direction, copy=1e-9)  # type: ignore[arg-type]
        pairs = 2 * 6 * 64 * 64
        assert found.ms == pytest.approx((pairs * 64 * features + pairs) * 1e-6)
        assert (found.bound, found.product) == ("arithmetic", "float32")
        assert found.gap == pytest.approx(1e3 / found.ms)
        assert (found.gflops, found.sgemm, found.gexps) == pytest.approx((2.0, 2.0, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_peaks_count_what_every_thread_computed(dtype: torch.dtype) -> None:
    """At every level; wide lanes have more numbers, and pairs twice as many."""
    before, counts = _cpu.level(), {}
    try:
        for level in _cpu.available_levels():
            _cpu.use_level(level)
            for run in (_cpu.run_products, _cpu.run_powers):
                once = run(dtype, 10, 1)
                assert run(dtype, 20, 1) == 2 * once
                assert run(dtype, 10, 3) == 3 * once
            counts[level] = _cpu.run_products(dtype, 10, 1)
    finally:
        _cpu.use_level(before)
    assert counts["baseline"] == min(counts.values())
    if "avx512bf16" in counts:
        pairs = 2 if dtype == torch.bfloat16 else 1
        assert counts["avx512bf16"] == pairs * counts["avx512"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((torch.int32, 1, 1), "dtype"),
        ((torch.float32, -1, 1), "steps"),
        ((torch.float32, 1, 0), "threads"),
    ],
)
def test_peaks_refuse_by_name(arguments: tuple[torch.dtype, int, int], name: str) -> None:
    for peak in (_cpu.run_products, _cpu.run_powers):
        with pytest.raises(ValueError, match=rf"^{name} is "):
            peak(*arguments)


def test_floor_moves_visible_rows_of_open_heads() -> None:
    """Half of the rows of q, k, v read; all of the output written. A copy of half of that took a second."""
    (workload,) = (w for w in problems.standard(64) if w.name == "gated_half_padded")
    found = floor_of(workload, "forward")
    tensor = 2 * 12 * 64 * 64 * 4
    assert (found.bound, found.ms) == ("bytes", pytest.approx(1e3))
    assert found.gbytes == pytest.approx((3 * tensor / 2 + tensor) * 1e-9)
    found = floor_of(workload, "backward")  # q, k, v, out, dout; dq, dk, dv
    assert found.gbytes == pytest.approx((5 * tensor / 2 + 3 * tensor) * 1e-9)


def test_floor_is_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    assert cli.main(["--smoke", "--only", "gated_causal", "--floor", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"floor +gap( +spread)?$", printed, re.MULTILINE)
    assert "products at float32" in printed
    for one in json.loads(path.read_text())["speed"]:
        assert one["floor"]["gap"] == pytest.approx(one["ms"] / one["floor"]["ms"])
