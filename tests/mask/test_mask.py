"""`Mask` against the meaning of its arguments, pair by pair (`oracle`)."""

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

from heads_kernels.mask import UNBOUNDED, Intervals, Mask, as_mask
from tests.mask.masks import BY_HEAD, HEADS, Arguments, all_real, every_kind, longs, oracle

LENGTHS = ("key_lengths", "query_lengths", "prefix_lengths")
#: What reads `causal` stays in one Mask with it; everything else may be composed with & instead.
ALIGNED = ("causal", "window", "first_keys", "prefix_lengths")
ARGUMENTS = (*ALIGNED, "key_lengths", "query_lengths", "key_mask", "query_mask", "document_ids")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check(mask: Mask, expected: Tensor, may_be_dense: bool = False) -> None:
    """`mask` shows `expected` ([B, H, T, S]), counts it, and its intervals are what kernels expect."""
    B, _, T, S = expected.shape
    dense = mask.to_dense(B, HEADS, T, S)
    assert dense.dtype == torch.bool
    assert torch.equal(*(x.expand(B, HEADS, T, S) for x in (dense, expected)))

    intervals = mask.intervals(B, HEADS, T, S)
    pairs = intervals.visible_pairs(B, T, S)
    assert pairs.dtype == torch.int64
    assert torch.equal(*(x.expand(B, HEADS) for x in (pairs, expected.sum((2, 3)))))

    assert intervals.dense_mask is None or may_be_dense
    assert isinstance(intervals.band_lo, int)
    assert isinstance(intervals.band_hi, int)
    assert (intervals.k_lo is None) == (intervals.k_hi is None)
    assert intervals.first_keys is None or intervals.k_lo is not None
    bounds = [(b, h, T) for b in (1, B) for h in (1, HEADS)]
    for name, dtype, shapes in (
        ("k_lo", torch.int32, bounds),
        ("k_hi", torch.int32, bounds),
        ("first_keys", torch.int32, [(1,), (HEADS,)]),
        ("key_visible", torch.bool, [(1, S), (B, S)]),
    ):
        part = getattr(intervals, name)
        if part is not None:
            assert part.dtype == dtype, name
            assert part.is_contiguous(), name
            assert part.shape in shapes, name
            assert bool(((part >= 0) & (part <= S)).all()) or dtype == torch.bool, name


# ---------------------------------------------------------------------- any arguments
def rows_of(element: st.SearchStrategy[Any], B: int, size: int) -> st.SearchStrategy[Any]:
    """`size` elements for all, or for each of B."""
    row = st.lists(element, min_size=size, max_size=size)
    return st.sampled_from([1, B]).flatmap(lambda n: st.lists(row, min_size=n, max_size=n))


def values(name: str, B: int, T: int, S: int) -> st.SearchStrategy[Any]:
    side = st.integers(-1, 5) | st.just(1 << 40)
    sizes = {"query_lengths": T, "key_mask": S, "query_mask": T}
    if name in LENGTHS:
        limit = st.integers(0, sizes.get(name, S))
        return rows_of(limit, B, 1).map(lambda rows: [row[0] for row in rows])
    if name == "document_ids":
        ids = (rows_of(st.integers(0, 3), B, size) for size in (T, S))
        return st.tuples(*(each.map(lambda rows: [sorted(row) for row in rows]) for each in ids))
    if name == "causal":
        return st.sampled_from([True, "upper_left", "lower_right"])
    if name in BY_HEAD:
        of_head = st.tuples(side, side) if name == "window" else st.integers(0, S + 2)
        numbers = st.sampled_from([1, HEADS])
        return numbers.flatmap(lambda n: st.lists(of_head, min_size=n, max_size=n))
    return rows_of(st.booleans(), B, sizes[name])


def draw_arguments(data: st.DataObject, B: int, T: int, S: int, name: str) -> Arguments:
    """`name` and any others."""
    names = {name, *data.draw(st.sets(st.sampled_from(ARGUMENTS)), label="names")}
    names |= {"causal"} if "prefix_lengths" in names else set()
    names |= {"window"} if "first_keys" in names else set()
    return {each: data.draw(values(each, B, T, S), label=each) for each in sorted(names)}


