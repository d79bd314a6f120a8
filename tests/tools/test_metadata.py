"""What the repository declares: version, data, public names, targets of make, notes of a release, no addresses. Its
documents: examples run, links to files of the repository exist, the reference is complete; `make docs` finds broken
links and anchors in docs/."""

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from setuptools import Distribution

import heads_kernels as hk
from csrc import hub
from tests.support.alike import assert_alike
from tests.support.commands import ROOT, python


def test_one_version() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert hk.__version__ == declared[1] == importlib.metadata.version("heads_kernels")
    assert f"## {declared[1]}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {declared[1]}\n" in (ROOT / "CITATION.cff").read_text()
    run = python("-m", "heads_kernels", "--version")
    assert run.stdout == f"heads_kernels {hk.__version__}\n"


def test_data_and_the_command_are_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    project = Distribution({"src_root": str(ROOT)})
    project.parse_config_files(["pyproject.toml"])
    package = ROOT / "heads_kernels"
    data = {path for glob in project.package_data["heads_kernels"] for path in package.glob(glob)}
    assert {package / "py.typed", package / "report" / "report.html.j2"} <= data
    built = {".py", ".pyc", ".so"}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in built}
    assert files - {package / "build.json"} == data
    (declared,) = project.entry_points["console_scripts"]
    name, _, target = declared.partition(" = ")
    assert importlib.metadata.EntryPoint(name, target, "console_scripts").load()([]) == 0


def test_the_tour_runs_and_names_what_exists() -> None:
    """`help(heads_kernels)`: at most 40 lines, whose examples run."""
    tour = hk.__doc__
    assert len(tour.splitlines()) <= 40
    for name in re.findall(r"^    (\w+) {2,}\S", tour, re.MULTILINE):
        assert name in hk.__all__
    layer = torch.nn.TransformerEncoderLayer(32, 8, 16, batch_first=True)
    query, key, value = torch.randn(3, 2, 8, 5, 4)
    names = {"hk": hk, "query": query, "key": key, "value": value, "gate": torch.ones(8)}
    names |= {"model": torch.nn.TransformerEncoder(layer, 2), "batches": [torch.randn(2, 5, 32)]}
    names["loss"] = lambda model, batch: model(batch).square().sum()
    exec("\n".join(re.findall(r"^    (\w+ = .+|hk\..+)$", tour, re.MULTILINE)), names)
    assert sum(one.num_heads for one in hk.heads.attention_layers(names["model"])) == 16 - 6


def test_public_names_exist() -> None:
    assert sorted(hk.__all__) == hk.__all__
    for part in (hk, hk.analysis, hk.convert, hk.heads, hk.nn, hk.testing):
        assert len(set(part.__all__)) == len(part.__all__)
        assert all(hasattr(part, name) for name in part.__all__)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_lists_its_targets() -> None:
    command = ["make", "--no-print-directory"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"^  (\S+) {2,}\S", run.stdout, re.MULTILINE) == phony[1].split()


def test_no_address_of_an_index_or_machine() -> None:
    """Where packages come from is the business of the machine that installs them."""
    for name in ("pyproject.toml", "constraints.txt", "Makefile", "setup.py", "csrc/build.py", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "://" not in text, name
        assert "index-url" not in text, name


@pytest.mark.skipif(shutil.which("awk") is None, reason="needs awk")
def test_notes_of_a_release(tmp_path: Path) -> None:
    """The section of one version, without its heading."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    command = re.search(r"^ +(awk .+)$", text, re.MULTILINE)

    def notes(version: str) -> list[str]:
        environment = {"GITHUB_REF_NAME": f"v{version}", "PATH": "/bin:/usr/bin"}
        subprocess.run(["bash", "-c", command[1]], cwd=tmp_path, env=environment, check=True)
        return (tmp_path / "notes.md").read_text(encoding="utf-8").splitlines()

    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Log\n\n## 1.2.0 - today\n- a\n### Fixed\n- b\n\n## 1.1.0\n- c\n")
    assert notes("1.2.0") == ["- a", "### Fixed", "- b", ""]
    assert notes("1.1.0") == ["- c"]
    assert notes("1.2") == []
    shutil.copy(ROOT / "CHANGELOG.md", changelog)
    assert len(notes(hk.__version__)) > 2


def test_a_kernel_of_the_hub_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("kernels")  # which a development environment has
    monkeypatch.chdir(ROOT)
    hub.write(tmp_path, hk.__version__, "0123456789")
    kernel = kernels.get_local_kernel(tmp_path, backend="cpu")
    assert kernel.__name__ == "_heads_kernels_cpu_0123456"
    assert set(kernel.__all__) < set(hk.__all__)
    assert kernel.Mask is not hk.Mask

    query, key, value = torch.randn(3, 2, 4, 16, 8, requires_grad=True)
    gate = torch.tensor([1.0, 0.0, 0.5, 2.0])
    results = []
    for package in (hk, kernel):
        mask = package.Mask(key_lengths=torch.tensor([16, 9]))
        out = package.gated_attention(query, key, value, mask, gate=gate, backend="eager")
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    assert torch.ops._heads_kernels_cpu_0123456.attention != torch.ops.heads_kernels.attention
    assert_alike(*results)


# ---------------------------------------------------------------------- README and docs/
DOCS = ROOT / "docs"


def examples(document: Path) -> Iterator[pytest.param]:
    """Code, and its line in the document."""
    text = document.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text[: block.start()].count("\n") + 1
        yield pytest.param(document, block[1], line, id=f"{document.stem}-{line}")


@pytest.mark.parametrize(
    ("document", "code", "line"),
    [example for document in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) for example in examples(document)],
)
def test_example_runs(document: Path, code: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The blank lines make a traceback point at the line of the document.
    exec(compile("\n" * line + code, str(document), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_repository(name: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_navigation_is_complete() -> None:
    listed = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_reference_is_complete() -> None:
    """Every public name has its entry, and every entry names something that exists."""
    entries = {
        entry
        for page in (DOCS / "api").glob("*.md")
        for entry in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    missing = {f"heads_kernels.{each}" for each in hk.__all__} - entries
    assert missing <= {"heads_kernels.integrations"}
    for entry in entries:
        if entry.startswith("heads_kernels.integrations."):  # their libraries may be absent
            assert find_spec(entry)
        else:
            assert hasattr(hk, entry.removeprefix("heads_kernels."))
