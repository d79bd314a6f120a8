"""examples/deployment: pruned models in a C++ program, which has no Python, give Python's outputs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.examples import EXAMPLES, example

COMPILER = shutil.which("g++")

try:
    LIBRARY = hk.integrations.cpp.library_path()
except FileNotFoundError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)
pytestmark = [
    pytest.mark.release,
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]

MODELS = ("encoder", "bert")  # of two layers each


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What CMakeLists.txt builds."""
    torch_folder = Path(torch.__file__).parent
    built = tmp_path_factory.mktemp("deployment") / "run"
    command: list[Any] = [COMPILER, "-std=c++20", EXAMPLES / "deployment" / "run.cpp", "-o", built]
    command += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-Wl,--no-as-needed"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", LIBRARY]
    command += [f"-Wl,-rpath,{folder}" for folder in (torch_folder / "lib", LIBRARY.parent)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return built


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_python(name: str, program: Path, tmp_path: Path) -> None:
    if name == "bert":
        pytest.importorskip("transformers")
    with example("deployment/export.py") as module:
        model = module.pruned(name)
        exported = module.exported(model)
    called = [str(node.target).split(".") for node in exported.graph.nodes]
    assert [words[1] for words in called if words[0] == "heads_kernels"] == ["attention"] * 2
    package = tmp_path / "model.pt2"
    torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
    for sizes in ((5, 33), (1, 128), (3, 2)):
        inputs = module.batch(*sizes)
        torch.save(list(inputs.values()), tmp_path / "inputs.pt")
        files = [package, tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
        run = subprocess.run([program, *files], capture_output=True, text=True, check=False, env={})
        assert run.returncode == 0, run.stderr
        with torch.no_grad():
            assert_alike(torch.load(files[-1])[0], model(**inputs))
