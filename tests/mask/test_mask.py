"""`Mask` against the meaning of its arguments, spelled out pair by pair (`sees`)."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from heads_kernels.checks import MAX_LENGTH
from heads_kernels.mask import UNBOUNDED, Intervals, Mask, as_mask
from tests.mask.masks import B, H, S, T, all_real, every_kind, from_tensor, longs

Arguments = dict[str, Any]  # what Mask takes, with nested lists for tensors

LENGTHS = ("key_lengths", "query_lengths", "prefix_lengths")
#: What reads `causal` stays in one Mask with it; everything else may be composed with & instead.
ALIGNED = ("causal", "window", "prefix_lengths")
ARGUMENTS = (*ALIGNED, "key_lengths", "query_lengths", "key_mask", "query_mask", "document_ids")


# ---------------------------------------------------------------------- the oracle
def sees(arguments: Arguments, T: int, S: int, b: int, i: int, j: int) -> bool:
    """Whether row i of batch b sees key j, from the docstring of Mask."""

    def of_batch(rows: list[Any]) -> Any:
        return rows[b if len(rows) > 1 else 0]

    causal = arguments.get("causal", False)
    at = i + S - T if causal == "lower_right" else i
    if causal is not False and j > at:
        prefix = of_batch(arguments["prefix_lengths"]) if "prefix_lengths" in arguments else 0
        if j >= prefix:
            return False
    if "window" in arguments:
        left, right = arguments["window"]
        if (left != -1 and j < at - left) or (right != -1 and j > at + right):
            return False
    if "key_lengths" in arguments and j >= of_batch(arguments["key_lengths"]):
        return False
    if "query_lengths" in arguments and i >= of_batch(arguments["query_lengths"]):
        return False
    if "key_mask" in arguments and not of_batch(arguments["key_mask"])[j]:
        return False
    if "query_mask" in arguments and not of_batch(arguments["query_mask"])[i]:
        return False
    if "document_ids" in arguments:
        query_ids, key_ids = arguments["document_ids"]
        return bool(of_batch(query_ids)[i] == of_batch(key_ids)[j])
    return True


def oracle(arguments: Arguments, B: int, T: int, S: int) -> Tensor:
    visible = torch.zeros(B, T, S, dtype=torch.bool)
    for b, i, j in itertools.product(range(B), range(T), range(S)):
        visible[b, i, j] = sees(arguments, T, S, b, i, j)
    return visible


def tensors(arguments: Arguments, B: int, T: int, S: int) -> Arguments:
    """The same arguments as Mask takes them."""
    made = dict(arguments)
    for name in LENGTHS:
        if name in made:
            made[name] = torch.tensor(made[name], dtype=torch.int64)
    for name, size in (("key_mask", S), ("query_mask", T)):
        if name in made:
            rows = torch.tensor(made[name], dtype=torch.bool)
            made[name] = rows.reshape(len(made[name]), size)
    if "document_ids" in made:
        made["document_ids"] = tuple(
            torch.tensor(rows, dtype=dtype).reshape(len(rows), size)
            for rows, size, dtype in zip(
                made["document_ids"], (T, S), (torch.int64, torch.int32), strict=True
            )
        )
    return made


def check(mask: Mask, expected: Tensor, S: int) -> None:
    """`mask` shows `expected` ([B, T, S]), counts it, and its intervals are what kernels expect."""
    B, T, _ = expected.shape
    dense = mask.to_dense(B, 3, T, S)
    assert dense.dtype == torch.bool
    assert dense.shape[0] in (1, B)
    assert dense.shape[1:] == (1, T, S)
    torch.testing.assert_close(dense[:, 0].expand(B, T, S), expected)

    intervals = mask.intervals(B, 3, T, S)
    pairs = intervals.visible_pairs(B, T, S)
    assert pairs.dtype == torch.int64
    assert pairs.tolist() == expected.sum((1, 2)).tolist()

    assert intervals.dense is None
    assert isinstance(intervals.band_lo, int)
    assert isinstance(intervals.band_hi, int)
    assert (intervals.k_lo is None) == (intervals.k_hi is None)
    for vector in (intervals.k_lo, intervals.k_hi):
        if vector is not None:
            assert vector.dtype == torch.int32
            assert vector.is_contiguous()
            assert vector.shape in ((1, T), (B, T))
            assert bool(((vector >= 0) & (vector <= S)).all())
    if intervals.key_visible is not None:
        assert intervals.key_visible.dtype == torch.bool
        assert intervals.key_visible.is_contiguous()
        assert intervals.key_visible.shape in ((1, S), (B, S))


def picture(mask: Mask, T: int, S: int, B: int = 1) -> list[str]:
    """Rows of the mask of the last batch, x where it sees."""
    dense = mask.to_dense(B, 1, T, S)[-1, 0]
    return ["".join("x" if seen else "." for seen in row) for row in dense.tolist()]


# ---------------------------------------------------------------------- any arguments
def _lengths(B: int, limit: int) -> st.SearchStrategy[list[int]]:
    return st.sampled_from([1, B]).flatmap(
        lambda n: st.lists(st.integers(0, limit), min_size=n, max_size=n)
    )


def _bools(B: int, size: int) -> st.SearchStrategy[list[list[bool]]]:
    row = st.lists(st.booleans(), min_size=size, max_size=size)
    return st.sampled_from([1, B]).flatmap(lambda n: st.lists(row, min_size=n, max_size=n))


def _ids(B: int, size: int) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, 3), min_size=size, max_size=size).map(sorted)
    return st.sampled_from([1, B]).flatmap(lambda n: st.lists(row, min_size=n, max_size=n))


def strategy(name: str, B: int, T: int, S: int) -> st.SearchStrategy[Any]:
    side = st.integers(-1, 5) | st.just(1 << 40)
    return {
        "causal": st.sampled_from([True, "upper_left", "lower_right"]),
        "window": st.tuples(side, side),
        "prefix_lengths": _lengths(B, S),
        "key_lengths": _lengths(B, S),
        "query_lengths": _lengths(B, T),
        "key_mask": _bools(B, S),
        "query_mask": _bools(B, T),
        "document_ids": st.tuples(_ids(B, T), _ids(B, S)),
    }[name]


SIZES = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6))  # B, T, S


@pytest.mark.parametrize("name", ARGUMENTS)
@given(data=st.data())
def test_every_argument_alone(name: str, data: st.DataObject) -> None:
    B, T, S = data.draw(SIZES, label="B, T, S")
    arguments = {name: data.draw(strategy(name, B, T, S), label=name)}
    if name == "prefix_lengths":
        arguments["causal"] = data.draw(strategy("causal", B, T, S), label="causal")
    check(Mask(**tensors(arguments, B, T, S)), oracle(arguments, B, T, S), S)


@given(data=st.data())
def test_arguments_together_and_composed(data: st.DataObject) -> None:
    B, T, S = data.draw(SIZES, label="B, T, S")
    names = data.draw(st.sets(st.sampled_from(ARGUMENTS), min_size=2), label="names")
    if "prefix_lengths" in names:
        names.add("causal")
    arguments = {name: data.draw(strategy(name, B, T, S), label=name) for name in sorted(names)}
    expected = oracle(arguments, B, T, S)
    made = tensors(arguments, B, T, S)
    check(Mask(**made), expected, S)

    composed = Mask(**{name: made[name] for name in names if name in ALIGNED})
    for name in data.draw(st.permutations(sorted(names)), label="order"):
        if name not in ALIGNED:
            composed = Mask(**{name: made[name]}) & composed
    check(composed, expected, S)


@given(data=st.data())
def test_and_is_the_and_of_any_two_masks(data: st.DataObject) -> None:
    B, T, S = data.draw(SIZES, label="B, T, S")
    masks, expected = [], torch.ones(B, T, S, dtype=torch.bool)
    for _ in range(2):
        names = data.draw(st.sets(st.sampled_from(ARGUMENTS)), label="names")
        if "prefix_lengths" in names:
            names.add("causal")
        arguments = {name: data.draw(strategy(name, B, T, S), label=name) for name in sorted(names)}
        masks.append(Mask(**tensors(arguments, B, T, S)))
        expected &= oracle(arguments, B, T, S)
    check(masks[0] & masks[1], expected, S)


@given(data=st.data())
def test_rows(data: st.DataObject) -> None:
    """The mask of some rows, in any order, is these rows of the mask."""
    B, T, S = data.draw(SIZES, label="B, T, S")
    names = data.draw(st.sets(st.sampled_from(ARGUMENTS)), label="names")
    if "prefix_lengths" in names:
        names.add("causal")
    arguments = {name: data.draw(strategy(name, B, T, S), label=name) for name in sorted(names)}
    whole = Mask(**tensors(arguments, B, T, S))
    chosen = data.draw(
        st.lists(st.integers(0, T - 1), max_size=T) if T else st.just([]), label="rows"
    )
    rows = torch.tensor(chosen, dtype=torch.int64)
    check(whole.rows(rows, B, 1, T, S), oracle(arguments, B, T, S)[:, rows], S)


# ---------------------------------------------------------------------- by hand
@pytest.mark.parametrize(
    ("mask", "T", "S", "rows"),
    [
        (Mask(), 2, 3, ["xxx", "xxx"]),
        (Mask(causal=True), 3, 4, ["x...", "xx..", "xxx."]),
        (Mask(causal="upper_left"), 3, 2, ["x.", "xx", "xx"]),
        (Mask(causal="lower_right"), 2, 4, ["xxx.", "xxxx"]),
        (Mask(causal="lower_right"), 3, 2, ["..", "x.", "xx"]),
        (Mask(causal="lower_right"), 1, 3, ["xxx"]),
        (Mask(window=(1, 1)), 4, 4, ["xx..", "xxx.", ".xxx", "..xx"]),
        (Mask(window=(0, -1)), 3, 3, ["xxx", ".xx", "..x"]),
        (Mask(causal=True, window=(1, 1)), 3, 3, ["x..", "xx.", ".xx"]),
        (Mask(causal="lower_right", window=(1, 0)), 2, 4, [".xx.", "..xx"]),
        (Mask(key_lengths=[2]), 2, 3, ["xx.", "xx."]),
        (Mask(query_lengths=[1]), 2, 3, ["xxx", "..."]),
        (Mask(key_mask=torch.tensor([[False, True, False, True]])), 1, 4, [".x.x"]),
        (Mask(key_mask=torch.tensor([[False, False]])), 2, 2, ["..", ".."]),
        (Mask(query_mask=torch.tensor([[False, True]])), 2, 2, ["..", "xx"]),
        (Mask(document_ids=torch.tensor([0, 0, 7])), 3, 3, ["xx.", "xx.", "..x"]),
        (
            Mask(document_ids=(torch.tensor([1, 5, 0]), torch.tensor([0, 1, 1]))),
            3,
            3,
            [".xx", "...", "x.."],
        ),
        (Mask(causal=True, prefix_lengths=[2]), 4, 4, ["xx..", "xx..", "xxx.", "xxxx"]),
        (Mask(causal="lower_right", prefix_lengths=[1]), 3, 2, ["x.", "x.", "xx"]),
        (
            Mask.from_cu_seqlens(torch.tensor([0, 2, 2, 3]), 5) & Mask(causal=True),
            5,
            5,
            ["x....", "xx...", "..x..", "...x.", "...xx"],
        ),
    ],
    ids=repr,
)
def test_pictures(mask: Mask, T: int, S: int, rows: list[str]) -> None:
    assert picture(mask, T, S) == rows


def test_intervals_of_arithmetic_masks_are_two_integers_and_no_tensor() -> None:
    masks = {
        Mask(): (-UNBOUNDED, UNBOUNDED),
        Mask(causal=True): (-UNBOUNDED, 1),
        Mask(causal="lower_right"): (-UNBOUNDED, 4),
        Mask(window=(2, 1)): (-2, 2),
        Mask(causal="lower_right", window=(2, 5)): (1, 4),
        Mask(window=(3, -1)) & Mask(window=(-1, 2)): (-3, 3),
        Mask(window=(1 << 50, UNBOUNDED)): (-UNBOUNDED, UNBOUNDED),
    }
    for mask, band in masks.items():
        intervals = mask.intervals(2, 3, 5, 8, torch.device("cuda"))  # no device is touched
        assert tuple(intervals) == tuple(Intervals(*band))


def test_interval_of_a_key_mask_is_the_span_of_its_real_keys() -> None:
    real = torch.tensor([[0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    intervals = Mask(key_mask=real).intervals(3, 1, 2, 6)
    assert intervals.k_lo is not None
    assert intervals.k_hi is not None
    assert intervals.key_visible is real  # kept by reference
    assert intervals.k_lo.tolist() == [[2, 2], [0, 0], [6, 6]]
    assert intervals.k_hi.tolist() == [[5, 5], [6, 6], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_of_every_dtype(dtype: torch.dtype) -> None:
    lengths = torch.tensor([200 if dtype is torch.uint8 else 100], dtype=dtype)
    pairs = Mask(key_lengths=lengths).intervals(1, 1, 2, 300).visible_pairs(1, 2, 300)
    assert pairs.tolist() == [2 * lengths.item()]
    ids = torch.tensor([0, 0, 1], dtype=dtype)
    assert picture(Mask(document_ids=ids), 3, 3) == ["xx.", "xx.", "..x"]
    pair = (torch.tensor([0, 0, 1]), ids)
    assert picture(Mask(document_ids=pair), 3, 3) == ["xx.", "xx.", "..x"]
    assert picture(Mask.from_cu_seqlens(ids[1:], 2), 2, 2) == ["x.", ".x"]


def test_lengths_from_a_list_are_those_of_a_tensor() -> None:
    for name in LENGTHS:
        listed = Mask(causal=True, **{name: [1, 3]})  # type: ignore[arg-type]
        tensor = Mask(causal=True, **{name: torch.tensor([1, 3])})  # type: ignore[arg-type]
        for batch in (0, 1):
            assert torch.equal(
                listed.to_dense(2, 1, 4, 4)[batch], tensor.to_dense(2, 1, 4, 4)[batch]
            )
        assert int(listed.to_dense(2, 1, 4, 4).sum()) < 2 * 16


def test_strided_masks_become_contiguous_intervals() -> None:
    real = torch.rand(6, 3).gt(0.4).T  # [3, 6]
    rows = torch.rand(5, 3).gt(0.4).T  # [3, 5]
    expected = (real[:, None, :] & rows[:, :, None]).contiguous()
    check(Mask(key_mask=real, query_mask=rows), expected, 6)


def test_visible_pairs_are_those_of_the_dense_mask_at_size() -> None:
    mask = Mask(causal=True, window=(40, 0), key_mask=torch.rand(2, 300) > 0.3)
    pairs = mask.intervals(2, 1, 257, 300).visible_pairs(2, 257, 300)
    assert pairs.tolist() == mask.to_dense(2, 1, 257, 300).sum((1, 2, 3)).tolist()


# ---------------------------------------------------------------------- bool tensors


@pytest.mark.parametrize("rank", range(5))
def test_bool_tensors_mean_what_they_mean_to_sdpa(rank: int) -> None:
    for sizes in itertools.product(*({1, size} for size in (B, H, T, S)[4 - rank :])):
        attn_mask = torch.rand(sizes) > 0.4
        mask = as_mask(attn_mask, (B, H, T, S))
        expected = attn_mask.expand(B, H, T, S)
        assert torch.equal(mask.to_dense(B, H, T, S).expand(B, H, T, S), expected)
        intervals = mask.intervals(B, H, T, S)
        padded = (1,) * (4 - rank) + sizes
        heads_counted = padded[1] if intervals.dense is not None else 1
        assert intervals.visible_pairs(B, T, S).tolist() == [
            int(expected[b, :heads_counted].sum()) for b in range(B)
        ]
        # only what differs by head, or by row and key at once, is dense
        fused = padded[1] == 1 and (padded[2] == 1 or padded[3] == 1)
        assert (intervals.dense is None) == fused


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 2, 1, 1)])
def test_bool_tensors_of_empty_and_single_sizes(shape: tuple[int, int, int, int]) -> None:
    for sizes in itertools.product(*({1, size} for size in shape)):
        attn_mask = torch.rand(sizes) > 0.5
        dense = as_mask(attn_mask, shape).to_dense(*shape)
        assert torch.equal(dense.expand(shape), attn_mask.expand(shape))


def test_dense_masks_compose() -> None:
    attn_mask = torch.rand(B, H, T, S) > 0.3
    other = torch.rand(T, S) > 0.3
    shape = (B, H, T, S)
    mask = as_mask(attn_mask, shape) & Mask(causal=True, key_lengths=[3, 5]) & as_mask(other, shape)
    expected = oracle({"causal": True, "key_lengths": [3, 5]}, B, T, S)[:, None] & attn_mask & other
    assert torch.equal(mask.to_dense(*shape), expected)
    pairs = mask.intervals(*shape).visible_pairs(B, T, S)
    assert pairs.tolist() == expected.sum((1, 2, 3)).tolist()


def test_as_mask_of_none_and_of_a_mask() -> None:
    assert as_mask(None, (B, H, T, S)).terms == ()
    mask = Mask(causal=True)
    assert as_mask(mask, (B, H, T, S)) is mask


# ---------------------------------------------------------------------- an object of its own
def test_mask_is_immutable_and_keeps_tensors_by_reference() -> None:
    real = all_real(2, 5)
    mask = Mask(causal=True, key_mask=real)
    with pytest.raises(AttributeError):
        mask.terms = ()  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        mask.terms[0].align = "lower_right"  # type: ignore[attr-defined]
    assert mask.terms[1].real is real  # type: ignore[attr-defined]
    before = mask.terms
    assert (mask & Mask(window=(1, 1))).terms[:2] == before == mask.terms


@pytest.mark.parametrize("dense", [torch.ones(5, 5, dtype=torch.bool), torch.ones(2, 5).bool()])
def test_a_tensor_does_not_join_a_mask_by_an_operator(dense: Tensor) -> None:
    mask = Mask(causal=True)
    for join in (lambda: mask & dense, lambda: dense & mask):
        with pytest.raises(TypeError, match=r"^& joins a Mask and a Tensor; .*key_mask=.*to_dense"):
            join()
    with pytest.raises(TypeError, match="unsupported operand"):
        mask & 1  # type: ignore[operator]
    both = mask.to_dense(2, 1, 5, 5) & torch.ones(5, 5, dtype=torch.bool)  # as the message says
    assert as_mask(both, (2, 1, 5, 5)).to_dense(2, 1, 5, 5).equal(mask.to_dense(2, 1, 5, 5))


def test_windows_wider_than_any_call() -> None:
    """Limits stay within int32, and so do their sums with a row."""
    wide = Mask(causal="lower_right", window=(UNBOUNDED - 1, UNBOUNDED - 1))
    for rows, keys in ((5, MAX_LENGTH), (MAX_LENGTH, 5)):
        found = wide.work_out(1, 1, rows, keys, "cpu")
        assert -UNBOUNDED <= found.band_lo <= found.band_hi <= UNBOUNDED
    assert MAX_LENGTH < UNBOUNDED


def test_repr() -> None:
    ids = longs(0, 1)
    assert repr(Mask()) == "Mask()"
    assert repr(Mask(causal=True, window=(4, 0))) == "Mask(causal=True, window=(4, 0))"
    assert repr(Mask(causal="lower_right", window=(4, -1), key_lengths=[3, 5])) == (
        "Mask(causal='lower_right', window=(4, -1) lower_right, key_lengths=(3, 5))"
    )
    assert repr(
        Mask(causal=True, prefix_lengths=longs(1), key_mask=all_real(2, 5, device="meta"))
    ) == ("Mask(causal=True, prefix_lengths=int64[1], key_mask=bool[2, 5] on meta)")
    assert repr(Mask(document_ids=ids) & Mask(document_ids=(ids, ids + 1))) == (
        "Mask(document_ids=int64[2], document_ids=(int64[2], int64[2]))"
    )
    assert repr(from_tensor(all_real(4, 5))) == "Mask(attn_mask=bool[1, 1, 4, 5])"


def test_copies_show_the_same() -> None:
    mask = every_kind() & as_mask(torch.rand(2, 3, 5, 5) > 0.2, (2, 3, 5, 5))
    expected = mask.to_dense(2, 3, 5, 5)
    assert 0 < int(expected.sum()) < expected.numel()
    stored = io.BytesIO()
    torch.save(mask, stored)
    stored.seek(0)
    leaves, spec = pytree.tree_flatten(mask)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    for twin in (
        copy.deepcopy(mask),
        mask.snapshot(),
        pickle.loads(pickle.dumps(mask)),
        torch.load(stored, weights_only=True),
        pytree.tree_unflatten(leaves, spec),
    ):
        assert repr(twin) == repr(mask)
        assert torch.equal(twin.to_dense(2, 3, 5, 5), expected)


def test_a_mask_as_pytree_maps_its_tensors() -> None:
    moved = pytree.tree_map(lambda tensor: tensor.to("meta"), every_kind())
    assert moved.intervals(2, 1, 5, 5).k_lo.device.type == "meta"
    assert pytree.tree_flatten(pytree.tree_map(lambda _: 7, every_kind()))[0] == [7] * 5
