"""Keys of a short query that are split over programs: what the combined parts give, and how many splits there are."""

import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.ops import buffers
from heads_kernels.ops.attention import Results, attend_with_lse, attention_op
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, check, masks
from heads_kernels.testing.masks import Sizes
from tests.ops.calls import assert_ok, parsed, serve

#: The module of each backend that splits keys, as it names `buffers.key_splits`.
MODULES = {"triton": "heads_kernels.ops.triton.forward", "cuda": "heads_kernels.ops.cuda"}


def parts_of_rows(sizes: Sizes, device: torch.device) -> Tensor:
    """Row 0 sees the first keys, row 1 the last, row 2 nothing, the others all: most splits hide all from some."""
    lo = torch.zeros(sizes.B, sizes.T, dtype=torch.int32, device=device)
    hi = torch.full_like(lo, sizes.S)
    hi[:, 0] = 3
    lo[:, 1] = sizes.S - 2
    hi[:, 2:3] = 0
    i = torch.arange(sizes.S, device=device)
    return ((i >= lo[..., None]) & (i < hi[..., None]))[:, None]


CASES: tuple[Case, ...] = (
    GatedCase("rows", 2, 4, 5, 210, D=16, Dv=24, Hk=2, mask=parts_of_rows, gate="BHT", sinks=True),
    GatedCase("window", 1, 2, 16, 400, D=16, Dv=16, mask=masks.fixed(hk.Mask(causal="lower_right",
        window=(150, 0)))),
    GatedCase("few_keys", 2, 2, 16, 200, D=16, Dv=16, mask=masks.padded(200, 3, queries=False),
        gate="H"),
    GatedCase("nothing_visible", 2, 3, 4, 150, D=16, Dv=16, mask=masks.padded(0, 150,
        queries=False), sinks=True, gate="BHTD", gate_activation="sigmoid"),
    GatedCase("closed", 2, 4, 1, 300, D=24, Dv=40, Hk=2, mask=masks.lower_right, gate="BH",
        closed=0.5, sinks=True),
    GatedCase("closed_group", 1, 4, 1, 150, D=16, Dv=16, Hk=2, gate="H", closed=1.0),
    GatedCase("many_heads", 1, 20, 1, 130, D=16, Dv=24, Hk=1, bias="BHTS", bias_hides=True,
        gate="BHTD", layout="transposed"),
    GatedCase("long_group", 2, 8, 5, 150, D=16, Dv=24, Hk=1, mask=masks.dense_heads, gate="BH",
        closed=0.5, dropout_p=0.2, layout="transposed"),
    GatedCase("dropout", 2, 6, 1, 200, D=16, Dv=24, Hk=2, dropout_p=0.3, mask=masks.holes),
    GatedCase("dense_heads", 2, 4, 1, 200, D=16, Dv=24, Hk=2, mask=masks.dense_heads, gate="H",
        closed=0.5, softcap=2.0),
    GatedCase("offsets", 2, 6, 1, 131, D=16, Dv=24, Hk=2, offsets=9, mask=masks.lower_right,
        gate="BHT", gate_activation="softplus"),
    GatedCase("huge_row", 1, 2, 8, 300, D=64, Dv=64, outlier=40.0, scale=-0.125),
    CollaborativeCase("holes", 2, 2, 16, 140, Ds=96, Dv=24, content_bias=True, mask=masks.holes,
        gate="H", closed=0.5),
    CollaborativeCase("chunks", 2, 2, 3, 200, Ds=128, Dv=24, mixing="chunks", sinks=True,
        dropout_p=0.2, bias="1HTS"),
)  # fmt: skip


def with_splits(backend: str, splits: int) -> Any:
    """Calls in this block have so many splits."""
    module = importlib.import_module(MODULES[backend])
    return mock.patch.object(module, "key_splits", return_value=splits)


def in_one_pass(backend: str) -> Any:
    """Calls in this block are computed by the kernel of long queries."""
    module = importlib.import_module(MODULES[backend])
    other = "is_grouped" if backend == "triton" else "is_decoding"
    patches = {"key_splits": lambda *_: 1, other: lambda *_: False}
    return mock.patch.multiple(module, **patches)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", MODULES)
def test_accuracy(backend: str, case: Case) -> None:
    assert_ok(check(case, torch.float32, backend))


