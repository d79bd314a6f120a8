"""What `doctor --save` keeps, and what the choice of a backend makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from heads_kernels import backends, dispatch, doctor_record
from heads_kernels.backends import Backend
from heads_kernels.call import Call
from heads_kernels.dispatch import choose, select
from heads_kernels.doctor_record import Found
from tests.ops.calls import parsed, tensors

CPU = torch.device("cpu")
ENTRY = {"environment": {"device": "x"}, "date": "", "operators": {}}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the record would be; this process reads it as a new one would."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor_record, "IGNORED", False)
    monkeypatch.setattr(dispatch, "BACKENDS", TABLE)
    monkeypatch.setattr(backends, "BACKENDS", TABLE)
    forget(monkeypatch)
    return doctor_record.path()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_record, "_READ", {})


def serves(problem: Call) -> list[str]:
    return []


def serves_not(problem: Call) -> list[str]:
    return ["it is too wide"]


TABLE = [
    Backend("triton", "", serves),
    Backend("cuda", "", serves),
    Backend("cpu", "", serves_not),
    Backend("eager", "", serves),
]


def a_call() -> Call:
    return parsed("gated_attention", **tensors("gated_attention"))


def test_no_record_is_the_order_of_the_table(file: Path) -> None:
    choice = choose(a_call())
    assert (choice.backend, list(choice.refusals)) == ("triton", ["cuda", "cpu", "eager"])
    assert "`python -m heads_kernels doctor --save` has kept none for this device" in str(choice)
    assert select(a_call()) == "triton"
    assert not file.parent.exists()  # nothing is written


def test_the_fastest_verified_backend_is_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_record.save(CPU, {"gated_attention": Found(("cuda", "triton"))}) == file
    choice = choose(a_call())
    assert choice.backend == select(a_call()) == "cuda"
    assert list(choice.refusals) == ["triton", "cpu", "eager"]
    assert "order: found on this machine on 20" in str(choice)
    assert str(file) in str(choice)
    query, key = torch.randn(2, 1, 2, 3, 4)
    assert (
        choose(parsed("attention_statistics", query, key)).backend == "triton"
    )  # nothing kept of it
    forget(monkeypatch)
    monkeypatch.setattr(doctor_record, "IGNORED", True)
    assert select(a_call()) == "triton"


def test_what_is_not_verified_comes_last(file: Path) -> None:
    doctor_record.save(CPU, {"gated_attention": Found(("cuda",))})
    assert list(choose(a_call(), None).refusals) == ["triton", "cpu", "eager"]


def test_a_backend_that_failed_runs_only_where_it_is_named(file: Path) -> None:
    failed = (("triton", "failed here: small in float32"), ("cpu", "failed here: x"))
    doctor_record.save(CPU, {"gated_attention": Found(("cuda",), failed)})
    choice = choose(a_call())
    assert choice.backend == select(a_call()) == "cuda"
    assert choice.refusals["triton"] == ["failed here: small in float32"]
    assert choice.refusals["cpu"] == ["failed here: x", "it is too wide"]
    named = choose(a_call(), "triton")
    assert named.backend == select(a_call(), "triton") == "triton"
    assert "'triton' failed here: small in float32: found on this machine" in str(named)


def test_tests_and_benchmarks_ignore_the_record() -> None:
    assert doctor_record.IGNORED
    code = (
        "import benchmarks.results; from heads_kernels import doctor_record as r; print(r.IGNORED)"
    )
    env = {name: value for name, value in os.environ.items() if name != doctor_record.VARIABLE}
    for asked, expected in ((env, "True"), ({**env, doctor_record.VARIABLE: "1"}, "False")):
        run = subprocess.run(
            [sys.executable, "-c", code], env=asked, capture_output=True, text=True
        )
        assert run.stdout.strip() == expected, run.stderr


def test_saving_again_replaces_the_own_entry_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.mkdir()
    file.write_text(json.dumps({"format": 1, "entries": [ENTRY]}))
    for names in (("cuda",), ("triton",)):
        doctor_record.save(CPU, {"gated_attention": Found(names)})
    entries = json.loads(file.read_text())["entries"]
    assert entries[0] == ENTRY
    assert [e["operators"]["gated_attention"]["verified"] for e in entries[1:]] == [["triton"]]
    assert [each.name for each in file.parent.iterdir()] == [file.name]  # nothing beside it is left


def test_a_write_that_fails_leaves_the_record(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor_record.save(CPU, {"gated_attention": Found(("cuda",))})
    before = file.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        doctor_record.save(CPU, {"gated_attention": Found(("triton",))})
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


BAD: dict[str, Any] = {
    "not JSON": b"{",
    "not text": b"\xff\xfe",
    "of another format": b'{"format": 2, "entries": []}',
    "entries of no use": b'{"format": 1, "entries": [3]}',
    "names that are no strings": json.dumps(
        {"format": 1, "entries": [{**ENTRY, "operators": {"x": {"verified": [1], "failed": {}}}}]}
    ).encode(),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_bad_file_is_ignored_with_one_warning(content: bytes, file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="doctor.json can't be read") as found:
        assert select(a_call()) == "triton"
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(a_call()) == "triton"
    doctor_record.save(CPU, {"gated_attention": Found(("cuda",))})  # in its place


def test_a_file_that_cant_be_opened(file: Path) -> None:
    file.mkdir(parents=True)
    with pytest.warns(UserWarning, match="can't be read"):
        assert select(a_call()) == "triton"


@pytest.mark.parametrize("changed", ["torch", "heads_kernels", "simulated"])
def test_a_record_of_another_environment_is_ignored_with_a_warning(
    changed: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor_record.save(CPU, {"gated_attention": Found(("cuda",))})
    record = json.loads(file.read_text())
    record["entries"][0]["environment"][changed] = "another"
    file.write_text(json.dumps(record))
    with pytest.warns(UserWarning, match=f"another environment.*{changed} is .* was another"):
        assert select(a_call()) == "triton"


def test_entries_of_other_machines_are_no_fault(file: Path) -> None:
    """Of a folder that machines share."""
    file.parent.mkdir()
    file.write_text(json.dumps({"format": 1, "entries": [ENTRY]}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(a_call()) == "triton"


def test_the_folder_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path.home() / ".cache" / "heads_kernels" / "doctor.json"
    for value in ("", "relative"):  # which the specification says to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert doctor_record.path() == usual
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert doctor_record.path() == usual


def test_nothing_is_read_for_devices_by_name_only(file: Path) -> None:
    for device in ("meta", "cuda:0"):
        if not (device != "meta" and torch.cuda.is_initialized()):
            assert (
                doctor_record.found("gated_attention", torch.device(device))
                is doctor_record.NOTHING
            )
    assert not doctor_record._READ


DRIVERS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024": "550.54.15",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build": "580.65.06",
}


@pytest.mark.parametrize("text", DRIVERS)
def test_the_version_of_the_driver(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, **_: text)
    assert doctor_record.driver_version.__wrapped__() == DRIVERS[text]


def test_the_first_call_of_a_process_is_compiled(file: Path) -> None:
    """The record is read while it is traced."""
    doctor_record.save(CPU, {"gated_attention": Found(("eager",), (("cpu", "failed"),))})
    code = """
import torch
import heads_kernels as hk

def run(x):
    out = hk.gated_attention(x, 2 * x, x - 1) + hk.gated_attention(x, 2 * x, x - 1, backend="eager")
    return out.sum() + hk.attention_statistics(x, 2 * x)[0].sum()

x = torch.randn(1, 2, 3, 4, requires_grad=True)
torch.compile(run, fullgraph=True, backend="aot_eager")(x).backward()
print(hk.explain("gated_attention", x, x, x).backend)
"""
    env = {name: value for name, value in os.environ.items() if name != doctor_record.VARIABLE}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "eager"