def given_as(data: st.DataObject, arguments: Arguments, T: int, S: int) -> Arguments:
    """The same arguments as Mask takes them: integers of any dtype or a list, strided masks."""

    def integers(rows: list[Any], *sizes: int) -> Tensor:
        dtype = data.draw(st.sampled_from(INTEGERS), label="dtype")
        return torch.tensor(rows, dtype=dtype).reshape(len(rows), *sizes)

    made = dict(arguments)
    for name, value in arguments.items():
        if name in LENGTHS and data.draw(st.booleans(), label="tensor"):
            made[name] = integers(value)
        elif name in BY_HEAD:
            form = data.draw(st.sampled_from(["tensor", "list", "one"]), label="form")
            if form == "tensor":
                made[name] = torch.tensor(value)
            elif form == "one" and len(value) == 1:
                made[name] = value[0]
        elif name in ("key_mask", "query_mask"):
            size = S if name == "key_mask" else T
            rows = torch.tensor(value, dtype=torch.bool).reshape(len(value), size)
            made[name] = rows.T.contiguous().T
        elif name == "document_ids":
            made[name] = integers(value[0], T), integers(value[1], S)
    return made


@pytest.mark.parametrize("name", ARGUMENTS)
@given(data=st.data())
def test_any_mask_means_its_arguments(name: str, data: st.DataObject) -> None:
    """In one `Mask` or composed with & in any order, with any other mask; and so does the mask of some of its rows."""
    B, T, S = data.draw(st.tuples(*map(st.integers, (0, 0, 0), (3, 6, 6))), label="B, T, S")
    arguments = draw_arguments(data, B, T, S, name)
    expected = oracle(arguments, B, T, S)
    made = given_as(data, arguments, T, S)
    mask = Mask(**made)
    limited = "first_keys" in made  # and another lower limit: together they are a dense mask
    check(mask, expected, limited)

    composed = Mask(**{each: made[each] for each in made if each in ALIGNED})
    for each in data.draw(st.permutations(sorted(made)), label="order"):
        if each not in ALIGNED:
            composed = Mask(**{each: made[each]}) & composed
    check(composed, expected, limited)

    more = draw_arguments(data, B, T, S, "window")
    limited = limited or "first_keys" in more
    check(mask & Mask(**given_as(data, more, T, S)), expected & oracle(more, B, T, S), limited)

    chosen = data.draw(st.lists(st.integers(0, T - 1), max_size=T) if T else st.just([]))
    rows = torch.tensor(chosen, dtype=torch.int64)
    check(mask.rows(rows, B, HEADS, T, S), expected[:, :, rows], limited)


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (Mask(causal=True), ["x...", "xx..", "xxx."]),
        (Mask(causal="lower_right"), ["xxx.", "xxxx"]),
        (Mask(causal="lower_right"), ["..", "x.", "xx"]),
        (Mask(window=(1, 1)), ["xx..", "xxx.", ".xxx", "..xx"]),
        (Mask(causal="lower_right", window=(1, 0)), [".xx.", "..xx"]),
        (Mask(causal=True, window=(1, 0), first_keys=1), ["x...", "xx..", "xxx.", "x.xx"]),
        (Mask(causal="lower_right", window=(0, 0), first_keys=[2]), ["xxx..", "xx.x.", "xx..x"]),
        (Mask(document_ids=longs(0, 0, 7)), ["xx.", "xx.", "..x"]),
        (Mask(document_ids=(longs(1, 5, 0), longs(0, 1, 1))), [".xx", "...", "x.."]),
        (Mask(causal=True, prefix_lengths=[2]), ["xx..", "xx..", "xxx.", "xxxx"]),
        (
            Mask.from_cu_seqlens(longs(0, 2, 2, 3).int(), 5) & Mask(causal=True),
            ["x....", "xx...", "..x..", "...x.", "...xx"],
        ),
    ],
    ids=repr,
)
def test_pictures(mask: Mask, rows: list[str]) -> None:
    """By hand, so that the oracle is not the only witness."""
    dense = mask.to_dense(1, 1, len(rows), len(rows[0]))[0, 0]
    assert ["".join("x" if seen else "." for seen in row) for row in dense.tolist()] == rows


def test_arithmetic_masks_are_two_integers_and_no_tensor() -> None:
    masks = {
        Mask(): (-UNBOUNDED, UNBOUNDED),
        Mask(causal=True): (-UNBOUNDED, 1),
        Mask(causal="lower_right"): (-UNBOUNDED, 4),
        Mask(causal="lower_right", window=(2, 5)): (1, 4),
        Mask(window=(3, -1)) & Mask(window=(-1, 2)): (-3, 3),
        Mask(window=(1 << 50, UNBOUNDED)): (-UNBOUNDED, UNBOUNDED),
    }
    for mask, band in masks.items():
        intervals = mask.intervals(2, 3, 5, 8, torch.device("cuda"))  # no device is touched
        assert tuple(intervals) == tuple(Intervals(*band))


