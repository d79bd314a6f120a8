"""examples/distributed: the losses do not depend on the mesh."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.alike import assert_alike
from tests.support.processes import Processes

pytest.importorskip("torch.distributed.fsdp")

SCRIPT = Path(__file__).parents[2] / "examples" / "distributed" / "train.py"
SIZES = {"layers": 2, "heads": 4, "width": 16, "length": 16, "batch": 4, "steps": 3}
ALONE = (1, 1, 1)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("distributed_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------- in every rank
def check_run(shape: tuple[int, int, int], method: str, folder: str) -> None:
    """The first run, in one process, writes the losses that the others must have."""
    module = example()
    settings = module.Settings(**SIZES, open_heads=5, method=method)
    shown: list[str] = []
    name = "-".join(map(str, (*shape, method)))
    found = module.run_all(shape, settings, f"{folder}/{name}", shown.append)
    found = {name: torch.tensor(each) for name, each in found.items()}
    assert found["training"][-1] < found["training"][0]
    assert_alike(found["stages"][1:], found["stages"][:1].expand(2), name="gated, pruned, loaded")
    assert len(shown) == 3
    file = Path(folder) / "alone.json"
    if shape == ALONE:
        assert found["heads"].sum() == 5
        file.write_text(json.dumps({name: each.tolist() for name, each in found.items()}))
        return
    expected = json.loads(file.read_text())
    for part in ("training", "stages"):
        assert_alike(found[part], torch.tensor(expected[part]), name=part)
    assert (found["heads"] % shape[1] == 0).all()


# ---------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def folder(ranks: Callable[[int], Processes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the losses of one process."""
    made = tmp_path_factory.mktemp("runs")
    ranks(1).run(check_run, ALONE, "all_gather", str(made))
    return made


def split_sequences(*shape: int) -> Any:
    """A mesh of which context parallelism has a part."""
    reason = "PyTorch before 2.13 gathers no weights over dimensions of a mesh in another order"
    return pytest.param(shape, marks=pytest.mark.skipif(torch.__version__ < "2.13", reason=reason))


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), split_sequences(1, 1, 2)])
def test_two_processes(
    shape: tuple[int, int, int], folder: Path, ranks: Callable[[int], Processes]
) -> None:
    ranks(2).run(check_run, shape, "all_gather", str(folder))


@pytest.mark.check
@pytest.mark.parametrize("method", ["all_gather", "ring"])
@pytest.mark.parametrize("shape", [(2, 2, 1), split_sequences(2, 1, 2), split_sequences(1, 2, 2)])
def test_four_processes(
    shape: tuple[int, int, int], method: str, folder: Path, ranks: Callable[[int], Processes]
) -> None:
    ranks(4).run(check_run, shape, method, str(folder))


@pytest.mark.check
def test_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", str(SCRIPT), "--mesh", "1", "1", "2", "--steps", "2"]
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 3
