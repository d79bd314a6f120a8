"""The benchmark of split attention: what processes receive is what the formulas say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="prints tables with rich")
pytest.importorskip("torch.distributed.fsdp")

from benchmarks import scaling

pytestmark = pytest.mark.release


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaling.json"
    assert scaling.main(["--smoke", "--out", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [row["what"] for row in found["traffic"]] == list(scaling.CASES)
    assert all(row["measured"] == row["predicted"] > 0 for row in found["traffic"])
    assert "KiB that a process receives" in capsys.readouterr().out
