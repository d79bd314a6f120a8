"""Intervals of a mask: worked out once, waiting for no device, compiled and exported."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from heads_kernels.mask import Mask, as_mask, kept, terms
from heads_kernels.mask import mask as mask_module
from tests.mask.masks import all_real, every_kind, in_a_call, longs


# ---------------------------------------------------------------------- worked out once
def test_intervals_are_kept_for_the_same_call() -> None:
    mask = every_kind()
    first = mask.intervals(2, 1, 5, 5, torch.device("cpu"))
    assert mask.intervals(2, 1, 5, 5, torch.device("cpu")) is first
    assert copy.copy(mask).intervals(2, 1, 5, 5, torch.device("cpu")) is not first
    wide = Mask(key_lengths=longs(4))
    assert [wide.intervals(1, 1, T, 4).k_hi.shape[1] for T in (2, 3, 2)] == [2, 3, 2]  # type: ignore[union-attr]


def test_a_snapshot_is_not_changed_by_writes() -> None:
    real = all_real(2, 5)
    mask = Mask(causal=True, key_mask=real) & Mask(key_lengths=[4, 5])
    snapshot = mask.snapshot()
    real[:, 1] = False
    assert torch.equal(
        snapshot.to_dense(2, 1, 5, 5),
        (Mask(causal=True) & Mask(key_lengths=[4, 5])).to_dense(2, 1, 5, 5),
    )
    assert not torch.equal(snapshot.to_dense(2, 1, 5, 5), mask.to_dense(2, 1, 5, 5))


def test_intervals_of_a_snapshot_are_kept_without_comparing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = every_kind().snapshot()
    cpu = torch.device("cpu")
    first = snapshot.intervals(2, 1, 5, 5, cpu)
    monkeypatch.delattr(mask_module, "state_of")
    assert snapshot.intervals(2, 1, 5, 5, cpu) is first


def test_a_snapshot_keeps_what_the_call_was() -> None:
    """Its sizes, and whether it is in inference mode."""
    snapshot = Mask(key_mask=all_real(1, 4)).snapshot()
    cpu = torch.device("cpu")
    first = snapshot.intervals(1, 1, 2, 4, cpu)
    assert snapshot.intervals(1, 1, 3, 4, cpu) is not first
    with torch.inference_mode():
        assert snapshot.intervals(1, 1, 3, 4, cpu).k_hi.is_inference()  # type: ignore[union-attr]
    assert not snapshot.intervals(1, 1, 3, 4, cpu).k_hi.is_inference()  # type: ignore[union-attr]


def test_intervals_of_lists_are_kept() -> None:
    mask = Mask(causal=True, key_lengths=[4, 5])
    first = mask.intervals(2, 1, 5, 5)
    assert mask.intervals(2, 1, 5, 5, torch.device("cpu")) is first
    assert mask.intervals(2, 1, 5, 5, "meta").k_hi.device.type == "meta"  # type: ignore[union-attr]


def test_intervals_are_equal_to_themselves_alone() -> None:
    """Comparing tensors gives tensors, which are neither true nor false."""
    mask = Mask(key_lengths=longs(4, 5))
    one, other = (mask.work_out(2, 1, 5, 5, "cpu") for _ in range(2))
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def test_a_tensor_of_another_shape_or_dtype_is_read_again() -> None:
    """Its bytes may be the same."""
    real = torch.tensor([[True, False]])
    mask = Mask(key_mask=real)
    before = mask.intervals(2, 1, 2, 2)
    real.resize_(2, 1)
    with pytest.raises(ValueError, match="key_mask"):
        mask.intervals(2, 1, 2, 2)
    real.resize_(1, 2)
    assert mask.intervals(2, 1, 2, 2) is before
    lengths = torch.tensor([1, 0], dtype=torch.int32)
    mask = Mask(key_lengths=lengths)
    assert mask.intervals(2, 1, 2, 2).k_hi.tolist() == [[1, 1], [0, 0]]  # type: ignore[union-attr]
    lengths.data = torch.tensor([1])
    assert mask.intervals(2, 1, 2, 2).k_hi.tolist() == [[1, 1]]  # type: ignore[union-attr]


@pytest.mark.parametrize("write", ["torch", "numpy", "data"])
@pytest.mark.parametrize("argument", ["key_lengths", "key_mask"])
def test_tensors_written_in_place_are_read_again(argument: str, write: str) -> None:
    tensor = longs(3, 4) if argument == "key_lengths" else torch.ones(2, 4, dtype=torch.bool)
    mask = Mask(**{argument: tensor})
    before = mask.to_dense(2, 1, 4, 4)
    if write == "torch":
        tensor[1] = 0
    elif write == "numpy":
        tensor.numpy()[1] = 0
    else:
        tensor.data[1] = 0
    after = mask.to_dense(2, 1, 4, 4)
    assert torch.equal(after[0], before[0])
    assert before[1].any()
    assert not after[1].any()


def test_intervals_kept_in_inference_mode_are_not_those_of_training() -> None:
    """A tensor made in inference mode cannot be saved for a backward pass."""
    mask = Mask(key_lengths=longs(3, 4))
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            k_hi = mask.intervals(2, 1, 4, 4).k_hi
        assert k_hi is not None
        assert k_hi.is_inference() == inference


def test_intervals_of_fake_tensors_are_not_kept() -> None:
    mask = Mask(key_lengths=longs(3, 4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask.intervals(2, 1, 4, 4)
    assert type(mask.intervals(2, 1, 4, 4).k_hi) is Tensor


def test_kept_intervals_do_not_compile_again() -> None:
    torch.compiler.reset()
    mask, query = every_kind(), torch.zeros(2, 1, 5, 4)
    compiled = torch.compile(lambda q: _seen(q, mask, 5), fullgraph=True, backend="eager")
    for stance in ("default", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            got = compiled(query)
        for a, b in zip(got, _seen(query, mask, 5), strict=True):
            assert torch.equal(a, b)


# ---------------------------------------------------------------------- kept where a look would wait
META = torch.device("meta")


def on_meta() -> dict[str, Tensor]:
    """Tensors whose values nobody can look at, as on a GPU."""
    return {
        "key_lengths": torch.zeros(2, dtype=torch.int64, device="meta"),
        "key_mask": torch.zeros(2, 5, dtype=torch.bool, device="meta"),
    }


def worked_out(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one whenever the intervals of `mask` are worked out."""
    calls: list[object] = []
    work_out = Mask.work_out

    def counted(self: Mask, *sizes: object) -> object:
        calls.append(sizes)
        return work_out(self, *sizes)

    monkeypatch.setattr(Mask, "work_out", counted)
    return calls


