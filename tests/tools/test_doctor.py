"""`python -m heads_kernels doctor`: on the CPU, emulated, interpreted, and with backends broken on purpose."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from heads_kernels import __main__ as commands
from heads_kernels.backends import BACKENDS, VARIABLE
from heads_kernels.doctor import checks, command
from heads_kernels.doctor.checks import CHECKS, OPERATORS, SHAPES, Verdict, run_checks, sdpa
from heads_kernels.ops import cpu, direct
from heads_kernels.testing import find
from tests.support.alike import assert_alike
from tests.support.commands import ROOT, python

pytestmark = pytest.mark.release

CPU = torch.device("cpu")
FIRST = "gated_attention transposed_grouped in float32"

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
    from heads_kernels.ops import cpu, direct
    original = cpu.forward
    def broken(call, results):
        {0}
    cpu.forward, direct.attend = broken, lambda call, backend: None  # every call runs as an op
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> str:
    """Processes that are started in this test have a broken CPU backend."""
    (tmp_path / "sitecustomize.py").write_text(SITE.format(BROKEN[how]))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return how


# ---------------------------------------------------------------------- one backend
@pytest.mark.parametrize("backend", ["cpu", "triton", "cuda"])
def test_the_first_check_of_each_operator_passes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/ops` runs all of these cases."""
    first = {operator: (operator, of, name) for operator, of, name in reversed(CHECKS)}
    monkeypatch.setattr(checks, "CHECKS", tuple(first.values()))
    operators = [name for name in OPERATORS if (backend, name) != ("cuda", "entmax_attention")]
    verdict = Verdict()
    verdict.add([*run_checks(backend, operators, torch.float32, CPU)], "", False)
    assert verdict.is_verified
    assert verdict.passed == len(operators)


@pytest.mark.parametrize(("how", "words"), [("wrong", "out rms"), ("raises", "no kernel image")])
def test_a_wrong_result_and_an_exception_fail(how: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {"original": cpu.forward}
    exec(f"def broken(call, results):\n    {BROKEN[how]}", scope)
    monkeypatch.setattr(cpu, "forward", scope["broken"])
    monkeypatch.setattr(direct, "attend", lambda call, backend: None)  # every call runs as an op
    rows = run_checks("cpu", ["gated_attention"], torch.float32, CPU)
    row = next(row for row in rows if "wrong" in row)
    assert row["check"] == FIRST
    assert words in row["wrong"]


@pytest.mark.parametrize(
    ("how", "device", "verdict"),
    [
        ("dies", "cpu", f"failed 1 of .*, first {FIRST} .the process died of SIGSEGV"),
        ("hangs", "cpu", f"not verified.*{FIRST} did not end in"),  # it may be a compiler
        ("wrong", "no device", "failed 1 of .*, first the process ended with RuntimeError"),
    ],
)
@pytest.mark.usefixtures("broken")
def test_a_process_that_dies_hangs_or_does_not_start(device: str, verdict: str) -> None:
    job = {"device": device, "backend": "cpu", "dtype": "float32", "operators": ["gated_attention"],
        "threads": 1, "seconds": 30.0}  # fmt: skip
    found = Verdict(planned=1)
    found.add(*checks.ask(job))
    assert re.match(verdict, str(found))


# ---------------------------------------------------------------------- times
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_timed_computes_the_same(name: str) -> None:
    inputs = find("gated_attention", name).make()
    assert_alike(sdpa(inputs), inputs.call("eager"))


def device(a: Verdict, b: Verdict, *speed: tuple[float, float]) -> command.Examined:
    rows = [{"seconds": {"sdpa": 1.0, "triton": t, "cuda": c}} for t, c in speed]
    return command.Examined(CPU, {"triton": a, "cuda": b}, rows)


def test_the_fastest_is_first_and_what_failed_is_left_out() -> None:
    good, bad = Verdict(passed=1), Verdict(passed=1, failures=["x"])
    assert command.order([device(good, good)]) == [row.name for row in BACKENDS]
    cuda = device(good, good, (1.0, 4.0), (8.0, 1.0))
    assert command.order([cuda]) == ["cuda", "triton", "cpu", "eager"]
    assert command.order([cuda, device(good, bad)]) == ["triton", "cpu", "eager"]


# ---------------------------------------------------------------------- the command
def test_nothing_is_verified_without_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "examine", lambda seconds: [command._planned(CPU)])
    assert commands.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "  cpu      not verified: 0 of 0 checks" in printed
    assert "  triton   can't run: " in printed
    assert printed.endswith(f"{VARIABLE} need not be set\n")


def test_a_device_that_does_not_open_is_refused() -> None:
    found = command._planned(torch.device("cuda", 99))
    assert found.verdicts.keys() == {"cpu", "triton", "cuda"}
    assert all(str(verdict).startswith("can't run: ") for verdict in found.verdicts.values())


@pytest.mark.parametrize("how", ["raises"])
@pytest.mark.usefixtures("broken")
def test_a_backend_that_failed_is_not_in_the_line() -> None:
    run = python("-m", "heads_kernels", "doctor", "--seconds", "40", status=1)
    assert f", first {FIRST} (RuntimeError: no kernel image)\n" in run.stdout
    assert run.stdout.endswith(f"\n{VARIABLE}=triton,cuda,eager\n")


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_simulated(backend: str) -> None:
    run = python("-m", "heads_kernels", "doctor", "--seconds", "120")
    assert re.search(f"^  {backend} +verified here", run.stdout, re.MULTILINE)
    assert "(1.00x), cpu " in run.stdout
    assert f"{backend} 0." not in run.stdout
