"""The GPU suite and the tuner: a little of each in the simulators; stages and jobs that crash or hang are recorded."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_suite, tuning
from benchmarks.gpu_suite import Stage
from benchmarks.tuning import Job
from tests.support.commands import python

pytestmark = pytest.mark.release


def stage(code: str, limit_s: float = 60.0) -> Stage:
    return Stage((sys.executable, "-c", f"import os, signal, sys, time; {code}"), limit_s)


PASSES = stage("print('all is well')")


def run(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the record."""
    status = gpu_suite.main(["--simulate", "--out", str(out), *options])
    return status, json.loads((out / "record.json").read_text())


def outcomes(record: dict[str, Any]) -> dict[str, str]:
    return {name: row["outcome"] for name, row in record["stages"].items()}


# ---------------------------------------------------------------------- the suite
@pytest.mark.slow
def test_every_stage_in_the_simulators(tmp_path: Path) -> None:
    python("-m", "benchmarks.gpu_suite", "--simulate", "--out", tmp_path)
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record["stages"]) == list(gpu_suite.stages(tmp_path, False))
    assert set(outcomes(record).values()) <= {"passed", "skipped"}
    assert outcomes(record)["tests"] == outcomes(record)["tuner"] == "passed"


def test_a_stage_that_crashes_or_hangs_is_recorded_and_the_next_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {
        "doctor": stage("os.kill(os.getpid(), signal.SIGSEGV)"),
        "tests": stage("print('begun', flush=True); time.sleep(600)", limit_s=5.0),
        "memcheck": Stage(("no-such-tool",), 1.0, needs="no-such-tool"),
        "racecheck": stage("print('a race'); sys.exit(1)"),
        "tuner": PASSES,
    }
    monkeypatch.setattr(gpu_suite, "stages", lambda out, simulate: made)
    monkeypatch.setattr(gpu_suite, "_REPORT_S", 5.0)
    status, record = run(tmp_path)
    assert status == 1
    assert outcomes(record) == {"doctor": "crashed", "tests": "timed out", "memcheck": "skipped",
        "racecheck": "failed", "tuner": "passed"}  # fmt: skip
    assert record["stages"]["doctor"]["status"] == -11
    assert "begun" in (tmp_path / "tests.txt").read_text()
    assert {"device", "commit", "versions"} <= record.keys()

    # The same command continues: what ended is not run again.
    made.update(dict.fromkeys(made, PASSES))
    status, record = run(tmp_path)
    assert (status, outcomes(record)["racecheck"]) == (1, "failed")
    assert outcomes(record)["doctor"] == outcomes(record)["tests"] == "passed"
    status, record = run(tmp_path, "--only", "racecheck")
    assert (status, outcomes(record)["racecheck"]) == (0, "passed")


# ---------------------------------------------------------------------- the tuner
def test_a_job_that_ends_or_blocks_its_process_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "python"
    worker.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys, time\n"
        "for line in sys.stdin:\n"
        "    call = json.loads(line)['call']\n"
        "    if call == 'crashes': print('boom', file=sys.stderr); os._exit(3)\n"
        "    if call == 'hangs': time.sleep(600)\n"
        "    print(json.dumps({'row': {'ms': call}}), flush=True)\n"
    )
    worker.chmod(0o755)
    monkeypatch.setattr(tuning.sys, "executable", str(worker))

    def rows(*calls: str, seconds: float) -> list[dict[str, Any]]:
        jobs = [Job("try", call, "bfloat16") for call in calls]
        return tuning.run_jobs(jobs, processes=2, until=time.monotonic() + seconds)

    a, crashed, b, c = rows("a", "crashes", "b", "c", seconds=60)
    assert [a, b, c] == [{"ms": "a"}, {"ms": "b"}, {"ms": "c"}]
    assert "status 3: boom" in crashed["wrong"]
    a, late, b = rows("a", "hangs", "b", seconds=5)
    assert [a, b] == [{"ms": "a"}, {"ms": "b"}]
    assert late["wrong"] == "no time was left"


@pytest.mark.slow
def test_what_is_tuned_is_written_beside_what_is_there(tmp_path: Path) -> None:
    """In the interpreter; today's tiles may be the fastest, and then nothing is written."""
    path, other = tmp_path / "tuned.json", {"kernel": "x", "dtype": "float16", "D": 64, "Dv": 64}
    path.write_text(json.dumps({"tiles": [other]}))
    done = python("-m", "benchmarks.tune", "--simulate", "--out", path, TRITON_INTERPRET="1")
    assert "D16 Dv16 float32: 3 of 3 candidates run" in done.stdout
    tiles = json.loads(path.read_text())["tiles"]
    assert other in tiles
    for entry in tiles:
        assert entry == other or {"block_m", "num_warps", "ms", "heuristic_ms"} <= entry.keys()