def test_the_layers_of_a_model_share_intervals_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = on_meta()
    mask = Mask(causal=True, **tensors, query_lengths=[5, 3])
    calls = worked_out(mask, monkeypatch)
    first = mask.intervals(2, 1, 5, 5)
    assert all(mask.intervals(2, 1, 5, 5) is first for _ in range(3))
    assert len(calls) == 1
    mask.intervals(2, 4, 5, 5)
    tensors["key_lengths"].add_(1)
    mask.intervals(2, 4, 5, 5)
    tensors["key_mask"][0].zero_()  # a view of it
    mask.intervals(2, 4, 5, 5)
    tensors["key_mask"].data = torch.zeros(1, 5, dtype=torch.bool, device="meta")
    mask.intervals(2, 4, 5, 5)
    assert len(calls) == 5


def test_intervals_of_another_stream_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have to wait for the one that they were worked out on."""
    mask = Mask(**on_meta())
    first = mask.intervals(2, 1, 5, 5)
    monkeypatch.setattr(kept, "_stream", lambda device: 7)
    assert mask.intervals(2, 1, 5, 5) is not first
    assert kept.lengths_on(META, (1, 2)) is kept.lengths_on(META, (1, 2))
    copied = kept.lengths_on(META, (1, 2))
    monkeypatch.setattr(kept, "_stream", lambda device: 8)
    assert kept.lengths_on(META, (1, 2)) is not copied


def test_tensors_of_inference_mode_count_no_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        mask = Mask(**on_meta())
        assert mask.intervals(2, 1, 5, 5) is not mask.intervals(2, 1, 5, 5)


def test_a_captured_graph_has_its_own_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept before is not used in it, for its replays read tensors anew; what belongs to it is not kept."""
    mask = Mask(**on_meta(), query_lengths=[5, 3])
    before = mask.intervals(2, 1, 5, 5)
    with monkeypatch.context() as patched:
        for module in (kept, mask_module):
            patched.setattr(module, "capturing", lambda device: True)
        captured = [mask.intervals(2, 1, 5, 5) for _ in range(2)]
    after = [mask.intervals(2, 1, 5, 5) for _ in range(2)]  # replays write, and nobody counts it
    assert len({before, *captured, *after}) == 5


