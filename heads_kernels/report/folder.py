"""The folder of a report: each reading a whole JSON and CSV file, good for the model and text that it was made from."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What a stage finds: values that JSON can hold, with a list of rows for the CSV file under "table".
Found = dict[str, Any]


@dataclass(frozen=True)
class Folder:
    """Where the files of a report lie."""

    path: Path

    def read(self, stage: str, fingerprint: str) -> Found | None:
        """What the stage found, if its file is there and was made from the same."""
        try:
            text = (self.path / f"{stage}.json").read_text(encoding="utf-8")
            found = json.loads(text)
        except (OSError, ValueError):
            return None
        same = isinstance(found, dict) and found.get("fingerprint") == fingerprint
        return found if same else None

    def write(self, stage: str, found: Mapping[str, Any], fingerprint: str) -> None:
        """`<stage>.csv`, then `<stage>.json`, which says that both are there."""
        self.write_whole(f"{stage}.csv", as_csv(found["table"]).encode())
        whole = {"stage": stage, "fingerprint": fingerprint, **found}
        text = json.dumps(whole, allow_nan=False, ensure_ascii=False)
        self.write_whole(f"{stage}.json", (text + "\n").encode())

    def write_whole(self, name: str, content: bytes) -> None:
        """Write a file beside its place, then rename it: what was there stays whole if writing is interrupted."""
        handle, beside = tempfile.mkstemp(prefix=f".{name}.", dir=self.path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(beside, 0o644)  # mkstemp makes it 0600
            os.replace(beside, self.path / name)
        finally:
            Path(beside).unlink(missing_ok=True)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line of names, then a line for each row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
