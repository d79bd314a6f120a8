"""Score terms and dense masks where the CUDA kernels go other ways than the named cases take them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from heads_kernels.testing import Inputs, check
from heads_kernels.testing.accuracy import compare, reference
from heads_kernels.testing.case import Case, CollaborativeCase, GatedCase
from heads_kernels.testing.masks import Sizes
from tests.ops.calls import assert_same_bits

pytestmark = pytest.mark.parametrize("backend", ["cuda"])


def both(name: str, *sizes: int, **changes: Any) -> list[Case]:
    return [
        GatedCase(name, *sizes, D=16, Dv=24, **changes),
        CollaborativeCase(name, *sizes, Ds=32, Dv=24, content_bias=True, **changes),
    ]


def hold(case: Case, backend: str, dtype: torch.dtype = torch.float32) -> None:
    report = check(case, dtype, backend)
    assert report.ok, str(report)


@pytest.mark.parametrize("letters", [*product("B1", "H1", "T1", "S1")], ids="".join)
def test_every_way_a_bias_broadcasts(letters: tuple[str, ...], backend: str) -> None:
    """Sums over batches, heads, rows and keys; one block of threads or several have them."""
    for case in both("broadcast", 3, 2, 70, 67, bias="".join(letters), gate="BHT"):
        hold(case, backend)


@pytest.mark.parametrize("T", [1, 63, 64, 65])
@pytest.mark.parametrize("S", [1, 64, 130])
def test_diagonals_at_the_borders_of_tiles(T: int, S: int, backend: str) -> None:
    for case in both("diagonals", 2, 2, T, S, offsets=T + S - 1, gate="H", closed=0.5):
        hold(case, backend)


def blocks(sizes: Sizes, device: torch.device) -> Tensor:
    """`[1, H, T, S]` of 64 by 64: of a head, blocks on one diagonal are visible; row 3 of each sees nothing."""
    h, i, j = torch.meshgrid(*(torch.arange(n) for n in (sizes.H, sizes.T, sizes.S)), indexing="ij")
    return ((j // 64 - i // 64 == h) & (i % 64 != 3))[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_that_a_dense_mask_hides_are_skipped(dtype: torch.dtype, backend: str) -> None:
    """So tiles follow each other with gaps; Dv takes every tile size, Ds several steps a tile."""
    for width in (24, 100, 200):
        hold(GatedCase("gaps", 1, 2, 200, 260, D=16, Dv=width, mask=blocks), backend, dtype)
        hold(
            CollaborativeCase("gaps", 1, 2, 200, 260, Ds=144, Dv=width, mask=blocks), backend, dtype
        )


@pytest.mark.parametrize("shape", [(2, 1, 40, 1), (1, 2, 1, 70), (2, 2, 40, 70)])
def test_dense_masks_broadcast_in_every_dimension(shape: tuple[int, ...], backend: str) -> None:
    def mask(sizes: Sizes, device: torch.device) -> Tensor:
        torch.manual_seed(0)
        return (torch.rand(shape[::-1]) < 0.7).permute(3, 2, 1, 0).expand(sizes)

    for case in both("broadcast", 2, 2, 40, 70, mask=mask, softcap=1.0, is_causal=True):
        hold(case, backend)


@pytest.mark.parametrize("D", [100, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_heads_with_every_term(D: int, dtype: torch.dtype, backend: str) -> None:
    options = {"bias": "1HTS", "bias_hides": True, "softcap": 2.0, "sinks": True, "gate": "BHT"}
    hold(GatedCase("wide", 2, 2, 40, 70, D=D, Dv=D, **options), backend, dtype)  # type: ignore[arg-type]
    hold(CollaborativeCase("wide", 2, 2, 40, 70, Ds=3 * D, Dv=D, **options), backend, dtype)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what is hidden
#: Query rows that see nothing.
ROWS = torch.arange(40) % 7 == 2


def hidden_rows() -> Inputs:
    """Every term; the bias hides all keys from `ROWS`, and key 5 from all rows."""
    bias = torch.randn(1, 2, 40, 70).masked_fill(ROWS[:, None], -torch.inf)
    bias[..., 5] = -torch.inf
    tensors = {
        "query": torch.randn(2, 2, 40, 16),
        "key": torch.randn(2, 2, 70, 16),
        "value": torch.randn(2, 2, 70, 16),
        "gate": torch.rand(2, 2, 40) + 0.5,
        "bias": bias,
        "sinks": torch.randn(2),
    }
    return Inputs("gated_attention", tensors, {"softcap": 3.0}, torch.randn(2, 2, 40, 16))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("gate", [(2, 2, 40), (2, 2, 40, 16), (2,)])
def test_what_a_bias_hides_reaches_nothing(gate: tuple[int, ...], bad: float, backend: str) -> None:
    """With sinks `lse` does not tell the rows that see nothing: it is their sink."""
    inputs = hidden_rows()
    inputs.tensors["gate"] = torch.rand(gate) + 0.5
    poisoned = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
    dout = inputs.dout.clone()
    for rows in (poisoned["query"], dout, *([poisoned["gate"]] if len(gate) > 1 else [])):
        rows[:, :, ROWS] = bad
    for keys in (poisoned["key"], poisoned["value"]):
        keys[:, :, 5] = bad
    got = replace(inputs, tensors=poisoned, dout=dout).backward(backend)
    assert_same_bits(backend, got, inputs.backward(backend))
    assert not got[0][:, :, ROWS].any()
    assert not got[1]["query"][:, :, ROWS].any()
    assert not got[1]["bias"][:, :, ROWS].any()


@pytest.mark.parametrize("distance", [25.0, 80.0])
def test_keys_that_weigh_nothing_beside_a_sink(distance: float, backend: str) -> None:
    """They are seen all the same: their values get small gradients, and a dout that is not finite shows."""
    query, key, value = torch.randn(3, 1, 1, 40, 16)
    tensors = {"query": query, "key": key, "value": value, "sinks": torch.tensor([distance])}
    inputs = Inputs("gated_attention", tensors, {}, torch.randn(1, 1, 40, 16))
    report = compare(reference(inputs), backend)
    assert report.ok, str(report)
    grads = inputs.backward(backend)[1]
    assert grads["value"].all()
    inputs.dout[:, :, 3] = torch.nan
    grads = inputs.backward(backend)[1]
    assert grads["value"].isnan().all()
    assert grads["query"][:, :, 3].isnan().all()
    assert grads["sinks"].isnan().all()


def test_the_sink_of_a_closed_head(backend: str) -> None:
    """Its gate gets the true gradient, its sink none."""
    inputs = hidden_rows()
    inputs.tensors["gate"] = torch.tensor([0.0, 1.0])
    report = compare(reference(inputs), backend)
    assert report.ok, str(report)
    grads = inputs.backward(backend)[1]
    assert grads["sinks"][0] == 0.0
    assert grads["gate"][0] != 0.0
    assert not grads["bias"][:, 0].any()
