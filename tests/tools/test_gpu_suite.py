"""The GPU suite and the tuner, whole at toy sizes without a GPU, and what they do when things go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_suite, tune
from benchmarks.gpu import plots, support, tuning
from benchmarks.gpu.candidates import RIVALS
from benchmarks.gpu.goals import NOT_MEASURED, goals
from benchmarks.gpu.record import Record
from benchmarks.gpu.settings import (
    FAILED,
    LEFT_OUT,
    PASSED,
    REFUSED,
    SKIPPED,
    TABLES,
    Settings,
    slug,
)
from benchmarks.gpu.stages import CHECKS, STAGES
from benchmarks.gpu.summary import lines
from benchmarks.gpu.worker import run_item
from benchmarks.gpu.workloads import workloads

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
TINY = Settings("cpu", tiny=True)
GPU = Settings("cuda")


# ---------------------------------------------------------------------- every stage
@pytest.mark.parametrize("stage", STAGES)
def test_stage_runs_at_toy_sizes(stage: str) -> None:
    """In this process; triton only where it is interpreted. What needs a GPU says that it is skipped."""
    names = import_module(STAGES[stage].module).items(TINY)
    assert names
    for name in names:
        if stage in ("timing", "memory", "poison") and name.endswith("triton"):
            continue  # seconds each in the interpreter; the whole run below has them
        row = run_item(TINY, stage, name)
        expected = {SKIPPED} if stage in ("graphs", "sanitizer") else {PASSED, REFUSED}
        assert row["verdict"] in expected, (name, row.get("detail"))
        if stage == "graphs":
            assert row["detail"] == "CUDA graphs need a CUDA device"


def test_every_gpu_backend_is_under_test() -> None:
    """A row that is added to a table is in every check, without an edit."""
    for operator, table in TABLES.items():
        assert GPU.backends(operator) == [r.name for r in table if r.name not in ("cpu", "eager")]
    for stage in CHECKS:
        names = import_module(STAGES[stage].module).items(GPU)
        met = {(name.split("/")[0], name.split("/")[-1]) for name in names}
        for operator, backend in met:
            assert backend in GPU.backends(operator)


def test_workloads_are_those_of_the_goals() -> None:
    every = workloads()
    assert len({w.name for w in every}) == len(every)
    assert all(w.case.B * w.case.T == 16384 for w in every)
    assert every[0].dtype == torch.bfloat16
    assert every[-1].dtype == torch.float16
    rows = [w.sizes() | {"default": "x", "forward": {}, "backward": {}} for w in every]
    for row in rows:
        times = {name: {"ms": 4.0} for name in ("x whole", "efficient")}
        times |= {"x": {"ms": 1.0}, "cuda": {"ms": 0.9}}
        if row["operator"] == "gated_attention" and row["kind"] in ("dense", "causal"):
            times["cudnn"] = {"ms": 0.8}
        row["forward"] = row["backward"] = {"flops": 300e9, "times": times}
    memory = [
        {"operator": "collaborative_attention", "candidate": "x", "lengths": [1, 2], "forward": [5, 9],
         "both": [2 << 20, 8 << 20]},
    ]  # fmt: skip
    found = goals(rows, memory)
    assert NOT_MEASURED not in {outcome.got for outcome in found}
    short = {outcome.goal for outcome in found if not outcome.met}
    assert short == {"collaborative memory linear in T, forward and backward, on x"}
    assert all(outcome.got == NOT_MEASURED for outcome in goals([], []))


# ---------------------------------------------------------------------- the whole command
@pytest.mark.slow
def test_whole_command(tmp_path: Path) -> None:
    """In processes of its own, with rich hidden: the machine with the GPU may lack it."""
    code = (
        "import sys; sys.modules['rich'] = None; from benchmarks.gpu import pool; "
        "pool.WORKER = 'tests.support.gpu_worker'; from benchmarks.gpu_suite import main; "
        f"sys.exit(main(['--out', {str(tmp_path)!r}, '--device', 'cpu', '--tiny', '--commit', 'abc']))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "HEADS_KERNELS_EMULATE_CUDA": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    run = json.loads((tmp_path / "results.json").read_text())
    assert run["failures"] == []
    assert run["complete"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert run["commit"] == "abc"
    assert list(run["stages"]) == list(STAGES)
    assert set(run["counts"]["graphs"]) == {SKIPPED}
    timed = run["stages"]["timing"]
    assert {row["name"] for row in timed} == {w.name for w in workloads(toy=True)}
    assert all(row["forward"]["times"]["cpu"]["ms"] > 0 for row in timed)
    assert len(list(tmp_path.iterdir())) <= 8
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"results.json", "gated.png", "closed.png", "collaborative.png"}
    assert done.stdout.index("Median ms") < done.stdout.index("Goals")
    assert done.stdout.rstrip().endswith(f"numbers in {tmp_path}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_reports_what_is_there(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--out", str(tmp_path), "--device", "cpu",
        "--tiny", "--only", "machine,poison,timing"]  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("== timing"):
                break
        time.sleep(0.5)
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    assert "interrupted" in rest
    run = json.loads((tmp_path / "results.json").read_text())
    assert not run["complete"]
    assert run["stages"]["poison"]


def test_a_budget_that_is_used_up_leaves_out_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--tiny", "--only", "machine,poison", "--minutes", "0.00001"]
    assert gpu_suite.main(["--out", str(tmp_path), *options]) == 0
    printed = capsys.readouterr().out
    assert "2 left out" in printed
    run = json.loads((tmp_path / "results.json").read_text())
    assert {row["verdict"] for row in run["stages"]["poison"]} == {LEFT_OUT}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "x", "--only", "nonsense"], "use some of machine"),
        (["--out", "x", "--device", "cpu"], "is for --tiny"),
        (["--out", "x", "--minutes", "0"], "a number of minutes above 0"),
        ([], "required: --out"),
        (["--out", "/proc/no/folder", "--device", "cpu", "--tiny"], "--out /proc/no/folder"),
        (["keep"], "required: DIR"),
        (["keep", "/no/such/folder"], "cannot be read"),
        (["support", "more"], "unrecognized arguments"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        gpu_suite.main(options)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", [gpu_suite.main, tune.main])
def test_no_gpu(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        command(["--out", str(tmp_path / "x")])
    assert error.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- what is kept
def a_run(folder: Path, **changes: Any) -> Path:
    """A made-up run on a GPU, in which every check of a gated backend passed but one that was left out."""
    record = Record("full", "cuda", "c0ffee", 8.5)
    versions = {"heads_kernels": "0.1.0", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
    record.stages["machine"] = [
        {"name": "machine", "verdict": PASSED, "device": "NVIDIA H200", "versions": versions}
    ]
    record.stages["accuracy"] = [
        {"name": "gated_attention/small/bfloat16/triton", "verdict": PASSED},
        {"name": "gated_attention/one/bfloat16/triton", "verdict": LEFT_OUT},
    ]
    folder.mkdir(exist_ok=True)
    for name, value in changes.items():
        setattr(record, name, value)
    record.write(folder)
    return folder


def test_keep_and_render(tmp_path: Path) -> None:
    first, kept = a_run(tmp_path / "run"), tmp_path / "kept"
    (first / "gated.png").write_bytes(b"png")
    target = support.keep([first], kept)
    assert target == kept / "nvidia-h200"
    assert sorted(path.name for path in target.iterdir()) == ["gated.png", "results.json"]
    cell = support._cell(
        [json.loads((target / "results.json").read_text())], "gated_attention", "triton"
    )
    assert cell.startswith("NVIDIA H200: 1 checks passed, 1 left out (commit c0ffee, torch 2.11.0")

    second = a_run(tmp_path / "again", stages={
        **json.loads((first / "results.json").read_text())["stages"],
        "accuracy": [{"name": "gated_attention/one/bfloat16/triton", "verdict": FAILED}]})  # fmt: skip
    support.keep([first, second], kept)
    merged = json.loads((target / "results.json").read_text())
    assert merged["counts"]["accuracy"] == {PASSED: 1, FAILED: 1}
    assert len(merged["failures"]) == 1
    assert "1 checks passed, **1 failed** (commit" in support.render(kept) or not GPU.backends(
        "gated_attention"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "tiny"}, "is a tiny run"),
        ({"device": "cpu"}, "on cpu"),
        ({"stages": {}}, "full ones"),
    ],
)
def test_only_full_runs_on_a_gpu_are_kept(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(support.CannotKeep, match=message):
        support.keep([a_run(tmp_path / "run", **changes)], tmp_path / "kept")


def test_runs_of_other_commits_do_not_mix(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "a"), a_run(tmp_path / "b", commit="dead")]
    with pytest.raises(support.CannotKeep, match="dead"):
        support.keep(runs, tmp_path / "kept")


def test_readme_says_what_kept_runs_show() -> None:
    """`python -m benchmarks.gpu_suite support` rewrites it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert support.section(text, support.render()) == text


