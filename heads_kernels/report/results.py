"""The results of the stages: their files, tables by layer, and heads and numbers as text."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The result of a stage: values that JSON can hold, with the rows of its CSV file under "table".
Found = dict[str, Any]
#: The results of several stages, by name.
Findings = Mapping[str, Found]


@dataclass(frozen=True)
class Folder:
    """The folder of a report: `<stage>.json` and `<stage>.csv` of each stage, and the page."""

    path: Path

    def read(self, stage: str, fingerprint: str) -> Found | None:
        """The result of a stage, if its file exists and was made from the same model and text."""
        found = self._load(stage)
        return found if found and found["fingerprint"] == fingerprint else None

    def write(self, stage: str, found: Mapping[str, Any], fingerprint: str) -> None:
        """Write `<stage>.csv`, then `<stage>.json`, whose presence means that both are complete."""
        self.write_whole(f"{stage}.csv", as_csv(found["table"]).encode())
        whole = {"stage": stage, "fingerprint": fingerprint, **found}
        text = json.dumps(whole, allow_nan=False, ensure_ascii=False)
        self.write_whole(f"{stage}.json", (text + "\n").encode())

    def remove_stale(self, fingerprint: Callable[[str], str], stages: Sequence[str]) -> list[str]:
        """Remove results of these stages that were made from another model or text; returns the stages removed."""
        stale = [
            stage
            for stage in stages
            if (found := self._load(stage)) and found["fingerprint"] != fingerprint(stage)
        ]
        for stage in stale:
            for kind in ("json", "csv"):
                (self.path / f"{stage}.{kind}").unlink(missing_ok=True)
        return stale

    def write_whole(self, name: str, content: bytes) -> None:
        """Write a temporary file and rename it, so that an interruption leaves the previous file whole."""
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=self.path) as folder:
            beside = Path(folder) / name  # with the permissions of any new file
            beside.write_bytes(content)
            beside.replace(self.path / name)

    def _load(self, stage: str) -> Found | None:
        """The file of a stage as `write` left it; None if there is none, or it is another program's."""
        try:
            found = json.loads((self.path / f"{stage}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        ours = isinstance(found, dict) and found.get("stage") == stage and "fingerprint" in found
        return found if ours else None


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV, with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def by_layer(found: Findings, stage: str, column: str, factor: float = 1.0) -> list[list[float]]:
    """A column of a table that has a row for each head, as `[L][H]`, times a factor."""
    table = found[stage]["table"]
    layers = 1 + max(row["layer"] for row in [*table, *found["model"]["table"]])
    values: list[list[float]] = [[] for _ in range(layers)]
    for row in table:
        values[row["layer"]].append(row[column] * factor)
    return values


# ---------------------------------------------------------------------- as text
def top_row(rows: Iterable[dict[str, Any]], column: str) -> dict[str, Any]:
    """The row with the largest value of a column."""
    return max(rows, key=lambda row: row[column])


def head_name(row: dict[str, Any]) -> str:
    """A head as layer:head."""
    return f"{row['layer']}:{row['head']}"


def head_names(rows: Iterable[dict[str, Any]]) -> str:
    return ", ".join(map(head_name, rows))


def span(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
