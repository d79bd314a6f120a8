"""`prepare_mask` against transformers' own `sdpa_mask`, for all that transformers' mask functions say."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves
from transformers import masking_utils as stock

import heads_kernels as hk
from heads_kernels.integrations.transformers.attention import attention_forward
from heads_kernels.integrations.transformers.masks import PreparedMask, computes_with_masks, prepare_mask
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused
from tests.support.tiny_models import build, outputs

B = 3
WINDOW = 3


def padding(length: int) -> Tensor:
    """A row whole, one padded on the right, one on the left, which may have a hole too."""
    real = torch.ones(B, length, dtype=torch.bool)
    real[1, length - 2 :] = False
    real[2, :2] = False
    if length > 6:
        real[2, 5] = False
    return real


def both(**arguments: Any) -> tuple[Any, Tensor]:
    """What `prepare_mask` makes of a call, and the dense mask of stock."""
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "device": "cpu"}
    return prepare_mask(**arguments), stock.sdpa_mask(**arguments | whole)


def dense_of(found: PreparedMask) -> Tensor:
    """`[B, 1, T, S]`, True = may attend."""
    if isinstance(found.mask, Tensor):
        return found.mask
    return found.mask.to_dense(*found.shape).expand(found.shape)


def assert_same(found: Any, dense: Tensor) -> None:
    assert isinstance(found, PreparedMask)
    assert torch.equal(dense_of(found), dense)
    assert found.shape == tuple(dense.shape)


#: (T, S, position of the first row, position of the first key): whole, with a growing cache, while decoding, with a
#: sliding cache, and in a static cache that is not full.
SHAPES = [(9, 9, 0, 0), (4, 9, 5, 0), (1, 9, 8, 0), (2, 6, 7, 3), (1, 4, 6, 3), (5, 9, 0, 0)]
CHUNKS = transformers.LlamaConfig(attention_chunk_size=WINDOW)
PATTERNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal": (lambda: stock.causal_mask_function, {}),
    "sliding": (lambda: stock.sliding_window_causal_mask_function(WINDOW), {"local_size": WINDOW}),
    "chunked": (
        lambda: stock.chunked_causal_mask_function(WINDOW, torch.tensor([0, 0, 2])),
        {"local_size": WINDOW, "config": CHUNKS},
    ),
    "bidirectional": (lambda: stock.bidirectional_mask_function, {"allow_is_bidirectional_skip": True}),
    "both sides": (
        lambda: stock.sliding_window_bidirectional_mask_function(WINDOW),
        {"local_size": WINDOW, "allow_is_bidirectional_skip": True},
    ),
}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str, shape: tuple[int, int, int, int], padded: bool) -> None:
    function, extra = PATTERNS[pattern]
    T, S, q_offset, kv_offset = shape
    real = padding(q_offset + T) if padded else None
    offsets = {"q_offset": q_offset, "kv_offset": kv_offset}
    sizes = {"batch_size": B, "q_length": T, "kv_length": S, **offsets}
    found, dense = both(**sizes, mask_function=function(), attention_mask=real, **extra)
    if pattern == "bidirectional" and not padded:
        assert found is None
    else:
        assert_same(found, dense)


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_packed_sequences(window: int | None, chunk: bool) -> None:
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
    ids = stock.find_packed_sequence_indices(position_ids)
    if window is None:
        function = stock.causal_mask_function
    elif chunk:
        function = stock.chunked_causal_mask_function(window, torch.zeros(2, dtype=torch.int64))
    else:
        function = stock.sliding_window_causal_mask_function(window)
    if hasattr(stock, "remap_positions_for_packed_sequence"):  # since transformers 5.24
        function = stock.remap_positions_for_packed_sequence(function, position_ids)
        function = stock.and_masks(function, stock.packed_sequence_mask_function(ids))
    else:
        function = stock.packed_sequence_compatibility_function(function, position_ids, ids)
    assert_same(*both(batch_size=2, q_length=8, kv_length=8, mask_function=function, local_size=window))


TURNS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]] * 2)
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]] * 2)


def with_blocks(blocks: Tensor, documents: Tensor) -> Any:
    """Causal within documents, but for blocks of tokens that see one another."""

    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (blocks[b, i] == blocks[b, j]) & (blocks[b, i] >= 0)

    function = stock.or_masks(stock.causal_mask_function, same)
    return stock.and_masks(function, lambda b, h, i, j: documents[b, i] == documents[b, j])


@pytest.mark.check
def test_blocks_in_compiled_code_are_refused() -> None:
    """There nothing says that the function has blocks but its values."""

    def prepared(blocks: Tensor, documents: Tensor) -> Tensor:
        found = prepare_mask(2, 8, 8, mask_function=with_blocks(blocks, documents))
        return dense_of(found)

    compiled = torch.compile(prepared, fullgraph=True)
    without = torch.full_like(TURNS, -1)
    assert torch.equal(compiled(without, DOCUMENTS), prepared(without, DOCUMENTS))
    with pytest.raises(RuntimeError, match="has blocks of tokens that see one another"):
        compiled(TURNS, DOCUMENTS)


BLOCKS = torch.tensor([[0, 0, 0, -1, 1, 1]] * B)
CALLER = {"batch_size": B, "q_length": 6, "kv_length": 6, "attention_mask": padding(6), "use_vmap": True}
DECODING = {"batch_size": B, "q_length": 1, "kv_length": 12}
#: Mask functions and calls for which no `hk.Mask` is made: functions of the caller, blocks that see themselves,
#: and decoding in a static cache, whose offset is a tensor: the mask is a key mask by its shape.
DENSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "or": (lambda: stock.or_masks(stock.causal_mask_function, lambda b, h, i, j: j < 3), CALLER),
    "and": (lambda: stock.and_masks(stock.causal_mask_function, lambda b, h, i, j: j < 3), CALLER),
    "block": (
        lambda: stock.or_masks(stock.causal_mask_function, stock.blockwise_overlay(BLOCKS)),
        CALLER | {"use_vmap": False},
    ),
    "packed": (lambda: with_blocks(TURNS, DOCUMENTS), {"batch_size": 2, "q_length": 8, "kv_length": 8}),
    **{
        f"static cache, {what}": (
            lambda: stock.causal_mask_function,
            DECODING | {"q_offset": torch.tensor(n - 1), "attention_mask": padding(n)},
        )
        for what, n in (("half full", 7), ("full", 12))
    },
}


@pytest.mark.parametrize("name", DENSE)
def test_what_stays_dense(name: str) -> None:
    function, call = DENSE[name]
    found, dense = both(mask_function=function(), **call)
    assert isinstance(found.mask, Tensor)
    assert_same(found, dense)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_nobody_looks_at_values(pattern: str) -> None:
    """Fake tensors have no values: looking at one raises."""
    function, extra = PATTERNS[pattern]
    with FakeTensorMode():
        mask = prepare_mask(B, 9, 9, mask_function=function(), attention_mask=torch.ones(B, 9).bool(), **extra)
        query = torch.randn(B, 2, 9, 8)
        assert isinstance(mask, PreparedMask)
        assert hk.gated_attention(query, query, query, attn_mask=mask.mask).shape == query.shape


@pytest.mark.parametrize("causal", [False, True])
def test_windows_of_a_layer_that_is_called_without_a_mask(causal: bool) -> None:
    """As in flash attention: a row sees so many keys up to its own, and without `is_causal` as many from there."""
    module, query = build("bert").encoder.layer[0].attention.self, torch.randn(B, 2, 9, 8)
    out, _ = attention_forward(module, query, query, query, None, is_causal=causal, sliding_window=WINDOW)
    offsets = torch.arange(9) - torch.arange(9)[:, None]
    visible = (offsets.abs() < WINDOW) & ((offsets <= 0) | (not causal))
    assert_alike(out.transpose(1, 2), hk.gated_attention(query, query, query, attn_mask=visible))


def test_layers_share_intervals() -> None:
    """One mask a pass: the intervals are computed once."""
    model = build("llama", "heads_kernels")
    seen = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    outputs(model)
    assert seen[0] is seen[1]
    assert seen[0].mask.intervals(3, 8, 9, 9) is seen[1].mask.intervals(3, 8, 9, 9)


# ---------------------------------------------------------------------- a mask that only the package reads
def prepared() -> tuple[PreparedMask, Tensor]:
    mask = hk.Mask(causal=True, key_mask=padding(5))
    return PreparedMask(mask, (B, 1, 5, 5), "cpu"), mask.to_dense(B, 1, 5, 5)


def test_it_has_the_shape_of_a_tensor_and_can_be_handed_on() -> None:
    mask, dense = prepared()
    assert isinstance(mask, BlockMask)
    assert (mask.dtype, mask.ndim, mask.dim(), len(mask.shape)) == (torch.bool, 4, 4, 4)
    assert (mask.size(), mask.size(-1)) == (tuple(dense.shape), 5)
    assert mask.contiguous() is mask
    assert mask.to(torch.bool) is mask
    moved = mask.to("meta")
    assert {tensor.device.type for tensor in tree_leaves(moved.mask)} == {"meta"}
    assert dense_of(mask.to("cpu", non_blocking=True)).equal(dense)


def test_it_refuses_to_be_computed_with() -> None:
    mask, scores = prepared()[0], torch.randn(B, 1, 5, 5)
    computations: tuple[Callable[[], object], ...] = (
        lambda: scores + mask,
        lambda: (mask * -1e4) + scores,
        lambda: 1.0 - mask,
        lambda: mask[:, :, :, :3],
        lambda: ~mask,
        lambda: mask > 0,
        lambda: bool(mask),
        lambda: mask.to(scores),
        lambda: mask.float(),
        lambda: mask.to_dense(),
        lambda: torch.where(mask, scores, -1e4),
        lambda: nn.functional.scaled_dot_product_attention(scores, scores, scores, mask),
    )
    refusal = r"attention_mask of .* is computed with \(.*\); load the model with"
    assert_refused(*((each, ValueError, refusal) for each in computations))


def test_it_survives_copies_and_pickles() -> None:
    mask, dense = prepared()
    for found in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(dense_of(found), dense)
    assert repr(mask) == str(mask)
    assert "key_mask=bool[3, 5]" in repr(mask)


def test_classes_that_compute_with_masks() -> None:
    """Those that `fully_shard` makes of them too, by other names."""
    from transformers.models.git.modeling_git import GitSelfAttention

    sharded = type("FSDPGitSelfAttention", (GitSelfAttention,), {})
    assert computes_with_masks(sharded) == computes_with_masks(GitSelfAttention) is not None
    assert computes_with_masks(nn.Linear) is None


def test_a_mask_stays_as_it_was_made() -> None:
    """Within a pass nothing compares it; a write to the caller's padding belongs to the next pass."""
    real = padding(9)
    made = prepare_mask(batch_size=B, q_length=9, kv_length=9, attention_mask=real)
    assert isinstance(made.mask, hk.Mask)
    before = made.mask.to_dense(B, 1, 9, 9)
    real[:] = True
    assert torch.equal(made.mask.to_dense(B, 1, 9, 9), before)
    after = prepare_mask(batch_size=B, q_length=9, kv_length=9, attention_mask=real)
    assert not torch.equal(dense_of(after)[:, 0], before[:, 0])