def test_nothing_is_claimed_without_a_kept_run(tmp_path: Path) -> None:
    for line in support.render(tmp_path).splitlines()[2:]:
        assert "not verified on a GPU so far" in line


def test_section_needs_its_markers() -> None:
    with pytest.raises(ValueError, match="gpu-support:begin"):
        support.section("no markers", "")


def test_a_backend_that_refuses_everything_fails_the_run() -> None:
    record = Record("full", "cuda", "c", 1.0)
    record.stages["accuracy"] = [
        {"name": "gated_attention/a/float32/triton", "verdict": REFUSED, "detail": "no"}
    ]
    assert record.failures() == ["gated_attention on triton: every call was refused"]
    assert any(line.startswith("FAIL gated_attention on triton") for line in lines(record))


def test_plots_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plots.draw(Record("full", "cuda", "c", 1.0), tmp_path) == []


def test_plots_say_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most five lines a panel, and a message: ours against the fastest other."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: drawn.append(self))
    times = {name: {"ms": 4.0} for name in (*RIVALS, "cuda", "triton whole")}
    direction = {"flops": 300e9, "times": {**times, "cudnn": {"ms": 1.6}, "triton": {"ms": 2.0}}}
    found = {"default": "triton", "forward": direction, "backward": direction}
    record = Record("full", "cuda", "c", 1.0)
    record.stages["timing"] = [w.sizes() | found for w in workloads()]
    assert [path.name for path in plots.draw(record, tmp_path)] == [
        "gated.png", "closed.png", "collaborative.png",
    ]  # fmt: skip
    panels = [axes for figure in drawn for axes in figure.axes]
    assert len(panels) == 4 * 2 + 2 + 2 * 3
    assert all(1 < len(axes.get_legend().get_texts()) <= 5 for axes in panels[:-2])
    titles = [" ".join(axes.get_title("left").split()) for axes in panels]
    ratio = "0.80 times the speed of the fastest other"
    assert titles[0] == f"D 64, dense, forward: {ratio} at T = 16384"
    assert titles[8] == "Forward: 25% of the heads open take 50% to 50% of the time"


