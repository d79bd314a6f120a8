"""What every stage knows: the device, the form, and which backends are under test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from heads_kernels.dispatch import Backend, BackendName, choose
from heads_kernels.ops import (
    attention_statistics,
    collaborative_attention,
    entmax_attention,
    gated_attention,
)
from heads_kernels.testing import Inputs

TABLES: Final[dict[str, Sequence[Backend]]] = {
    "gated_attention": gated_attention.BACKENDS,
    "collaborative_attention": collaborative_attention.BACKENDS,
    "entmax_attention": entmax_attention.BACKENDS,
    "attention_statistics": attention_statistics.BACKENDS,
}
#: Operators with a gradient.
DIFFERENTIABLE: Final = ("gated_attention", "collaborative_attention", "entmax_attention")

#: What an item found, as plain data. "verdict" is one of the words below, "detail" says more.
Row = dict[str, Any]
Items = dict[str, Callable[[], Row]]

PASSED: Final = "passed"
FAILED: Final = "failed"  # a wrong result, or an exception
CRASHED: Final = "crashed"  # the process died
TIMED_OUT: Final = "timed out"
REFUSED: Final = "refused"  # the backend says that it cannot serve the call
SKIPPED: Final = "skipped"  # this machine lacks what the item needs
LEFT_OUT: Final = "left out"  # the budget was used up
#: Verdicts that make the suite fail.
BAD: Final = (FAILED, CRASHED, TIMED_OUT)


class Refused(Exception):
    """The backend cannot serve the call; the message is its reasons."""


class Skipped(Exception):
    """This machine lacks what the item needs; the message says what."""


@dataclass(frozen=True)
class Settings:
    """`tiny` runs everything at toy sizes; on the CPU that is the only form."""

    device: str = "cuda"
    tiny: bool = False

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def backends(self, operator: str) -> list[BackendName]:
        """Every row of the table but eager, and on a GPU but cpu: a new row is tested without an edit."""
        others = ("cpu", "eager") if self.on_gpu else ("eager",)
        return [row.name for row in TABLES[operator] if row.name not in others]

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """In the order of need. Triton's interpreter multiplies bfloat16 wrongly, so tiny has float32."""
        if self.tiny and not self.on_gpu:
            return (torch.float32,)
        return (torch.bfloat16, torch.float32, torch.float16)


def must_serve(inputs: Inputs, backend: str) -> None:
    """Raise `Refused` with the reasons where `backend` cannot serve this call."""
    choice = choose(TABLES[inputs.operator], inputs.problem(), backend)
    if choice.backend is None:
        raise Refused("; ".join(choice.refusals[backend]))


def default_backend(inputs: Inputs) -> str | None:
    """What the package runs where nobody names a backend."""
    return choose(TABLES[inputs.operator], inputs.problem()).backend


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def slug(device_name: str) -> str:
    """ "NVIDIA H200" is "nvidia-h200": the name of its folders and files."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
