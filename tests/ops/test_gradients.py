"""Gradients of each operand without the others, and of calls with sizes of 0 and 1, from memory that starts as NaN."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils import deterministic

from heads_kernels.testing import Case, CollaborativeCase, EntmaxCase, GatedCase
from tests.ops.calls import NAMES, assert_same_bits, serve
from tests.support.alike import assert_alike

EVERY = list(product(("gated_attention", "collaborative_attention", "entmax_attention"), NAMES))
#: Each kind of gate, beside a dense bias or a table of offsets.
TERMS: dict[str, dict[str, Any]] = {
    "no gate": {"bias": "BHTS"},
    "of heads": {"gate": "H", "bias": "1HTS"},
    "of rows": {"gate": "BHT", "bias": "HTS"},
    "of elements": {"gate": "BHTD", "offsets": 5},
}


@pytest.fixture(autouse=True)
def _memory_starts_as_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(operator: str, sizes: dict[str, int], **terms: Any) -> Case:
    *lengths, D, Dv = (sizes[name] for name in ("B", "H", "T", "S", "D", "Dv"))
    if operator == "entmax_attention":
        return EntmaxCase("made", *lengths, D=D, Dv=Dv, **terms)
    terms["sinks"] = True
    if operator == "gated_attention":
        return GatedCase("made", *lengths, D=D, Dv=Dv, **terms)
    return CollaborativeCase("made", *lengths, Ds=D, Dv=Dv, content_bias=True, **terms)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(("operator", "backend"), EVERY)
def test_one_operand_and_every_other(operator: str, backend: str, terms: str) -> None:
    """A gradient has the same bits whichever others are asked for."""
    sizes = {"B": 1, "H": 2, "T": 3, "S": 5, "D": 8, "Dv": 4}
    inputs = make(operator, sizes, **TERMS[terms]).make()
    serve(operator, backend, **inputs.arguments())
    _, every = inputs.backward(backend)
    for name in every:
        for asked in ({name}, every.keys() - {name}):
            _, grads = inputs.requires_grad(*asked).backward(backend)
            assert grads.keys() == asked
            assert_same_bits(backend, grads, {each: every[each] for each in grads})


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("size", ["B", "H", "T", "S", "D", "Dv"])
@pytest.mark.parametrize(("operator", "backend"), EVERY)
def test_sizes_of_0_and_1(operator: str, backend: str, size: str, number: int) -> None:
    """Every element of every result is written, as by the formula in float64."""
    sizes = {"B": 2, "H": 2, "T": 3, "S": 5, "D": 8, "Dv": 4, size: number}
    for terms in (TERMS["of heads"], TERMS["of elements"]):
        if "offsets" in terms and sizes["H"] == 0:  # a table has heads
            continue
        inputs = make(operator, sizes, scale=0.5, **terms).make()
        serve(operator, backend, **inputs.arguments())
        found, want = inputs.backward(backend), inputs.to(torch.float64).backward("eager")
        assert_alike(found[0].double(), want[0], dtype=torch.float32)
        for name, grad in found[1].items():
            assert_alike(grad.double(), want[1][name], dtype=torch.float32, name=f"d{name}")