def test_a_list_of_lengths_is_copied_once() -> None:
    one, same = (kept.lengths_on(META, (3, 4)) for _ in range(2))
    assert one is same
    assert kept.lengths_on(META, (3, 5)) is not one
    with torch.inference_mode():
        assert not kept.lengths_on(META, (8, 9)).is_inference()
    with FakeTensorMode():
        assert kept.lengths_on(META, (3, 4)) is not one


def test_a_captured_graph_holds_no_copy_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "capturing", lambda device: True)
    monkeypatch.setattr(kept, "_copied", None)
    filled = kept.lengths_on(META, (3, 4))
    assert (filled.shape, filled.dtype) == ((2,), torch.int64)
    assert kept._filled((3, 0, 7), torch.device("cpu")).tolist() == [3, 0, 7]
    assert kept._filled((), torch.device("cpu")).shape == (0,)


# ---------------------------------------------------------------------- no waiting for a device
def _every_tensor(device: str) -> Mask:
    def made(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    mask = Mask(
        causal="lower_right",
        window=(3, 0),
        key_lengths=made(2),
        query_lengths=made(2, dtype=torch.int32),
        key_mask=made(2, 5, dtype=torch.bool),
        query_mask=made(1, 5, dtype=torch.bool),
        document_ids=made(2, 5),
    )
    mask = mask & Mask.from_cu_seqlens(made(3, dtype=torch.int32), 5)
    return mask & Mask(causal=True, prefix_lengths=made(1))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_nothing_waits_for_the_device(device: str) -> None:
    """Tensors without values raise where one would be read; fake CPU tensors have none either."""
    with FakeTensorMode() if device == "cpu" else contextlib.nullcontext():
        mask = _every_tensor(device)
        intervals = mask.intervals(2, 1, 5, 5, torch.device(device))
        assert {vector.device.type for vector in (intervals.k_lo, intervals.k_hi)} == {device}  # type: ignore[union-attr]
        assert intervals.visible_pairs(2, 5, 5).device.type == device
        assert mask.to_dense(2, 1, 5, 5).device.type == device
        with pytest.raises(RuntimeError):
            intervals.visible_pairs(2, 5, 5).tolist()  # as a read would


def test_a_device_without_index_is_any_of_its_type() -> None:
    with FakeTensorMode():
        mask = Mask(query_mask=torch.empty(2, 4, dtype=torch.bool, device="cuda:1"))
        for device in ("cuda", "cuda:1"):
            assert in_a_call(mask, device).k_hi.device == torch.device("cuda:1")  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="query_mask is on cuda:1, but query is on cuda:0"):
            in_a_call(mask, "cuda:0")


# ---------------------------------------------------------------------- compiled and exported
def _seen(query: Tensor, mask: Mask, S: int) -> tuple[Tensor, Tensor]:
    B, H, T, _ = query.shape
    intervals = mask.intervals(B, H, T, S, query.device)
    return intervals.to_dense(T, S).expand(B, -1, T, S), intervals.visible_pairs(B, T, S)


