"""examples/distributed: the losses do not depend on the mesh."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.alike import assert_alike
from tests.support.commands import python
from tests.support.examples import EXAMPLES, example
from tests.support.processes import Processes

ALONE = (1, 1, 1)


def check_run(shape: tuple[int, int, int], method: str, folder: str) -> None:
    """The first run, in one process, writes the losses that the others must have."""
    shown: list[str] = []
    name = "-".join(map(str, (*shape, method)))
    with example("distributed/train.py") as module:
        sizes = {"layers": 2, "heads": 4, "width": 16, "length": 16, "batch": 4, "steps": 3, "open_heads": 5}
        settings = module.Settings(**sizes, method=method)
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


@pytest.fixture(scope="module")
def folder(ranks: Callable[[int], Processes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the losses of one process."""
    made = tmp_path_factory.mktemp("runs")
    ranks(1).run(check_run, ALONE, "all_gather", str(made))
    return made


#: Meshes and methods; `make test` runs two, of two processes for heads and for sequences.
QUICK = [((1, 2, 1), "all_gather"), ((1, 1, 2), "ring")]
MESHES = [((2, 1, 1), "all_gather"), ((2, 2, 1), "all_gather"), ((2, 1, 2), "all_gather"), ((1, 2, 2), "ring")]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="gathers no weights over swapped dimensions")
@pytest.mark.parametrize(
    ("shape", "method"), [*QUICK, *(pytest.param(*mesh, marks=pytest.mark.check) for mesh in MESHES)]
)
def test_any_mesh(shape: tuple[int, int, int], method: str, folder: Path, ranks: Callable[[int], Processes]) -> None:
    ranks(torch.Size(shape).numel()).run(check_run, shape, method, str(folder))


@pytest.mark.check
def test_command(tmp_path: Path) -> None:
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--mesh", "1", "1", "2", "--steps", "2")
    script = EXAMPLES / "distributed" / "train.py"
    done = python(*run, script, *options, cwd=tmp_path, timeout=120, PYTHONPATH=str(EXAMPLES.parent))
    assert done.stdout.count("loss") == 3
