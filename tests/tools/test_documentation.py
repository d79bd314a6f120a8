"""The examples of README and docs/ run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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


def test_readme_has_examples() -> None:
    assert len(examples(DOCUMENTS[0])) >= 6