@pytest.mark.parametrize("splits", [2, 7, 33])
@pytest.mark.parametrize("backend", MODULES)
def test_shares_of_any_size(backend: str, splits: int) -> None:
    """The last share is smaller, or some are empty; more of them than are combined at once."""
    for case in (CASES[0], CASES[3]):
        with with_splits(backend, splits):
            assert_ok(check(case, torch.bfloat16, backend))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("backend", MODULES)
def test_what_is_not_finite(backend: str, grouped: bool, bad: float) -> None:
    """It reaches the rows that see it, in the kernels with and without splits, and `lse` is the same."""
    B, H, T, S = 3, 4, 1 if grouped else 3, 200
    query, key, value = (torch.randn(B, *shape) for shape in ((H, T, 16), (2, S, 16), (2, S, 24)))
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[:, 70:80] = True
    for b, at in enumerate((slice(70, 80), slice(150, 151), slice(10, 11))):
        key[b, 0, at] = bad
        value[b, 1, at] = bad
    gate = torch.tensor([0.0, 1.0, 0.5, 0.0])
    given = {"gate": gate, "sinks": torch.randn(H), "attn_mask": hk.Mask(key_mask=~hidden)}
    serve("gated_attention", backend, query=query, key=key, value=value, **given)
    problem = parsed("gated_attention", query, key, value, **given)
    with in_one_pass(backend):
        one = Results(*attention_op(*problem, True, backend))
    with with_splits(backend, 4):
        many = Results(*attention_op(*problem, True, backend))
    for name, got, want in zip(one._fields, many, one, strict=True):
        assert torch.equal(got.isfinite(), want.isfinite()), name
        finite = want.isfinite()
        torch.testing.assert_close(got[finite], want[finite])
    assert one.out[0].isfinite().all()
    assert not one.out[:, (0, 3)].any()  # closed
    assert not one.out[1:, 1:3].isfinite().all()


@pytest.mark.parametrize("backend", MODULES)
def test_keys_are_read_once_for_the_heads_that_share_them(backend: str) -> None:
    module = importlib.import_module(MODULES[backend])
    problem = GatedCase("", 3, 8, 1, 200, D=16, Dv=16, Hk=2).make(torch.float32).parsed()
    with mock.patch.object(module, "key_splits", return_value=2) as key_splits:
        attend_with_lse(problem, backend)
    _, programs, *_ = key_splits.call_args.args
    assert programs == 3 * 2


def test_number_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the multiprocessors of a GPU; a few on the CPU, so that its tests have some."""
    like = torch.empty(0)
    for tiles, splits in {0: 1, 1: 1, 2: 2, 5: 3, 100: 4}.items():
        assert buffers.key_splits(1, 1000, tiles, like) == splits
    assert buffers.key_splits(17, 1, 100, like) == 1
    monkeypatch.setattr(buffers, "programs_wanted", lambda device: 3 * 132)
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    assert buffers.key_splits(1, 8, 128, gpu) == 32  # of 4 tiles: fewer would be too short
    assert buffers.key_splits(1, 32, 128, gpu) == 11  # 352 programs of 12 tiles, the last of 8
    assert buffers.key_splits(1, 8, 4, gpu) == 1
    assert buffers.key_splits(1, 400, 2048, gpu) == 1  # there are programs enough
    assert buffers.key_splits(17, 8, 128, gpu) == 1  # a longer query
    assert buffers.key_splits(1, 0, 128, gpu) == 32  # an empty batch
    assert buffers.key_splits(1, 8, 0, gpu) == 1


@pytest.mark.parametrize(("H", "row_tiles"), [(12, 32), (8, 4), (1, 396), (396, 1), (7, 5)])
def test_programs_that_take_turns_share_what_is_equally_far_apart(
    H: int, row_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where heads have numbers of their own the last tiles of all heads, else the tiles of a head."""
    monkeypatch.setattr(buffers, "programs_wanted", lambda device: 3 * 132)
    count = 4 * H * row_tiles
    programs = buffers.programs_in_turn(count, H * row_tiles, torch.device("cpu"))
    assert programs <= min(count, 3 * 132)
    for apart in (row_tiles, H):
        tiles = [number % apart == 0 for number in range(count)]
        shares = [sum(tiles[program::programs]) for program in range(programs)]
        assert max(shares) - min(shares) <= 1 or programs == count