def _built_inside(
    query: Tensor, lengths: Tensor, key_mask: Tensor, ids: Tensor, borders: Tensor
) -> tuple[Tensor, ...]:
    S = key_mask.shape[1]
    mask = Mask(causal="lower_right", window=(3, 0), key_lengths=lengths, key_mask=key_mask)
    mask = mask & Mask(query_lengths=lengths, query_mask=key_mask[:1], document_ids=ids)
    mask = mask & Mask(causal=True, prefix_lengths=lengths) & Mask.from_cu_seqlens(borders, S)
    return (
        *_seen(query, mask, S),
        *_seen(query, as_mask(key_mask[:, None, None], (2, 1, S, S)), S),
        *_seen(query, as_mask(key_mask[:, None, :, None], (2, 1, S, S)), S),
        *_seen(query, as_mask(key_mask[0, None] & key_mask[0, :, None], (2, 1, S, S)), S),
        *_seen(query, as_mask(None, (2, 1, S, S)) & Mask(key_lengths=[2, 3]), S),
    )


def _inputs(S: int) -> tuple[Tensor, ...]:
    key_mask = torch.rand(2, S) > 0.3
    ids = torch.arange(S) // 3
    return torch.zeros(2, 1, S, 4), longs(S - 1, S), key_mask, ids, longs(0, 2, S)


def test_masks_built_inside_a_compiled_function() -> None:
    torch.compiler.reset()
    compiled = torch.compile(_built_inside, fullgraph=True, backend="aot_eager", dynamic=False)
    inputs = _inputs(5)
    for got, expected in zip(compiled(*inputs), _built_inside(*inputs), strict=True):
        assert torch.equal(got, expected)