# ---------------------------------------------------------------------- bool tensors
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (0, 2, 3, 4), (2, 2, 3, 0), (2, 2, 1, 1)])
def test_bool_tensors_mean_what_they_mean_to_sdpa(shape: tuple[int, int, int, int]) -> None:
    """Of any rank and with any dimensions of size 1, alone and joined with other masks."""
    B, _, T, S = shape
    lengths = [S, S // 2][:B]
    causal = oracle({"causal": True, "key_lengths": lengths}, B, T, S)
    for rank in range(5):
        for sizes in itertools.product(*({1, size} for size in shape[4 - rank :])):
            attn_mask = torch.rand(sizes) > 0.4
            mask = as_mask(attn_mask, shape)
            expected = attn_mask.expand(shape)
            assert torch.equal(mask.to_dense(*shape).expand(shape), expected)
            joined = mask & Mask(causal=True, key_lengths=lengths) if B else mask
            both = expected & causal if B else expected
            assert torch.equal(joined.to_dense(*shape).expand(shape), both)
            intervals = joined.intervals(*shape)
            padded = (1,) * (4 - rank) + sizes
            heads = padded[1] if intervals.dense_mask is not None else 1
            pairs = both[:, :heads].sum((2, 3))
            assert torch.equal(intervals.visible_pairs(B, T, S), pairs)
            # only what differs by head, or by row and key at once, is dense
            fused = padded[1] == 1 and (padded[2] == 1 or padded[3] == 1)
            assert (mask.intervals(*shape).dense_mask is None) == fused


@pytest.mark.parametrize("positions", [[0, 1], [1, 4], [], [0, 1, 2, 3, 4]])
def test_intervals_at_some_keys(positions: list[int]) -> None:
    dense = torch.rand(2, 3, 5, 5) < 0.7
    by_head = Mask(causal=True, window=[(-1, 0), (1, 0), (0, 1)], first_keys=[0, 2, 1])
    joined = every_kind() & as_mask(dense, (2, 3, 5, 5))
    for mask in (every_kind(), joined, Mask(window=(1, 1)), by_head):
        whole = mask.intervals(2, 3, 5, 5)
        some = whole.at_keys(5, longs(*positions))
        assert torch.equal(some.to_dense(5, len(positions)), whole.to_dense(5, 5)[..., positions])


# ---------------------------------------------------------------------- an object of its own
def test_a_mask_is_immutable_and_keeps_tensors_by_reference() -> None:
    real = all_real(2, 5)
    mask = Mask(causal=True, key_mask=real)
    with pytest.raises(AttributeError):
        mask.terms = ()  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        mask.terms[0].align = "lower_right"  # type: ignore[attr-defined]
    assert mask.intervals(2, 1, 5, 5).key_visible is real
    before = mask.terms
    assert (mask & Mask(window=(1, 1))).terms[:2] == before == mask.terms


def test_repr() -> None:
    mask = Mask(causal="lower_right", window=(4, -1), key_lengths=[3, 5])
    mask = mask & Mask(causal=True, prefix_lengths=longs(1))
    mask = mask & Mask(key_mask=all_real(2, 5, device="meta"), document_ids=longs(0, 1))
    assert repr(mask & as_mask(all_real(4, 5), (2, 3, 4, 5))) == (
        "Mask(causal=lower_right, window=(4, -1) lower_right, key_lengths=(3, 5), "
        "prefix_lengths=int64[1] upper_left, key_mask=bool[2, 5] on meta, document_ids=int64[2], "
        "attn_mask=bool[1, 1, 4, 5])"
    )


def test_copies_show_the_same() -> None:
    mask = every_kind() & as_mask(torch.rand(2, 3, 5, 5) > 0.2, (2, 3, 5, 5))
    mask = mask & Mask(window=[(-1, 0), (1, 1), (2, 0)], first_keys=longs(0, 1, 2))
    expected = mask.to_dense(2, 3, 5, 5)
    assert 0 < int(expected.sum()) < expected.numel()
    stored = io.BytesIO()
    torch.save(mask, stored)
    stored.seek(0)
    leaves, spec = pytree.tree_flatten(mask)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    for twin in (
        copy.deepcopy(mask),
        mask.snapshot(),
        pickle.loads(pickle.dumps(mask)),
        torch.load(stored, weights_only=True),
        pytree.tree_unflatten(leaves, spec),
        pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec))),
    ):
        assert repr(twin) == repr(mask)
        assert torch.equal(twin.to_dense(2, 3, 5, 5), expected)
    moved = pytree.tree_map(lambda tensor: tensor.to("meta"), every_kind())
    assert moved.intervals(2, 1, 5, 5).k_lo.device.type == "meta"
