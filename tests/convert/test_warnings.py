"""`collaborate` warns of what was hardly wanted: more FLOPs, and more features than there are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import heads_kernels as hk
from heads_kernels.convert import break_even, collaborate
from tests.convert.model_state import state

E, H = 32, 4


def model(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(hk.nn.GatedMultiheadAttention(E, H, bias=False) for _ in range(layers)))


def quiet(*arguments: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return collaborate(*arguments, progress=False, **options)


def test_more_flops_at_the_length() -> None:
    """From about the break-even length on."""
    border = round(break_even(E, E, 20, H))
    quiet(model(), [20, 20], length=border // 2)
    message = (
        rf"At T = {2 * border} 2 of 2 converted layers have more FLOPs than before .* "
        r"fewer below about T = 16, 16\. For longer inputs use .*method='ragged'"
    )
    with pytest.warns(UserWarning, match=message) as reported:
        collaborate(model(), [20, 20], length=2 * border, progress=False)
    assert reported[0].filename == __file__


def test_ragged_is_not_sent_to_ragged() -> None:
    with pytest.warns(UserWarning, match="more FLOPs") as reported:
        collaborate(model(), [28, 28], method="ragged", length=10000, progress=False)
    assert "method=" not in str(reported[0].message)


@pytest.mark.parametrize("dim", [33, [33, 32], {1: 40}, {"0": 1000}])
def test_more_features_than_the_rank(dim: Any) -> None:
    with pytest.warns(
        UserWarning, match=r"dim is .*more than the rank .*: layer \d .* has 32\. A layer"
    ):
        found = collaborate(model(), dim, method="ragged", length=1, progress=False)
    assert max(found.dims) == 32


@pytest.mark.parametrize("asked", [{"dim": 32}, {"dim": [32, 4]}, {"energy": 1.0}, {"error": 0.5}])
@pytest.mark.filterwarnings("error:.*rank")
def test_the_rank_itself_is_fine(asked: dict[str, Any]) -> None:
    collaborate(model(), **asked, method="ragged", progress=False)


def test_a_warning_that_is_an_error_changes_nothing() -> None:
    made = model()
    before = state(made)
    with pytest.raises(UserWarning, match="more FLOPs"):
        quiet(made, 24, length=1000)
    assert state(made) == before
