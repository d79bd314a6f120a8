"""What a run was asked for: form, device, dtype, names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal

import torch

Form = Literal["smoke", "quick", "full"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Effort:
    """Seconds for all candidates of one measurement, and the least samples of each."""

    budget_s: float
    least: int


#: Quick: 9 samples or more make a median that a few disturbed ones do not move, and the seconds keep the whole run
#: under 4 minutes on 2 cores. On a GPU a sample is a single call and times scatter little.
_EFFORT: Final = {
    "cpu": {"smoke": Effort(0.02, 2), "quick": Effort(2.0, 9), "full": Effort(1.5, 9)},
    "cuda": {"smoke": Effort(0.01, 1), "quick": Effort(0.3, 7), "full": Effort(0.3, 7)},
}


@dataclass(frozen=True)
class Settings:
    """`smoke` has toy sizes; with device "cuda" it runs without a GPU too, where the kernels are simulated.

    `only` is a part of the names that are wanted, or a pattern with * and ?.
    """

    form: Form = "quick"
    device: Device = "cpu"
    dtype: torch.dtype = torch.float32
    only: str | None = None
    floor: bool = False

    @property
    def place(self) -> torch.device:
        """Of the tensors."""
        on_gpu = self.device == "cuda" and torch.cuda.is_available()
        return torch.device("cuda" if on_gpu else "cpu")

    def wants(self, name: str) -> bool:
        return self.only is None or fnmatchcase(name, f"*{self.only}*")

    def effort(self) -> Effort:
        return _EFFORT[self.device][self.form]

    def threads(self, own: int) -> list[int | None]:
        """The numbers of CPU threads to measure on; None on a GPU."""
        if self.device == "cuda":
            return [None]
        return [own, 1] if self.form == "full" and own > 1 else [own]


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def on_threads(threads: int | None) -> Iterator[None]:
    """In this block PyTorch has so many threads; None: as many as before."""
    own = torch.get_num_threads()
    torch.set_num_threads(threads or own)
    try:
        yield
    finally:
        torch.set_num_threads(own)