def test_slug() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("AMD Instinct MI300X (OAM)") == "amd-instinct-mi300x-oam"


# ---------------------------------------------------------------------- the tuner
def test_neighbours_differ_in_what_is_used() -> None:
    today = {"block_m": 128, "block_n": 64, "block_d": 16, "num_warps": 8, "num_stages": 3}
    used = ["block_m", "block_n", "num_warps", "num_stages"]
    found = list(tune.neighbours(today, used))
    assert len({tuple(tiles.values()) for tiles in found}) == len(found)
    for tiles in found:
        changed = [name for name in today if tiles[name] != today[name]]
        assert 1 <= len(changed) <= 2
        assert set(changed) <= set(used)
        assert 2 <= tiles["num_warps"] <= 8
        assert 16 <= tiles["block_m"] <= 256


def test_neighbours_limit_registers() -> None:
    today = {"block_m": 128, "num_warps": 8, "num_stages": 3, "partial_stages": 1, "maxnreg": 0}
    found = list(tune.neighbours(today, list(today)))
    assert {**today, "maxnreg": 128} in found
    assert {**today, "partial_stages": 2, "maxnreg": 128} in found
    assert {
        tiles["maxnreg"] for tiles in tune.neighbours({**today, "maxnreg": 128}, ["maxnreg"])
    } == {0, 80}


def test_job_names() -> None:
    job = tuning.Job("try", "gated_D64 forward", "bfloat16", "k", ({"block_m": 16},))
    assert tuning.Job.from_name(job.to_name()) == job


@pytest.mark.slow
@pytest.mark.skipif("triton" not in GPU.backends("gated_attention"), reason="no triton backend")
def test_tuner_at_toy_sizes(tmp_path: Path) -> None:
    """In the interpreter: what is there of other kernels stays, and what is written has all its fields."""
    path = tmp_path / "tuned.json"
    other = {"kernel": "another", "dtype": "float16", "D": 64, "Dv": 64}
    path.write_text(json.dumps({"tiles": [other]}))
    command = [sys.executable, "-m", "benchmarks.tune", "--device", "cpu", "--tiny", "--dtype", "float32",
        "--call", "gated_D64 forward", "--out", str(path), "--minutes", "4"]  # fmt: skip
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gated_attention.forward D16 Dv16 float32: 3 of 3 candidates run" in done.stdout
    tiles = json.loads(path.read_text())["tiles"]
    assert other in tiles
    for entry in tiles:
        if entry != other:  # today's tiles may be the fastest, and then nothing is written
            assert {"kernel", "dtype", "D", "Dv", "block_m", "block_n", "num_warps", "num_stages", "ms",
                "heuristic_ms"} <= set(entry)  # fmt: skip


def test_tuner_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        tune.main(["--device", "cpu", "--tiny", "--call", "nonsense"])
    assert error.value.code == 2
    assert "matches none of gated_D64 forward" in capsys.readouterr().err
