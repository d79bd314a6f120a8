"""Intervals of a mask: computed once, waiting for no device, compiled and exported."""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from heads_kernels.mask import Intervals, Mask, as_mask, kept, terms
from heads_kernels.mask import mask as mask_module
from tests.mask.masks import all_real, every_kind, longs
from tests.support.dispatched import Ops

CPU, META = torch.device("cpu"), torch.device("meta")


# ---------------------------------------------------------------------- computed once
def tensors_on(device: torch.device) -> dict[str, Tensor]:
    """On "meta" nobody can look at their values, as on a GPU."""
    key_mask = torch.ones(2, 5, dtype=torch.bool, device=device)
    return {"key_lengths": torch.tensor([4, 5], device=device), "key_mask": key_mask}


#: What happens to the tensors of a mask between two calls, and whether its intervals are computed again.
WRITES: dict[str, tuple[Callable[[Tensor, Tensor], object], bool]] = {
    "nothing": (lambda lengths, real: None, False),
    "a write": (lambda lengths, real: lengths.sub_(1), True),
    "a write to a view": (lambda lengths, real: real[0].zero_(), True),
    "other data": (lambda lengths, real: setattr(real, "data", ~real[:1]), True),
}
#: On the CPU their bytes are compared, so that writes that PyTorch does not count are seen too.
WRITES_ON_CPU = {
    "numpy": (lambda lengths, real: lengths.numpy().fill(1), True),
    "another dtype": (lambda lengths, real: setattr(lengths, "data", lengths.int()), True),
    "a write to data": (lambda lengths, real: real.data[1].zero_(), True),
    "equal values": (lambda lengths, real: lengths.copy_(lengths.clone()), False),
}


@pytest.mark.parametrize(
    ("device", "write"),
    [*((META, name) for name in WRITES), *((CPU, name) for name in WRITES | WRITES_ON_CPU)],
    ids=str,
)
def test_intervals_are_kept_until_their_tensors_change(device: torch.device, write: str) -> None:
    tensors = tensors_on(device)
    mask = Mask(causal=True, query_lengths=[5, 3], **tensors)
    first = mask.intervals(2, 1, 5, 5)
    assert mask.intervals(2, 1, 5, 5, device) is first
    change, anew = (WRITES | WRITES_ON_CPU)[write]
    change(*tensors.values())
    assert (mask.intervals(2, 1, 5, 5) is not first) == anew
    if device == CPU:
        assert torch.equal(mask.to_dense(2, 1, 5, 5), copy.copy(mask).to_dense(2, 1, 5, 5))


def test_intervals_are_of_one_call_alone() -> None:
    """Of its mask, its sizes and its device."""
    mask = every_kind()
    first = mask.intervals(2, 1, 5, 5, CPU)
    assert mask.intervals(2, 1, 5, 5, CPU) is first
    assert copy.copy(mask).intervals(2, 1, 5, 5, CPU) is not first
    assert mask.intervals(2, 4, 5, 5, CPU) is not first
    wide = Mask(key_lengths=[4])
    assert [bound(wide.intervals(1, 1, T, 4)).shape[1] for T in (2, 3, 2)] == [2, 3, 2]
    assert bound(wide.intervals(1, 1, 2, 4, "meta")).device == META


def bound(intervals: Intervals) -> Tensor:
    return intervals.k_hi.squeeze(1)  # of all heads


def test_intervals_are_equal_to_themselves_alone() -> None:
    """Comparing tensors gives tensors, which are neither true nor false."""
    mask = Mask(key_lengths=longs(4, 5))
    one, other = (mask.compute_intervals(2, 1, 5, 5, "cpu") for _ in range(2))
    assert one == one
    assert one != other
    assert len({one, other}) == 2


