"""README, docs/ and the site: examples run, links lead somewhere, every page is in the navigation."""

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
DOCUMENTS = [README, *sorted(DOCS.rglob("*.md"))]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


# ---------------------------------------------------------------------- examples
def examples(document: Path) -> list[pytest.param]:
    text = document.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    headings = [
        re.findall(r"^#+ (.+)$", text[: block.start()], re.MULTILINE)[-1] for block in blocks
    ]
    return [
        pytest.param(
            document,
            block[1],
            text[: block.start()].count("\n") + 1,
            id=f"{document.stem}-{number}-{heading}",
        )
        for number, (block, heading) in enumerate(zip(blocks, headings, strict=True))
    ]


@pytest.mark.parametrize(
    ("document", "code", "line"),
    [example for document in DOCUMENTS for example in examples(document)],
)
def test_example_of_the_documentation_runs(
    document: Path, code: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The blank lines make a traceback point at the line of the document.
    exec(compile("\n" * line + code, str(document), "exec"), {"__name__": "__main__"})


def test_readme_can_be_read_in_one_sitting() -> None:
    assert len(examples(README)) >= 2
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 160


# ---------------------------------------------------------------------- links
def links(document: Path) -> Iterator[tuple[Path, str]]:
    """Target and anchor of every relative link and image, those of code blocks left out."""
    text = _FENCED.sub("", document.read_text(encoding="utf-8"))
    for found in re.finditer(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = found[1].partition("#")
        if "://" not in path:
            yield (document.parent / path).resolve() if path else document, anchor


def anchors(document: Path) -> set[str]:
    """Of the headings, as mkdocs and GitHub both make them."""
    text = _FENCED.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target, anchor in links(document):
        assert target.is_file(), f"{name(document)} links to {target}"
        assert not anchor or anchor in anchors(target), f"{name(document)} links to #{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS[1:], ids=name)
def test_links_of_pages_stay_in_the_site(document: Path) -> None:
    for target, _ in links(document):
        assert target.is_relative_to(DOCS), f"{name(document)} links to {target}"


# ---------------------------------------------------------------------- site
def test_every_page_is_in_the_navigation() -> None:
    pages = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(set(pages)) == len(pages)
    assert set(pages) == {page.relative_to(DOCS).as_posix() for page in DOCUMENTS[1:]}


def test_reference_names_what_there_is() -> None:
    """Every part with names of its own has its page, and every page names something that is there."""
    entries = {
        entry
        for page in (DOCS / "api").glob("*.md")
        for entry in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    missing = {f"heads_kernels.{each}" for each in hk.__all__} - entries
    assert missing <= {"heads_kernels.integrations"}
    for entry in entries:
        if entry.startswith("heads_kernels.integrations."):  # of libraries that may be absent
            assert find_spec(entry)
            continue
        assert hasattr(hk, entry.removeprefix("heads_kernels."))


def test_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {hk.__version__}\n" in text
