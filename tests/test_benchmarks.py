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
from benchmarks import checks, measure, minilm, problems, results, run
from benchmarks.baselines import baselines
from benchmarks.problems import Workload
from benchmarks.report import Report, make_console

ROOT = Path(__file__).parent.parent
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
    assert timed == {(name, way) for name in checked for way in ("forward", "backward")}
    assert {workload.name for workload in problems.standard()} <= checked
    assert all(row["ms"] > 0 and row["gflops"] > 0 for row in numbers["speed"])
    assert {row["candidate"] for row in numbers["memory"]} == {"ours", "eager", "sdpa"}
    assert len(numbers["overhead"]) == 6
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

        def worse(*call: object) -> checks.testing.Report:
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
        (["--keep"], "--keep is for whole runs"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        bench(*options)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_model")
def test_interrupted_run_reports_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    speed, directions = measure.speed, []

    def once(*call: object) -> measure.Speed:
        if directions:
            raise KeyboardInterrupt
        directions.append(call[3])
        return speed(*call)  # type: ignore[arg-type]

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


def test_goals_read_the_rows_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Every goal names a workload of the quick form, and what it is compared with."""
    workloads = {workload.name: workload for workload in problems.standard()}
    machine = results.this_machine()
    found = results.Results(machine, "quick", "float32", [])
    for goal in problems.GOALS:
        workload = workloads[goal.workload]
        assert (goal.versus == "dense") <= (workload.dense in workloads)
        for way in ("forward", "backward"):
            row = measure.Speed(goal.workload, "table", workload.label, way, "cpu",  # type: ignore[arg-type]
                machine.threads, 5, 1.0, 1.0, 1.0, 2.0, 1.8, 2.5)  # fmt: skip
            found.speed.append(row)
    found.memory.append(measure.Memory("B1", "forward", "ours", 2**20, "peak"))
    found.overhead.append(measure.Overhead("gated_attention with a gate", 41.0))
    outcomes = {outcome.goal: outcome for outcome in found.goals()}
    assert len(outcomes) == len(problems.GOALS) + 2
    dense = outcomes["gated forward, dense, all heads open"]
    assert (dense.wanted, dense.got, dense.met) == ("1.5x", "2.00x", True)
    best = outcomes["collaborative forward, dense, all heads open"]
    assert (best.got, best.met) == ("1.80x", False)
    Report(found, make_console()).finish()
    printed = capsys.readouterr().out
    assert "short" in printed
    assert "pass" in printed


@pytest.mark.parametrize(
    "workload", [*problems.models(), *problems.lengths()], ids=lambda w: w.name
)
def test_full_form_states_its_flops(workload: Workload) -> None:
    """The formulas of the workloads that the smoke form leaves out; nothing is computed."""
    problem = workload.make(torch.float32)[0].requires_grad().problem()
    assert problem.flops() == workload.flops("forward")
    assert problem.flops(backward=True) == workload.flops("backward")
    baselines(workload.make(torch.float32)[0])  # there is a baseline for its mask


def test_no_baseline_for_a_window() -> None:
    inputs = problems.find("gated_attention", "window").make()
    with pytest.raises(ValueError, match="not causal or key padding; no baseline"):
        baselines(inputs)


def test_break_even_of_bert_base() -> None:
    lengths = [problems.break_even(768, 768, Ds, 12) for Ds in (512, 384, 256, 192, 96)]
    assert lengths == [73, 154, 341, 576, 2688]


def test_sentences_are_english_and_the_same_every_time() -> None:
    some = minilm.sentences(32)
    assert len(some) == len(set(some)) == 32
    assert some == minilm.sentences(32)
    assert all(re.match(r"[A-Z].*[.!?]$", sentence) for sentence in some)


def test_only_takes_parts_and_patterns() -> None:
    settings = run.Settings("quick", torch.float32, "gated_*closed")
    assert [w.name for w in run.choose(settings)] == ["gated_closed_50", "gated_closed_75"]
    assert not settings.wants("memory")