@pytest.mark.parametrize("make", [Mask, lambda **tensors: Mask(**tensors).snapshot()])
def test_what_is_kept_belongs_to_its_mode(make: Callable[..., Mask]) -> None:
    """A tensor made in inference mode cannot be saved for a backward pass; fake tensors are of their mode."""
    mask = make(key_lengths=longs(3, 4))
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert bound(mask.intervals(2, 1, 4, 4)).is_inference() == inference
    with torch.inference_mode():
        mask = make(key_lengths=longs(3, 4), key_mask=torch.ones(2, 4, dtype=torch.bool))
        mask = mask & as_mask(torch.ones(4, 4, dtype=torch.bool), (2, 1, 4, 4))
    tensors = [each for each in mask.intervals(2, 1, 4, 4) if isinstance(each, Tensor)]
    assert len(tensors) == 4
    assert not any(each.is_inference() for each in tensors)
    mask = make(key_lengths=longs(3, 4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask.intervals(2, 1, 4, 4)
    assert type(bound(mask.intervals(2, 1, 4, 4))) is Tensor


def test_a_snapshot_is_not_changed_by_writes() -> None:
    real = all_real(2, 5)
    mask = Mask(causal=True, key_mask=real) & Mask(key_lengths=[4, 5])
    snapshot, before = mask.snapshot(), mask.to_dense(2, 1, 5, 5)
    first = snapshot.intervals(2, 1, 5, 5, CPU)
    real[:, 1] = False
    assert torch.equal(snapshot.to_dense(2, 1, 5, 5), before)
    assert not torch.equal(mask.to_dense(2, 1, 5, 5), before)
    assert snapshot.intervals(2, 1, 5, 5, CPU) is first
    assert snapshot.intervals(2, 1, 3, 5, CPU) is not first


@pytest.mark.parametrize("argument", ["key_lengths", "query_lengths", "prefix_lengths"])
def test_bounds_are_not_in_the_memory_of_lengths(argument: str) -> None:
    lengths = torch.ones(2, dtype=torch.int32)
    bounds = bound(Mask(causal=True, **{argument: lengths}).intervals(2, 1, 1, 1))
    lengths.zero_()
    assert bounds.tolist() == [[1], [1]]


# ---------------------------------------------------------------------- streams and graphs of a GPU
def test_intervals_of_another_stream_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have to wait for the one that they were computed on."""
    mask = Mask(**tensors_on(META))
    first, copied = mask.intervals(2, 1, 5, 5), kept.lengths_on(META, (1, 2))
    assert kept.lengths_on(META, (1, 2)) is copied  # a list is copied once
    monkeypatch.setattr(kept, "_stream", lambda device: 7)
    assert mask.intervals(2, 1, 5, 5) is not first
    assert kept.lengths_on(META, (1, 2)) is not copied


def test_tensors_of_inference_mode_count_no_writes() -> None:
    with torch.inference_mode():
        mask = Mask(**tensors_on(META))
        assert mask.intervals(2, 1, 5, 5) is not mask.intervals(2, 1, 5, 5)


def test_a_captured_graph_has_tensors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept before is not used in it, for its replays read tensors anew; what belongs to it is not kept."""
    mask = Mask(**tensors_on(META), query_lengths=[5, 3])
    before = mask.intervals(2, 1, 5, 5)
    distances = kept.distances_on(META, 5)
    assert kept.distances_on(META, 5) is distances
    with monkeypatch.context() as patched:
        for module in (kept, mask_module):
            patched.setattr(module, "capturing", lambda device: True)
        captured = [mask.intervals(2, 1, 5, 5) for _ in range(2)]
        assert kept.distances_on(META, 5) is not distances
        patched.setattr(kept, "_lengths", None)  # no copy from the host, which no graph can hold
        filled = kept.lengths_on(META, (3, 4))
    assert (filled.shape, filled.dtype) == ((2,), torch.int64)
    assert kept._filled((3, 0, 7), CPU).tolist() == [3, 0, 7]
    after = [mask.intervals(2, 1, 5, 5) for _ in range(2)]  # replays write, and nobody counts it
    assert len({before, *captured, *after}) == 5


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_nothing_waits_for_the_device(device: str) -> None:
    """Tensors without values raise where one would be read; fake CPU tensors have none either."""
    with FakeTensorMode() if device == "cpu" else contextlib.nullcontext():
        mask = pytree.tree_map(lambda leaf: torch.empty_like(leaf, device=device), every_kind())
        mask = mask & Mask.from_cu_seqlens(torch.empty(3, dtype=torch.int32, device=device), 5)
        intervals = mask.intervals(2, 1, 5, 5, torch.device(device))
        assert {intervals.k_lo.device.type, intervals.k_hi.device.type} == {device}
        assert intervals.visible_pairs(2, 5, 5).device.type == device
        assert mask.to_dense(2, 1, 5, 5).device.type == device
        with pytest.raises(RuntimeError):
            intervals.visible_pairs(2, 5, 5).tolist()  # as a read would


@pytest.mark.parametrize("T", [1, 5])
def test_a_key_mask_takes_few_kernels(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the span of the real keys."""
    distances = kept.distances_on(CPU, 6)
    monkeypatch.setattr(terms, "distances_on", lambda device, S: distances)
    real = torch.rand(3, 6) > 0.4
    real[2] = False
    with Ops() as ops:
        intervals = Mask(key_mask=real).intervals(3, 1, T, 6)
    assert sum(not op.is_view for op, *_ in ops.ran) <= 4
    places = [[j for j in range(6) if row[j]] for row in real.tolist()]
    assert intervals.k_lo.tolist() == [[[min(row, default=6)] * T] for row in places]
    assert bound(intervals).tolist() == [[max(row, default=-1) + 1] * T for row in places]


# ---------------------------------------------------------------------- compiled and exported
def seen(query: Tensor, mask: Mask, S: int) -> tuple[Tensor, Tensor]:
    B, H, T, _ = query.shape
    intervals = mask.intervals(B, H, T, S, query.device)
    return intervals.to_dense(T, S).expand(B, H, T, S), intervals.visible_pairs(B, T, S)


def built_inside(query: Tensor, lengths: Tensor, key_mask: Tensor, ids: Tensor, borders: Tensor) -> tuple[Tensor, ...]:
    S = key_mask.shape[1]
    mask = Mask(causal="lower_right", window=(3, 0), key_lengths=lengths, key_mask=key_mask)
    mask = mask & Mask(query_lengths=lengths, query_mask=key_mask[:1], document_ids=ids)
    mask = mask & Mask(causal=True, prefix_lengths=lengths) & Mask.from_cu_seqlens(borders, S)
    return (
        *seen(query, mask, S),
        *seen(query, as_mask(key_mask[:, None, None], (2, 1, S, S)), S),
        *seen(query, as_mask(key_mask[:, None, :, None], (2, 1, S, S)), S),
        *seen(query, as_mask(key_mask[0, None] & key_mask[0, :, None], (2, 1, S, S)), S),
        *seen(query, as_mask(None, (2, 1, S, S)) & Mask(key_lengths=[2, 3]), S),
        *seen(query.expand(2, 2, S, 4), Mask(window=[(-1, 0), (2, 1)], first_keys=lengths), S),
    )


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.check)])
def test_masks_built_inside_a_compiled_function(dynamic: bool) -> None:
    """One graph for all sizes if they are dynamic."""
    graphs = CompileCounter()
    backend = graphs if dynamic else "aot_eager"
    compiled = torch.compile(built_inside, fullgraph=True, backend=backend, dynamic=dynamic)
    for S in (5, 8, 11) if dynamic else (5,):
        ids, borders = torch.arange(S) // 3, longs(0, 2, S)
        key_mask = torch.rand(2, S) > 0.3
        inputs = torch.zeros(2, 1, S, 4), longs(S - 1, S), key_mask, ids, borders
        torch.testing.assert_close(compiled(*inputs), built_inside(*inputs), rtol=0.0, atol=0.0)
    assert graphs.frame_count == dynamic


def test_one_compiled_graph_serves_every_length() -> None:
    """Lengths are data: new values make no new graph, and they are clamped, unread."""
    graphs = CompileCounter()
    compiled = torch.compile(
        lambda lengths: bound(Mask(key_lengths=lengths).intervals(2, 1, 2, 5)), fullgraph=True, backend=graphs
    )
    for lengths, k_hi in (((1, 2), [[1, 1], [2, 2]]), ((-1, 99), [[0, 0], [5, 5]])):
        assert compiled(longs(*lengths)).tolist() == k_hi
    assert graphs.frame_count == 1
