"""README and docs/: examples run, links to files of the repository exist, and the reference is complete.

`make docs` finds broken links and anchors in docs/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import heads_kernels as hk

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def examples(document: Path) -> Iterator[pytest.param]:
    """Code, and its line in the document."""
    text = document.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text[: block.start()].count("\n") + 1
        yield pytest.param(document, block[1], line, id=f"{document.stem}-{line}")


@pytest.mark.parametrize(
    ("document", "code", "line"),
    [example for document in (README, *sorted(DOCS.rglob("*.md"))) for example in examples(document)],
)  # fmt: skip
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