def test_one_compiled_graph_serves_every_size() -> None:
    torch.compiler.reset()
    graphs = CompileCounter()
    compiled = torch.compile(_built_inside, fullgraph=True, backend=graphs, dynamic=True)
    for S in (5, 8, 11):
        inputs = _inputs(S)
        for got, expected in zip(compiled(*inputs), _built_inside(*inputs), strict=True):
            assert torch.equal(got, expected)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_passed_into_a_compiled_function(dynamic: bool) -> None:
    torch.compiler.reset()
    closed_over = every_kind()

    def call(query: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        return _seen(query, mask & closed_over, 5)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    query = torch.zeros(2, 1, 5, 4)
    for mask in (Mask(), Mask(causal=True, key_lengths=longs(3, 4)), every_kind()):
        for got, expected in zip(compiled(query, mask), call(query, mask), strict=True):
            assert torch.equal(got, expected)


def _built_from(lengths: Tensor) -> Mask:
    return Mask(key_lengths=lengths)


@pytest.mark.parametrize("inside", [True, False])
def test_one_compiled_graph_serves_every_length(inside: bool) -> None:
    """Lengths are data: new values make no new graph, and inside it they are clamped, unread."""
    torch.compiler.reset()
    graphs = CompileCounter()

    def call(given: Tensor | Mask) -> Tensor | None:
        mask = given if isinstance(given, Mask) else _built_from(given)
        return mask.intervals(2, 1, 2, 5).k_hi

    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for lengths, k_hi in (
        ((1, 2), [[1, 1], [2, 2]]),
        ((0, 1), [[0, 0], [1, 1]]),
        ((-1, 99), [[0, 0], [5, 5]]),
    ):
        given = longs(*lengths) if inside else _built_from(longs(*lengths))
        assert compiled(given).tolist() == k_hi
    assert graphs.frame_count == 1


class _Attends(torch.nn.Module):
    def forward(self, query: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        return _seen(query, mask & Mask(causal="lower_right", window=(2, 0)), 5)


@pytest.mark.parametrize("strict", [False, True])
def test_export_takes_a_mask_as_input(strict: bool) -> None:
    query = torch.zeros(2, 1, 5, 4)
    program = torch.export.export(_Attends(), (query, every_kind()), strict=strict)
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    other = pytree.tree_map(
        lambda leaf: leaf.flip(-1) if leaf.dtype == torch.bool else leaf, every_kind()
    )
    for mask in (every_kind(), other):
        for got, expected in zip(loaded(query, mask), _Attends()(query, mask), strict=True):
            assert torch.equal(got, expected)


def test_export_with_a_dynamic_length() -> None:
    class Padded(torch.nn.Module):
        def forward(self, query: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
            mask = Mask(causal="lower_right", window=(2, 0), key_mask=real) & Mask(causal=True)
            return _seen(query, mask, real.shape[1])

    T, S = torch.export.Dim("T", min=2, max=64), torch.export.Dim("S", min=2, max=64)
    program = torch.export.export(
        Padded(),
        (torch.zeros(2, 1, 4, 3), all_real(2, 7)),
        dynamic_shapes={"query": {2: T}, "real": {1: S}},
        strict=False,
    ).module()
    for t, s in ((3, 9), (9, 3), (2, 2)):
        query, real = torch.zeros(2, 1, t, 3), torch.rand(2, s) > 0.3
        for got, expected in zip(program(query, real), Padded()(query, real), strict=True):
            assert torch.equal(got, expected)


# ---------------------------------------------------------------------- what they cost, and whose memory they are
class Kernels(TorchDispatchMode):
    """Counts the ops that run a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("T", [1, 5])
def test_a_key_mask_takes_few_kernels(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    distances = kept.distances_on(torch.device("cpu"), 6)
    assert kept.distances_on(torch.device("cpu"), 6) is distances
    monkeypatch.setattr(terms, "distances_on", lambda device, S: distances)
    real = torch.rand(3, 6) > 0.4
    with Kernels() as kernels:
        intervals = Mask(key_mask=real).intervals(3, 1, T, 6)
    assert kernels.count <= 4
    places = [[j for j in range(6) if row[j]] for row in real.tolist()]
    assert intervals.k_lo is not None
    assert intervals.k_hi is not None
    assert intervals.k_lo.tolist() == [[min(row, default=6)] * T for row in places]
    assert intervals.k_hi.tolist() == [[max(row, default=-1) + 1] * T for row in places]
    for bound in (intervals.k_lo, intervals.k_hi):
        assert bound.dtype == torch.int32
        assert bound.is_contiguous()


def test_distances_are_not_kept_where_they_belong_to_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = kept.distances_on(META, 5)
    assert kept.distances_on(META, 5) is before
    monkeypatch.setattr(kept, "capturing", lambda device: True)
    assert kept.distances_on(META, 5) is not before
    with FakeTensorMode():
        assert kept.distances_on(torch.device("cuda"), 5).is_cuda
    assert kept.distances_on(torch.device("cpu"), 3).tolist() == [[[3, 2, 1]], [[1, 2, 3]]]


@pytest.mark.parametrize("argument", ["key_lengths", "query_lengths", "prefix_lengths"])
def test_bounds_are_not_in_the_memory_of_lengths(argument: str) -> None:
    lengths = torch.ones(2, dtype=torch.int32)
    bounds = Mask(causal=True, **{argument: lengths}).intervals(2, 1, 1, 1).k_hi
    lengths.zero_()
    assert bounds is not None
    assert bounds.tolist() == [[1], [1]]


@pytest.mark.parametrize("positions", [[0, 1], [2], [1, 4], [], [0, 1, 2, 3, 4]])
def test_intervals_at_some_keys(positions: list[int]) -> None:
    dense = torch.rand(2, 3, 5, 5) < 0.7
    for mask in (every_kind(), every_kind() & as_mask(dense, (2, 3, 5, 5)), Mask(window=(1, 1))):
        whole = mask.intervals(2, 3, 5, 5)
        some = whole.at_keys(5, longs(*positions))
        assert torch.equal(some.to_dense(5, len(positions)), whole.to_dense(5, 5)[..., positions])
