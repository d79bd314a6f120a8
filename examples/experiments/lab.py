"""What every experiment has: a folder, seeds, a progress bar, and a file of results that grows run by run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import Bar
from torch import nn

import heads_kernels as hk
from benchmarks.results import this_machine, write_text

Run = dict[str, Any]
Steps = Iterable[tuple[int, float]]


class OtherSettings(Exception):
    """A file of results was made with other settings; the message names both."""


@dataclass(frozen=True)
class Lab:
    """Where and how the experiments run.

    Attributes:
        folder: of results, figures and trained models.
        seeds: each run is made with each of them.
        quick: tiny sizes, whose results mean nothing.
        bar: shows where a run is.
    """

    folder: Path
    seeds: range
    quick: bool
    bar: Bar

    def results(self, name: str, settings: Any) -> Results:
        """The results of the experiment `name`, including those of earlier runs; `settings` is a dataclass."""
        return Results(self.folder / f"{name}.json", asdict(settings))

    def trained(self, name: str, model: nn.Module, steps: int, learn: Callable[[], Steps]) -> None:
        """Train a model by `learn`, which yields steps and losses: once, then it is read from `folder`."""
        file = self.folder / f"{name}.safetensors"
        if file.exists():
            hk.heads.load(model, file)
        else:
            self.bar.follow(f"trained, {name}", steps, learn())
            hk.heads.save(model, file)


class Results:
    """The runs of one experiment by name, in a file that is replaced after each of them.

    Args:
        path: of the file; an existing file has the finished runs.
        settings: what the runs depend on besides their names and seeds: plain data.

    Raises:
        OtherSettings: the file was made with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.runs: dict[str, Run] = {}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["settings"] != self.settings:
                raise OtherSettings(
                    f"{path} was made with {found['settings']}, this is {self.settings}; "
                    "remove it or pass another --out"
                )
            self.runs = found["runs"]

    def run(self, name: str, compute: Callable[[], Run]) -> Run:
        """The result of `compute`, with its seconds and the machine; a run that is in the file is not repeated."""
        if name not in self.runs:
            start = time.perf_counter()
            found = rounded(compute())
            seconds = round(time.perf_counter() - start, 1)
            self.runs[name] = {**found, "seconds": seconds, "machine": asdict(this_machine())}
            self._write()
        return self.runs[name]

    def _write(self) -> None:
        """Write one run per line."""
        runs = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in self.runs.items())
        settings = json.dumps(self.settings)
        write_text(self.path, f'{{"settings": {settings},\n"runs": {{\n{runs}\n}}}}\n')


def rounded(value: Any) -> Any:
    """Plain data with floats rounded to six digits, in the types that JSON is read back as."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return value
