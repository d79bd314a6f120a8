"""What a run of the suite found so far, and its file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import goals
from benchmarks.gpu.settings import BAD, PASSED, REFUSED, Row
from benchmarks.gpu.stages import CHECKS, STAGES
from benchmarks.results import Outcome, write_whole

FILE = "results.json"


@dataclass
class Record:
    """`stages` holds the rows of every stage that ran, `seconds` what it took."""

    form: str
    device: str
    commit: str
    minutes: float
    stages: dict[str, list[Row]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    def rows(self, stage: str) -> list[Row]:
        return self.stages.get(stage, [])

    def machine(self) -> dict[str, Any]:
        """What `machine` found, in one."""
        found: dict[str, Any] = {}
        for row in self.rows("machine"):
            found.update({k: v for k, v in row.items() if k not in ("name", "verdict", "seconds")})
        return found

    def counts(self, stage: str) -> Counter[str]:
        return Counter(row["verdict"] for row in self.rows(stage))

    def failures(self) -> list[str]:
        """Items that went wrong, and backends that refused whatever a stage asked of them."""
        bad = [
            f"{stage} {row['name']}: {row['verdict']}: {row.get('detail', '')}"
            for stage in self.stages
            for row in self.rows(stage)
            if row["verdict"] in BAD
        ]
        for (operator, backend), found in by_backend(self.stages).items():
            if found[REFUSED] and not found[PASSED]:
                bad.append(f"{operator} on {backend}: every call was refused")
        return bad

    def goals(self) -> list[Outcome]:
        return goals(self.rows("timing"), self.rows("memory"))

    def to_json(self) -> dict[str, Any]:
        counts = {stage: dict(self.counts(stage)) for stage in self.stages}
        return {
            **{k: v for k, v in asdict(self).items() if k != "stages"},
            "machine": self.machine(),
            "counts": counts,
            "failures": self.failures(),
            "goals": [asdict(outcome) for outcome in self.goals()],
            "stages": self.stages,
        }

    def write(self, folder: Path) -> Path:
        path = folder / FILE
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")
        return path


def by_backend(stages: dict[str, list[Row]]) -> dict[tuple[str, str], Counter[str]]:
    """Verdicts of all checks by (operator, backend), in the order in which they were first met."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for stage in (name for name in STAGES if name in CHECKS):
        for row in stages.get(stage, []):
            operator, *_, backend = row["name"].split("/")
            found.setdefault((operator, backend), Counter())[row["verdict"]] += 1
    return found
