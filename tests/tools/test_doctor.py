"""`python -m heads_kernels doctor`: on the CPU, emulated, interpreted, and with backends broken on purpose."""

from __future__ import annotations

import json
import os
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
from heads_kernels.doctor.speed import SHAPES, fastest_first, sdpa, time_backends
from heads_kernels.testing import find
from tests.support.alike import assert_alike

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

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


def job(**changes: Any) -> dict[str, Any]:
    """What a worker is asked for."""
    given = {
        "device": "cpu",
        "backend": "cpu",
        "dtype": "float32",
        "operators": ["gated_attention"],
    }
    return {**given, "threads": 1, "seconds": 40.0, **changes}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> str:
    (tmp_path / "sitecustomize.py").write_text(SITE.format(BROKEN[how]))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return how


# ---------------------------------------------------------------------- one backend
@pytest.mark.parametrize("backend", ["cpu", "triton", "cuda"])
def test_the_selection_passes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter the first of each operator: `tests/ops` runs every one of these cases in it."""
    if backend == "triton":
        first = {operator: (operator, of, name) for operator, of, name in reversed(CHECKS)}
        monkeypatch.setattr(checks, "CHECKS", tuple(first.values()))
    operators = [name for name, rows in TABLES.items() if backend in {row.name for row in rows}]
    expected = [
        n for o, _, n in checks.CHECKS if o in operators and not n.startswith("length_1000")
    ]
    verdict = Verdict()
    for row in run_checks(backend, operators, torch.float32, CPU):
        if row["check"].startswith("length_1000"):
            break  # long, and the last
        if "wrong" in row:
            verdict.add(row)
            verdict.planned += 1
    assert not verdict.failures
    assert verdict.word == "verified here"
    assert verdict.passed == len(expected)
    assert 0 < verdict.worst <= 1
    assert str(verdict).startswith(f"verified here: {verdict.passed} of {verdict.planned} checks")


@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_a_wrong_result_and_an_exception(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from heads_kernels.ops import native

    original = native.forward
    scope: dict[str, Any] = {"original": original}
    exec(f"def broken(call, results):\n    {BROKEN[how]}", scope)
    monkeypatch.setattr(native, "forward", scope["broken"])
    verdict = Verdict()
    for row in run_checks("cpu", ["collaborative_attention"], torch.float32, CPU):
        if "wrong" in row:
            verdict.add(row)
            break
    assert verdict.word == "failed"
    expected = "out max" if how == "wrong" else "RuntimeError: no kernel image"
    assert str(verdict).startswith(f"failed: ragged_bias in float32 ({expected}")


@pytest.mark.parametrize("how", ["dies"])
@pytest.mark.usefixtures("broken")
def test_a_process_that_dies_failed_in_the_check_that_it_began() -> None:
    rows, words, late = worker.ask(job())
    assert (words, late) == ("the process died of SIGSEGV", False)
    each = planned()
    command._count(each, job(), rows, words, late)
    verdict = each.verdicts["gated_attention"]["cpu"]
    assert str(verdict) == "failed: transposed_grouped in float32 (the process died of SIGSEGV)"


@pytest.mark.parametrize("how", ["hangs"])
@pytest.mark.usefixtures("broken")
def test_a_hang_is_neither_verified_nor_failed() -> None:
    """It may be a compiler that takes long."""
    asked = job(seconds=5.0)
    rows, words, late = worker.ask(asked)
    assert late
    each = planned()
    command._count(each, asked, rows, words, late)
    verdict = each.verdicts["gated_attention"]["cpu"]
    assert verdict.word == "not verified"
    assert str(verdict).endswith("transposed_grouped in float32 did not end in 20 s")


def test_a_worker_that_does_not_start() -> None:
    rows, words, late = worker.ask(job(device="no device"))
    assert (rows, late) == ([], False)
    assert words.startswith("the process ended with RuntimeError")
    each = planned()
    command._count(each, job(), rows, words, late)
    assert each.verdicts["gated_attention"]["cpu"].word == "failed"


def planned() -> command.Examined:
    return command.Examined(CPU, {"gated_attention": {"cpu": Verdict()}})


# ---------------------------------------------------------------------- times
def test_times_of_four_shapes() -> None:
    assert len(SHAPES) == 4
    (row, *rest) = time_backends({"gated_attention": ["cpu"]}, CPU, budget_s=0.01)
    assert set(row["seconds"]) == {"sdpa", "cpu"}
    assert len(rest) == 1  # of the other operator nothing is verified


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
def doctor(cache: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != doctor_record.VARIABLE}
    return subprocess.run(
        [sys.executable, "-m", "heads_kernels", "doctor", *options],
        env={**env, "XDG_CACHE_HOME": str(cache), **variables},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def explained(cache: Path, *arguments: str) -> str:
    code = "import torch, heads_kernels as hk; q = torch.ones(1, 2, 3, 4);"
    code += f"print(hk.explain('gated_attention', q, q, q{''.join(arguments)}))"
    env = {name: value for name, value in os.environ.items() if name != doctor_record.VARIABLE}
    env = {**env, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout


def test_in_words_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one dtype: the tests below examine all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "dtypes", lambda backend, device: (torch.float32,))
    assert commands.main(["doctor", "--seconds", "3"]) == 0
    printed = capsys.readouterr().out
    assert "    cpu      verified here: " in printed
    assert "    triton   can't run: tensors are on cpu" in printed
    assert printed.splitlines()[-1].startswith("heads_kernels ")
    assert not list(tmp_path.iterdir())


def test_saved_and_read(tmp_path: Path) -> None:
    run = doctor(tmp_path, "--seconds", "5", "--save", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    (device,) = [each for each in found["devices"] if each["device"] == "cpu"]
    assert device["operators"]["gated_attention"]["cpu"]["verdict"] == "verified here"
    assert device["order"]["gated_attention"] == ["cpu"]
    assert found["saved"] == str(tmp_path / "heads_kernels" / "doctor.json")
    assert "order: found on this machine on 20" in explained(tmp_path)


@pytest.mark.parametrize("how", ["raises"])
@pytest.mark.usefixtures("broken")
def test_a_broken_backend_is_not_chosen_afterwards(tmp_path: Path) -> None:
    run = doctor(tmp_path, "--seconds", "5", "--save")
    assert run.returncode == 1, run.stderr
    words = "transposed_grouped in float32 (RuntimeError: no kernel image)"
    assert f"    cpu      failed: {words}; and " in run.stdout
    assert words in run.stdout.splitlines()[-1]
    chosen = explained(tmp_path)
    assert "runs on 'eager'" in chosen
    assert f"not 'cpu': failed here: {words}" in chosen
    named = explained(tmp_path, ", backend='cpu'")
    assert "runs on 'cpu'" in named
    assert f"'cpu' failed here: {words}" in named


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_simulated(backend: str, tmp_path: Path) -> None:
    run = doctor(tmp_path, "--seconds", "40", "--json")
    assert run.returncode == 0, run.stderr + run.stdout
    (device,) = json.loads(run.stdout)["devices"]
    assert device["operators"]["gated_attention"][backend]["verdict"] == "verified here"
    assert device["environment"]["simulated"]
    assert not any(backend in row["seconds"] for row in device["speed"])


def test_a_cache_that_cant_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "heads_kernels").write_text("a file")
    monkeypatch.setattr(command, "examine", lambda seconds: [planned()])
    assert commands.main(["doctor", "--save"]) == 1
    assert "doctor.json can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--seconds", "0"], ["--seconds", "nan"], ["--seconds", "x"], ["--no"]]
)
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["doctor", *options])
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err
