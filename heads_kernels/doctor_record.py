"""What `python -m heads_kernels doctor --save` found, kept for the machine that it was found on.

One file, `$XDG_CACHE_HOME/heads_kernels/doctor.json` (without that variable in `~/.cache`), has an entry for each
device and environment. `dispatch` reads it when it first chooses a backend for a device: backends that failed here are
left out, and verified ones come first, the fastest before the others. A backend that failed in one case is left out
for that operator altogether: a kernel that is wrong there cannot be trusted elsewhere. Without an entry the order is
that of `backends.BACKENDS`.
HEADS_KERNELS_DOCTOR=0 ignores the file.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from heads_kernels.build_info import build_info

VARIABLE: Final = "HEADS_KERNELS_DOCTOR"
COMMAND: Final = "python -m heads_kernels doctor --save"
_FORMAT: Final = 1

#: Whether this process reads the record; decided once.
IGNORED: Final = os.environ.get(VARIABLE) == "0"


class Found(NamedTuple):
    """What was found about one operator on one device, and where that is written."""

    verified: tuple[str, ...] = ()  # names of backends, the fastest first
    failed: tuple[tuple[str, str], ...] = ()  # names of backends, and how they failed
    source: str = f"that of the table; `{COMMAND}` has kept none for this device"


NOTHING: Final = Found()

_READ: Final[dict[torch.device, dict[str, Found]]] = {}


def found(operator: str, device: torch.device) -> Found:
    """What the record says of an operator on a device; `NOTHING` where it says nothing."""
    operators = _READ.get(device)
    if operators is None:
        if IGNORED or not (device.type == "cpu" or _is_ready(device)):
            return NOTHING
        operators = _READ[device] = _read(device)
    return operators.get(operator, NOTHING)


# As `torch.compiler.assume_constant_result` does, which loads Dynamo: two seconds of every import of the package.
found._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_ready(device: torch.device) -> bool:
    """Whether asking for a GPU's name starts nothing: tensors that are there by name only may be first."""
    return device.type == "cuda" and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------- the machine
def environment(device: torch.device) -> dict[str, Any]:
    """What an entry holds for: with another of these, what was found may be different."""
    built = build_info()
    named: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "heads_kernels": f"{built.get('version')} {(built.get('commit') or '')[:12]}".strip(),
    }
    if device.type == "cuda":
        return {**named, "driver": driver_version()}
    simulated = [name for name in ("HEADS_KERNELS_EMULATE_CUDA", "TRITON_INTERPRET")
                 if os.environ.get(name, "0") not in ("", "0")]  # fmt: skip
    level = torch.backends.cpu.get_cpu_capability()
    return {**named, "level": level, "simulated": simulated}


def device_name(device: torch.device) -> str:
    """A GPU's name, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@functools.cache
def cpu_name() -> str:
    """As Linux has it, else the machine's architecture."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
                if not line.strip():  # behind the first core
                    break
    except OSError:
        pass
    return os.uname().machine


@functools.cache
def driver_version() -> str:
    """Of NVIDIA's kernel module where Linux says it, else the version of CUDA that the driver serves."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    if version:
        return version[1]
    if torch.version.hip:
        return f"HIP {torch.version.hip}"
    serves = getattr(torch._C, "_cuda_getDriverVersion", None)  # in builds with CUDA
    return f"CUDA {serves()}" if serves and torch.cuda.is_available() else "none"


@functools.cache
def triton_version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:  # not there, or a build by another name
        return None


# ---------------------------------------------------------------------- the file
def path() -> Path:
    """Where the record is, whether or not there is one."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of these folders says that a relative path is to be ignored.
    folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return folder / "heads_kernels" / "doctor.json"


def save(device: torch.device, operators: dict[str, Found]) -> Path:
    """Keep what was found on `device`, in the place of an entry of the same environment; raises `OSError`."""
    file, here = path(), environment(device)
    try:
        kept = [entry for entry in _entries(file) if entry["environment"] != here]
    except (FileNotFoundError, ValueError):
        kept = []  # no file, or one that is of no use
    written = {
        name: {"verified": found.verified, "failed": dict(found.failed)}
        for name, found in operators.items()
    }
    entry = {"environment": here, "date": str(date.today()), "operators": written}
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps({"format": _FORMAT, "entries": [*kept, entry]}, indent=1))
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
    return file


def _read(device: torch.device) -> dict[str, Found]:
    """The entry of this machine by operator; empty, with a warning, where the file has none that is of use."""
    try:
        file = path()
        entries = _entries(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: there is no home
        _warn(f"can't be read: {error}")
        return {}
    here = environment(device)
    stale = None
    for entry in entries:
        there = entry["environment"]
        if there == here:
            source = f"found on this machine on {entry['date']} ({file})"
            return {
                name: Found(tuple(each["verified"]), tuple(each["failed"].items()), source)
                for name, each in entry["operators"].items()
            }
        if there["device"] == here["device"]:
            stale = there
    if stale is not None:
        words = [f"{k} is {v}, was {stale.get(k)}" for k, v in here.items() if v != stale.get(k)]
        _warn(f"was made in another environment ({'; '.join(words)})")
    return {}


def _entries(file: Path) -> list[dict[str, Any]]:
    """What is in the file; raises `ValueError` where it isn't what `save` writes."""
    record = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise ValueError(f"it is no record of format {_FORMAT}")
    entries = record.get("entries")
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ValueError("its entries are not what is written there")
    return entries


def _is_entry(entry: Any) -> bool:
    try:
        operators = entry["operators"].values()
        verified = [name for each in operators for name in each["verified"]]
        failed = [word for each in operators for pair in each["failed"].items() for word in pair]
        words = [*verified, *failed, entry["date"], entry["environment"]["device"]]
    except (TypeError, KeyError, AttributeError):
        return False
    return all(type(word) is str for word in words)


def _warn(why: str) -> None:
    warnings.warn(
        f"{path()} {why}. It is ignored; `{COMMAND}` makes it anew, {VARIABLE}=0 ignores it without this warning.",
        stacklevel=2,
    )
