"""The benchmark: it runs whole in its smoke form, fails where a check fails, and leaves no litter."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "rich", reason="the benchmark prints with rich: pip install 'heads_kernels[bench]'"
)

from benchmarks import __main__ as cli
from benchmarks import (
    checks,
    decoding,
    floor,
    goals,
    measure,
    minilm,
    plot,
    problems,
    results,
    run,
    shapes,
)
from benchmarks.baselines import baselines
from benchmarks.problems import DIRECTIONS, Workload
from benchmarks.report import Report, make_console
from heads_kernels.testing import Timing, accuracy
from tests.support.alike import assert_alike

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "benchmarks")


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the real model takes seconds, which only the smoke run has to spend."""

    def capture(count: int) -> minilm.Captured:
        raise minilm.Unavailable("left out by the test")

    monkeypatch.setattr(minilm, "capture", capture)


def bench(*options: str) -> int:
    return cli.main(["--smoke", *options])


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    """All parts in a process of their own, at 100 columns, with numbers beside them."""
    path = tmp_path / "numbers.json"
    threads = str(torch.get_num_threads())
    done = subprocess.run(
        [*COMMAND, "--smoke", "--threads", threads, "--json", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    assert "runs on" in done.stdout
    assert "FAIL" not in done.stdout
    assert sorted(tmp_path.iterdir()) == [path]

    numbers = json.loads(path.read_text())
    assert numbers["complete"]
    assert numbers["failures"] == []
    timed = {(row["workload"], row["direction"]) for row in numbers["speed"]}
    checked = {row["workload"] for row in numbers["checks"]}
    assert timed == {(name, way) for name in checked for way in DIRECTIONS}
    assert {workload.name for workload in problems.standard()} <= checked
    assert all(row["ms"] > 0 and row["gflops"] > 0 for row in numbers["speed"])
    assert {row["candidate"] for row in numbers["memory"]} == {"ours", "eager", "sdpa"}
    assert len(numbers["overhead"]) == 8
    assert {row["case"] for row in numbers["decoding"]} == set(map(str, decoding.cases("smoke")))
    if "No real input" not in done.stdout:
        assert set(minilm.NAMES) <= checked
        assert "equal the model's own attention" in done.stdout


@pytest.mark.usefixtures("no_model")
def test_missing_model_is_said_and_synthetic_workloads_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench("--only", "closed_50") == 0  # of both operators, and of the model
    printed = capsys.readouterr().out
    assert "No real input, synthetic workloads only: left out by the test" in printed
    assert "gated_closed_50" in printed
    assert "minilm_closed_50" not in printed


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("broken", ["kernel", "flops", "baseline"])
def test_failed_check_is_said_and_not_timed(
    broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A wrong result, a wrong FLOP count, a baseline that computes something else."""
    if broken == "kernel":
        compare = checks.testing.compare

        def worse(*call: object) -> accuracy.Report:
            report = compare(*call)  # type: ignore[arg-type]
            first = replace(report.quantities[0], max_error=1.0)
            return replace(report, quantities=(first, *report.quantities[1:]))

        monkeypatch.setattr(checks.testing, "compare", worse)
    elif broken == "flops":
        monkeypatch.setattr(Workload, "flops", lambda self, direction: 1)
    else:
        monkeypatch.setattr(
            checks,
            "baselines",
            lambda i: {**baselines(i), "sdpa": lambda: torch.zeros_like(i.dout)},
        )
    path = tmp_path / "numbers.json"
    assert bench("--only", "gated_closed_50", "--json", str(path)) == 1
    word = {
        "kernel": "accuracy: FAIL out",
        "flops": "FLOPs: Problem.flops() is",
        "baseline": "sdpa",
    }
    printed = capsys.readouterr().out
    assert re.search(rf"FAIL gated_closed_50: .*{re.escape(word[broken])}", printed), printed
    numbers = json.loads(path.read_text())
    assert numbers["speed"] == []
    assert numbers["failures"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "0"], "pass a number from 1 to"),
        (["--threads", "two"], "pass a number from 1 to"),
        (["--only", "nonsense"], "matches none of gated_dense"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--json", "/no/such/folder/x.json"], "not there or not writable"),
        (["--json", "/"], "is a folder; name a file"),
        (["--full"], "not allowed with argument --smoke"),
        (["--plot"], "not allowed with argument --smoke"),
        (["--keep"], "--keep is for whole runs"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        bench(*options)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("other", [["--floor"], ["--only", "gated"], ["--dtype", "float64"]])
def test_a_plot_takes_no_other_option(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["--plot", *other])
    assert error.value.code == 2
    assert "--plot measures nothing; leave out the other options" in capsys.readouterr().err


def test_interrupt_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(settings: run.Settings) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "backends", interrupted)
    assert bench() == 130


@pytest.mark.usefixtures("no_model")
def test_what_a_row_is_compared_with_is_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    assert bench("--only", "gated_causal", "--json", str(path)) == 0
    numbers = json.loads(path.read_text())
    assert [one["workload"] for one in numbers["checks"]] == ["gated_dense", "gated_causal"]
    assert {one["workload"] for one in numbers["speed"]} == {"gated_causal"}


@pytest.mark.usefixtures("no_model")
def test_interrupted_run_reports_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    speed, directions = measure.speed, []

    def once(*call: object) -> measure.Speed:
        if directions:
            raise KeyboardInterrupt
        directions.append(call[3])
        return replace(speed(*call), spread=1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "speed", once)
    path = tmp_path / "numbers.json"
    assert bench("--only", "collaborative_ragged", "--json", str(path)) == 130
    printed = capsys.readouterr().out
    assert "interrupted" in printed
    assert "ragged mixing" in printed
    assert sorted(tmp_path.iterdir()) == [path]
    numbers = json.loads(path.read_text())
    assert not numbers["complete"]
    assert [row["direction"] for row in numbers["speed"]] == directions == ["forward"]


@pytest.mark.slow
def test_interrupt_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    command = [*COMMAND, "--only", "gated", "--threads", "1", "--json", str(path)]
    # A parent that ignores SIGINT, as a shell's background job does, would pass that on.
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert "heads_kernels" in process.stdout.readline()  # the header: the run has begun
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    assert "interrupted" in rest
    assert not json.loads(path.read_text())["complete"]


@pytest.mark.usefixtures("no_model")
def test_kept_runs_are_lines_of_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "_HERE", tmp_path)
    machine = results.this_machine()
    assert machine.commit is None  # no checkout there
    found = results.Results(machine, "quick", "float32", [])
    assert results.keep(found) == results.keep(found)
    (file,) = (tmp_path / "results").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 2
    assert lines[0]["machine"]["torch"] == torch.__version__


def row(name: str, direction: str = "forward", **changed: object) -> measure.Speed:
    """A row of 1 ms at 100 GFLOP/s, where eager takes 2 ms and SDPA 1.8."""
    numbers = {"table": "table", "label": "label", "backend": "cpu", "threads": 2, "samples": 5,
        "ms": 1.0, "fastest_ms": 1.0, "spread": 1.0, "gflops": 100.0, "eager_ms": 2.0, "sdpa_ms": 1.8}  # fmt: skip
    return measure.Speed(workload=name, direction=direction, **{**numbers, **changed})  # type: ignore[arg-type]


BOUND = floor.Floor(ms=0.5, gap=2.0, bound="arithmetic", product="float32", gflops=125.0,
    sgemm=125.0, gexps=3.0, gbytes=20.0)  # fmt: skip


def test_goals_read_the_rows_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Every goal names a workload of the full form that is timed in that direction, and what it is held to."""
    workloads = {workload.name: workload for workload in shapes.full()}
    found = results.Results(results.this_machine(), "full", "float32", [])
    for goal in goals.GOALS:
        workload = workloads.get(goal.workload)
        if workload is None:
            assert goal.workload in minilm.NAMES
            continue
        assert goal.direction in workload.directions
        if goal.versus in ("dense", "dense rate"):
            assert workload.dense in workloads
        if goal.versus == "float32":
            assert workload.make(torch.float32)[0].dout.dtype == torch.bfloat16
    for direction in DIRECTIONS:
        for threads in (2, 1):
            for name in dict.fromkeys(goal.workload for goal in goals.GOALS):
                found.speed.append(row(name, direction, threads=threads, dense_ms=2.5,
                    dense_gflops=110.0, float32_ms=0.8, floor=BOUND))  # fmt: skip
    found.memory.append(measure.Memory("B1", "forward", "ours", 2**20, "peak"))
    found.overhead.append(measure.Overhead("gated_attention with a gate", 41.0))
    outcomes = {(o.goal, o.against, o.threads): o for o in found.goals()}
    assert len(outcomes) == 2 * len(goals.GOALS) + 2

    def read(goal: str, against: str, threads: int = 2) -> tuple[str, str, bool]:
        outcome = outcomes[goal, against, threads]
        return outcome.wanted, outcome.got, outcome.met

    assert read("gated_dense forward", "SDPA*gate") == ("1.50x", "1.80x", True)
    assert read("gated_dense forward", "SDPA*gate", threads=1) == ("1.15x", "1.80x", True)
    assert read("collaborative_dense forward", "best PyTorch") == ("3.00x", "1.80x", False)
    assert read("gated_closed_50 forward", "own dense time") == ("1.90x", "2.50x", True)
    assert read("gated_real_50 forward", "own dense rate") == ("87%", "91%", True)
    assert read("gated_dense_bfloat16 forward", "own float32") == ("0.87x", "0.80x", False)
    assert read("gated_T2048_D64_dense forward", "sgemm rate") == ("80%", "80%", True)
    Report(found, make_console()).finish()
    printed = capsys.readouterr().out
    assert all(len(line) <= 100 for line in printed.splitlines())
    assert re.search(
        r"gated_dense forward +SDPA\*gate +1.50x +1.80x +met +1.15x +1.80x +met", printed
    )
    assert f"{sum(o.met for o in outcomes.values())} of {len(outcomes)} goals met" in printed
    assert replace(found, form="quick").goals() == []


# ---------------------------------------------------------------------- disturbed runs
def test_disturbed_row_is_measured_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    (workload,) = (w for w in problems.standard(64) if w.name == "gated_dense")

    def measured(*spreads: float) -> tuple[float, int]:
        """The spread of the row that stays, and how many were not needed."""
        left = [row("gated_dense", spread=spread) for spread in spreads]
        monkeypatch.setattr(measure, "speed", lambda *call: left.pop(0))
        settings = run.Settings("quick", torch.float32)
        stays = run._speed(settings, workload, None, "forward", run.EFFORT["quick"])
        return stays.spread, len(left)

    assert measured(1.4, 1.0) == (1.4, 1)
    assert measured(3.0, 1.1, 1.0) == (1.1, 1)
    assert measured(3.0, 4.0, 1.0) == (3.0, 1)


@pytest.mark.parametrize("slow", ["ours", "eager", "dense"])
def test_spread_is_that_of_the_worst_candidate(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calm, scattered = Timing((1.0, 1.0, 1.2), 1), Timing((1.0, 2.5, 3.0), 1)

    def time_in_turn(calls: dict[str, measure.Call], **options: object) -> dict[str, Timing]:
        for call in calls.values():
            call()
        return {name: scattered if name in (slow, "copy") else calm for name in calls}

    monkeypatch.setattr(measure, "time_in_turn", time_in_turn)
    dense, closed = (
        w for w in problems.standard(64) if w.name in ("gated_dense", "gated_closed_50")
    )
    for with_floor in (False, True):
        found = measure.speed(
            closed, dense, torch.float32, "forward", run.EFFORT["smoke"], with_floor
        )
        assert found.spread == 2.5
        assert found.disturbed


def test_rows_that_stay_disturbed_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    found = results.Results(results.this_machine(), "quick", "float32", [])
    found.speed = [row("a"), row("b", label="other", spread=1.62)]
    Report(found, make_console()).finish()
    printed = capsys.readouterr().out
    assert re.search(r"^other .* 1\.6x$", printed, re.MULTILINE)
    assert re.search(r"^label .*1\.80x *$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("load", "threads", "busy"), [(0.4, 4, False), (0.6, 4, True), (2.4, 2, False), (2.6, 2, True)]
)
def test_busy_machine_is_warned_of(
    load: float,
    threads: int,
    busy: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(results.os, "getloadavg", lambda: (load, 9.0, 9.0))
    machine = replace(results.this_machine(), cores=4, threads=threads)
    Report(results.Results(machine, "quick", "float32", []), make_console()).head()
    words = f"busy machine: load average {load}"
    assert (words in capsys.readouterr().out) == busy


# ---------------------------------------------------------------------- the last line
@pytest.mark.parametrize(
    ("rows", "line", "name"),
    [
        (
            [row("gated_dense"), row("gated_closed_50", label="50 % closed", sdpa_ms=3.21)],
            "50 % closed, forward: 3.2 times as fast as SDPA times the gate.",
            "gated_closed_50",
        ),
        (
            [row("collaborative_dense", "backward", sdpa_ms=None, spread=1.7)],
            "label, backward: 2.0 times as fast as eager PyTorch (disturbed).",
            "collaborative_dense",
        ),
    ],
)
def test_last_line_is_to_be_repeated(
    rows: list[measure.Speed], line: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = results.Results(results.this_machine(), "quick", "float64", [], speed=rows, load=0.0)
    Report(quiet, make_console()).summary(" --dtype float64")
    command = f"python -m benchmarks --only {name} --dtype float64"
    assert capsys.readouterr().out == f"{line} Repeat it: {command}\n"
    for nothing in (replace(quiet, speed=[]), replace(quiet, form="smoke")):
        Report(nothing, make_console()).summary("")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("workload", shapes.full(), ids=lambda w: w.name)
def test_full_form_states_its_flops(workload: Workload) -> None:
    """The formulas of the workloads that the smoke form leaves out; nothing is computed."""
    inputs = workload.make(torch.float32)[0]
    baselines(inputs)  # there is one for its mask
    problem = inputs.requires_grad().problem()
    assert problem.flops() == workload.flops("forward")
    assert problem.flops(backward=True) == workload.flops("backward")


def test_full_form_has_each_name_once() -> None:
    names = [workload.name for workload in shapes.full()]
    assert len(set(names)) == len(names)
    assert {workload.name for workload in shapes.quick()} <= set(names)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.25])
def test_sentences_have_the_share_of_real_tokens(share: float) -> None:
    drawn = shapes.sentence_lengths(32, 128, share)
    assert drawn == shapes.sentence_lengths(32, 128, share)
    assert max(drawn) == 128
    assert min(drawn) >= 1
    assert sum(drawn) / (32 * 128) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("operator", ["gated", "collaborative"])
def test_many_pairs_are_held_to_the_rule_on_some_heads(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are held to it alone and as a part of the whole call."""
    (workload,) = (w for w in problems.standard(64) if w.name == f"{operator}_closed_50")
    (inputs,) = workload.make(torch.float32)
    monkeypatch.setattr(checks, "_MOST_PAIRS", 2 * 4 * 64 * 64)
    some, where = checks._part(inputs)
    assert where == (slice(None, None, 1), slice(None, None, 11))
    assert some.dout.shape[:2] == (2, 2)
    assert sorted(some.tensors["gate"].ne(0).tolist()) == [False, True]
    assert checks.check(workload, torch.float32).failures == ()
    out = some.call().double()
    assert checks._whole_failures(inputs, where, out, 0.0) == []
    (failure,) = checks._whole_failures(inputs, where, out + 1, 0.5)
    assert "a part of the whole call is off by 1.0e+00" in failure


# ---------------------------------------------------------------------- the kept results
def test_generations_of_one_name_keep_files_of_their_own(tmp_path: Path) -> None:
    """Virtual machines call every generation "AMD EPYC"; what the first core says is enough."""
    cpuinfo = tmp_path / "cpuinfo"
    cores = "processor : {}\ncpu family : 25\nmodel : {}\nmodel name : AMD EPYC\n\n"
    machine, files = results.this_machine(), []
    for model in (1, 17):
        cpuinfo.write_text("".join(cores.format(core, model) for core in range(2)))
        told = replace(machine, processor=results.processor(cpuinfo), cores=2)
        files.append(results.kept_file(told).name)
    assert files == [f"amd-epyc-family-25-model-{model}-2-cores.jsonl" for model in (1, 17)]
    cpuinfo.write_text("processor : 0\nmodel name : Some Core\n")
    assert results.processor(cpuinfo) == "Some Core"
    cpuinfo.write_text("processor : 0\nCPU part : 0xd40\n")
    assert results.processor(cpuinfo) == results.processor(tmp_path / "none") != ""


# ---------------------------------------------------------------------- the plot
def full_run() -> dict[str, object]:
    """A full run with all that is drawn."""
    found = results.Results(results.this_machine(), "full", "float32", [], complete=True)
    threads = found.machine.threads
    found.speed = [row(workload.name, threads=threads) for workload in shapes.full()]
    return found.to_json()


def test_plot_is_of_the_newest_full_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need heads_kernels[bench]")
    """Of whole runs on all threads; other lines are passed over."""
    new, old = full_run(), full_run()
    machine: dict[str, object] = new["machine"]  # type: ignore[assignment]
    new["machine"] = {**machine, "commit": "newest"}
    others = [{**old, "form": "quick"}, {**old, "complete": False}, {"dtype": "float32"}, 3,
        {**old, "machine": {**machine, "threads": 0}}]  # fmt: skip
    kept = tmp_path / "machine.jsonl"
    lines = [*map(json.dumps, (old, new, *others)), "", '{"form": "full"']
    kept.write_text("\n".join(lines) + "\n")
    path = plot.draw(kept)
    assert sorted(tmp_path.iterdir()) == [kept, path]
    assert path == tmp_path / "machine.svg"
    text = path.read_text()
    assert "newest" in text
    assert all(word in text for word in ("heads_kernels", "SDPA times gate", "eager PyTorch"))
    plot.draw(kept)
    assert path.read_text() == text  # drawing again changes nothing


def test_what_can_not_be_plotted_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(results, "_HERE", tmp_path)
    assert cli.main(["--plot"]) == 1
    assert "python -m benchmarks --full --keep" in " ".join(capsys.readouterr().out.split())
    kept = results.kept_file(results.this_machine())
    kept.parent.mkdir()
    kept.write_text(json.dumps({**full_run(), "speed": []}))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["--plot"]) == 1
    assert "pip install 'heads_kernels[bench]'" in " ".join(capsys.readouterr().out.split())
    monkeypatch.undo()
    pytest.importorskip("matplotlib", reason="plots need heads_kernels[bench]")
    with pytest.raises(plot.CannotPlot, match="keep a new one"):
        plot.draw(kept)


def test_no_baseline_for_rows_that_see_nothing() -> None:
    inputs = problems.find("gated_attention", "dense_rows").make()
    with pytest.raises(ValueError, match="rows that see nothing; no baseline"):
        baselines(inputs)


@pytest.mark.parametrize(
    "name", ["bias", "bias_pairs", "offsets", "softcap_bias", "sinks_all", "window"]
)
def test_baselines_of_score_terms_are_the_call(name: str) -> None:
    case = problems.find("gated_attention", name)
    if name == "sinks_all":  # its padded rows and its dropout are no baseline's
        case = replace(case, mask=None, dropout_p=0.0)
    inputs = case.make(torch.float64)
    calls = baselines(inputs)
    assert ("sdpa" in calls) == (not name.startswith(("softcap", "sinks")))
    for call in calls.values():
        assert_alike(call(), inputs.call())


@pytest.mark.parametrize("name", ["sparsemax", "cross", "bias_shared"])
def test_the_baseline_of_entmax_is_the_call(name: str) -> None:
    inputs = problems.find("entmax_attention", name).make(torch.float64, requires_grad=True)
    (call,) = baselines(inputs).values()
    assert_alike(call(), inputs.call())
    leaves = list(inputs.tensors.values())
    grads = [torch.autograd.grad(out, leaves, inputs.dout) for out in (call(), inputs.call())]
    assert_alike(*grads)


def test_a_part_of_many_batches_has_the_bias_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call with pair bias: some heads, some batches, and the bias of those heads."""
    (workload, *_) = shapes.score_terms(2)
    (inputs,) = workload.make(torch.float32)
    monkeypatch.setattr(checks, "_MOST_PAIRS", 1 << 18)
    some, where = checks._part(inputs)
    assert where == (slice(None, None, 8), slice(None, None, 3))
    assert some.dout.shape[:2] == (8, 2)
    assert some.tensors["bias"].shape == (1, 2, 128, 128)
    with torch.no_grad():
        assert_alike(some.call(), inputs.call()[where])


def test_sentences_are_english_and_the_same_every_time() -> None:
    some = minilm.sentences(32)
    assert len(some) == len(set(some)) == 32
    assert some == minilm.sentences(32)
    assert all(re.match(r"[A-Z].*[.!?]$", sentence) for sentence in some)


def test_only_takes_parts_and_patterns() -> None:
    settings = run.Settings("quick", torch.float32, "gated_*closed")
    assert [w.name for w in run.choose(settings)] == ["gated_closed_50", "gated_closed_75"]
    assert not settings.wants("memory")
