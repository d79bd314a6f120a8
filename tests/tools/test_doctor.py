"""`python -m heads_kernels doctor`: on the CPU, emulated, interpreted, and with backends broken on purpose."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from heads_kernels import __main__ as commands
from heads_kernels import doctor_record
from heads_kernels.doctor import checks, command, worker
from heads_kernels.doctor.checks import CHECKS, TABLES, Verdict, run_checks
from heads_kernels.doctor.speed import SHAPES, fastest_first, sdpa
from heads_kernels.ops import native
from heads_kernels.testing import find
from tests.support.alike import assert_alike

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
FIRST = "transposed_grouped in float32"  # of the checks of gated attention

#: What a backend does instead of its work, from the start of a process on.
BROKEN = {
    "wrong": "original(call, results); results.out.mul_(1.01)",
    "raises": "raise RuntimeError('no kernel image')",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "import time; time.sleep(600)",
}
SITE = """
import os, sys
if sys.argv[0] == "-m":  # the arguments are not there yet: of the command and of its workers
    import torch
    from heads_kernels.ops import native
    original = native.forward
    def broken(call, results):
        {0}
    native.forward = broken
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> str:
    """Processes that are started in this test have a broken CPU backend."""
    (tmp_path / "sitecustomize.py").write_text(SITE.format(BROKEN[how]))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return how


def one_operator() -> command.Examined:
    return command.Examined(CPU, {"gated_attention": {"cpu": Verdict()}})


# ---------------------------------------------------------------------- one backend
@pytest.mark.parametrize("backend", ["cpu", "triton", "cuda"])
def test_the_first_check_of_each_operator_passes(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/ops` runs all of these cases."""
    first = {operator: (operator, of, name) for operator, of, name in reversed(CHECKS)}
    monkeypatch.setattr(checks, "CHECKS", tuple(first.values()))
    operators = [name for name, rows in TABLES.items() if backend in {row.name for row in rows}]
    verdict = Verdict()
    for row in run_checks(backend, operators, torch.float32, CPU):
        if "wrong" in row:
            verdict.add(row)
    assert not verdict.failures
    assert verdict.word == "verified here"
    assert verdict.passed == len(operators)
    assert 0 < verdict.worst <= 1


@pytest.mark.parametrize(("how", "words"), [("wrong", "out max"), ("raises", "no kernel image")])
def test_a_wrong_result_and_an_exception_fail(
    how: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope: dict[str, Any] = {"original": native.forward}
    exec(f"def broken(call, results):\n    {BROKEN[how]}", scope)
    monkeypatch.setattr(native, "forward", scope["broken"])
    rows = run_checks("cpu", ["gated_attention"], torch.float32, CPU)
    row = next(row for row in rows if "wrong" in row)
    assert row["check"] == FIRST
    assert words in row["wrong"]


@pytest.mark.parametrize(
    ("how", "device", "verdict"),
    [
        ("dies", "cpu", f"failed: {FIRST} .the process died of SIGSEGV"),
        ("hangs", "cpu", f"not verified.*{FIRST} did not end in"),  # it may be a compiler
        ("wrong", "no device", "failed: float32 .the process ended with RuntimeError"),
    ],
)
@pytest.mark.usefixtures("broken")
def test_a_process_that_dies_hangs_or_does_not_start(device: str, verdict: str) -> None:
    job = {"device": device, "backend": "cpu", "dtype": "float32", "operators": ["gated_attention"],
        "threads": 1, "seconds": 30.0}  # fmt: skip
    each = one_operator()
    command._count(each, job, *worker.ask(job))
    assert re.match(verdict, str(each.verdicts["gated_attention"]["cpu"]))


# ---------------------------------------------------------------------- times
@pytest.mark.parametrize(("operator", "name"), SHAPES)
def test_what_is_timed_computes_the_same(operator: str, name: str) -> None:
    inputs = find(operator, name).make()
    assert_alike(sdpa(inputs), inputs.call("eager"))


def test_the_fastest_is_first() -> None:
    def row(**seconds: float) -> dict[str, Any]:
        return {"operator": "gated_attention", "seconds": seconds}

    rows = [row(a=1.0, b=4.0), row(a=8.0, b=1.0), {"operator": "other", "seconds": {"a": 1e-9}}]
    assert fastest_first("gated_attention", ["c", "a", "b", "d"], rows) == ["b", "a", "c", "d"]
    assert fastest_first("gated_attention", ["c", "a"], []) == ["c", "a"]


# ---------------------------------------------------------------------- the command
def python(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that reads and keeps records in `cache`."""
    env = {name: value for name, value in os.environ.items() if name != doctor_record.VARIABLE}
    return subprocess.run([sys.executable, *arguments], env={**env, "XDG_CACHE_HOME": str(cache)},
        cwd=ROOT, capture_output=True, text=True, check=False)  # fmt: skip


def explained(cache: Path, *arguments: str) -> str:
    code = "import torch, heads_kernels as hk; q = torch.ones(1, 2, 3, 4);"
    code += f"print(hk.explain('gated_attention', q, q, q{''.join(arguments)}))"
    return python(cache, "-c", code).stdout


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records are kept, by a command that examined one operator."""
    each = one_operator()
    each.verdicts["gated_attention"]["cpu"] = Verdict(planned=1, passed=1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "examine", lambda seconds: [each])
    return tmp_path


def test_nothing_is_written_without_save(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "    cpu      verified here: 1 of 1 checks" in printed
    assert printed.splitlines()[-1].startswith("heads_kernels ")
    assert not list(cache.iterdir())


def test_saved_and_read(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["doctor", "--save", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (device,) = found["devices"]
    assert device["operators"]["gated_attention"]["cpu"]["verdict"] == "verified here"
    assert device["order"]["gated_attention"] == ["cpu"]
    assert found["saved"] == str(cache / "heads_kernels" / "doctor.json")
    assert "order: found on this machine on 20" in explained(cache)


def test_a_cache_that_cant_be_written(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cache / "heads_kernels").write_text("a file")
    assert commands.main(["doctor", "--save"]) == 1
    assert "doctor.json can't be written" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["raises"])
@pytest.mark.usefixtures("broken")
def test_a_broken_backend_is_not_chosen_afterwards(tmp_path: Path) -> None:
    run = python(tmp_path, "-m", "heads_kernels", "doctor", "--seconds", "40", "--save")
    assert run.returncode == 1, run.stderr
    words = f"{FIRST} (RuntimeError: no kernel image)"
    assert f"    cpu      failed: {words}; and " in run.stdout
    assert words in run.stdout.splitlines()[-1]
    chosen, named = explained(tmp_path), explained(tmp_path, ", backend='cpu'")
    assert "runs on 'eager'" in chosen
    assert f"not 'cpu': failed here: {words}" in chosen
    assert "runs on 'cpu'" in named
    assert f"'cpu' failed here: {words}" in named


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_simulated(backend: str, tmp_path: Path) -> None:
    run = python(tmp_path, "-m", "heads_kernels", "doctor", "--seconds", "120", "--json")
    assert run.returncode == 0, run.stderr + run.stdout
    (device,) = json.loads(run.stdout)["devices"]
    assert device["operators"]["gated_attention"][backend]["verdict"] == "verified here"
    assert device["environment"]["simulated"]
    assert not any(backend in row["seconds"] for row in device["speed"])


@pytest.mark.parametrize("seconds", ["0", "nan"])
def test_seconds_are_above_0(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["doctor", "--seconds", seconds])
    assert ended.value.code == 2
    assert "--seconds" in capsys.readouterr().err
