"""Decoding rows of the benchmark: which there are, what their candidates compute, and the bytes they state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="needs the extra [bench]")

from benchmarks import decoding, results, run
from benchmarks.report import Report, make_console
from tests.support.alike import assert_alike

pytestmark = pytest.mark.release

CASES = decoding.cases("smoke")


def test_full_form_has_every_shape() -> None:
    """All but the one whose cache is too large: float32, 64 sequences of 4096 tokens, 12 heads of 128."""
    found = decoding.cases("full")
    assert len(found) == len(set(found)) == 2 * 2 * 3 * 2 * 2 - 1
    assert max(case.cache_bytes for case in found) <= decoding.MOST_BYTES
    assert decoding.Case(64, 12, 12, 4096, 128, torch.float32) not in found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_candidates_of_a_layout_agree(case: decoding.Case) -> None:
    cache = decoding.Cache(replace(case, dtype=torch.float32))
    assert decoding.check(cache) == []
    sdpa = cache.sdpa()
    for name, inputs in cache.inputs().items():
        if not name.endswith("collaborative"):
            assert_alike(inputs.call(), sdpa[name.replace("ours", "SDPA")]())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_those_of_the_operands(case: decoding.Case) -> None:
    cache = decoding.Cache(case)
    for name, inputs in cache.inputs().items():
        size = inputs.tensors["key"].nbytes + inputs.tensors["value"].nbytes
        shared = name.endswith("collaborative")
        each = case.shared_token_bytes if shared else case.token_bytes
        assert size == case.B * case.S * each
    rows = decoding.measure(cache, 0.0, 1)
    assert [row.candidate for row in rows] == [*cache.inputs(), *cache.sdpa()]
    assert max(row.times_sdpa for row in rows if row.candidate.startswith("SDPA")) == 1.0


def test_failed_check_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decoding, "check", lambda cache: [f"decoding, {cache.case}: wrong"])
    monkeypatch.setattr(decoding, "measure", None)
    settings = run.Settings("smoke", torch.float32, "decoding")
    found = results.Results(results.this_machine(), "smoke", "float32", [])
    steps = []
    with (tmp_path / "report").open("w") as file:
        run.run(settings, [], Report(found, make_console(file)), steps.append)
    assert len(found.failures) == len(steps) == len(CASES) == run.steps(settings, [])
    assert found.decoding == []
