"""Observers of a model's attention: what they see of every call, in our modules and in those of transformers.

tests/heads/test_patching.py has blocks within blocks and on other threads, and modules of a user.
"""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import heads_kernels as hk
from heads_kernels.analysis import AttentionCall
from heads_kernels.mask.terms import Dense
from heads_kernels.nn import attention_call
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.nn_layers import calls_of
from tests.support.refusals import assert_refused

REAL = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


# ---------------------------------------------------------------------- what a call knows
def test_the_arguments_of_a_call_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    mask, terms = hk.Mask(causal=True), {"scale": 0.5, "sinks": torch.ones(4)}
    unread = {"gate": torch.rand(4), "dropout_p": 0.5, "return_lse": True, "backend": "eager"}
    call = AttentionCall.of(hk.gated_attention, query, key, key, mask, **terms, **unread)
    second = torch.arange(6) == 1
    excluded = [None, second, second[None], torch.stack([second, ~second])]
    expected = [hk.attention_statistics(query, key, exclude_keys=keys, attn_mask=mask, **terms) for keys in excluded]
    assert call.real_queries.all()
    assert (call.scale, call.Hk, call.intervals.band_hi) == (0.5, 2, 1)
    assert call.sinks is terms["sinks"]
    assert AttentionCall.of(hk.entmax_attention, query, key, key).alpha.tolist() == [1.5] * 4
    assert call.flops() == call.call.flops() > 0
    assert copy.deepcopy(call).call.sizes == (2, 4, 6, 6)
    assert_refused(
        (lambda: AttentionCall.of(hk.gated_attention, query, key[..., :4], key), "key has"),
        (lambda: call.probabilities(slice(0, 6, 2)), TypeError, r"rows is slice\(0, 6, 2\); pass a slice"),
        (lambda: call.probabilities(heads=torch.tensor([True, False])), TypeError, r"heads has tensor\(True\); pass"),
    )
    monkeypatch.setattr(attention_call, "parse", None)
    for keys, statistics in zip(excluded, expected, strict=True):
        torch.testing.assert_close(call.statistics(keys)[:-1], statistics[:-1], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("how", ["mask", "bias", "offset bias"])
@pytest.mark.parametrize(("T", "S"), [(6, 6), (3, 6), (6, 3), (0, 6), (6, 0)])
@pytest.mark.parametrize("self_attention", [True, False])
def test_tokens_are_what_one_head_sees(T: int, S: int, self_attention: bool, how: str) -> None:
    """By its window and what is hidden besides together, whatever other heads see by one of them."""
    query, key, visible = torch.randn(2, 3, T, 4), torch.randn(2, 3, S, 4), torch.rand(2, 3, T, S) < 0.3
    mask, bias = hk.Mask(causal="lower_right", window=[(0, 0), (2, 0), (-1, 0)]), None
    if how == "mask":
        mask = mask & hk.Mask.of((Dense(visible),))
    elif how == "bias":
        bias = torch.where(visible, 0.0, -torch.inf)
    else:
        bias = hk.OffsetBias(torch.where(torch.rand(3, T + S) < 0.5, 0.0, -torch.inf))
    call = AttentionCall.of(hk.gated_attention, query, key, key, mask, bias=bias, self_attention=self_attention)
    seen = (call.probabilities() > 0).any(1)
    itself = torch.nn.functional.pad(seen, (T, 0))[:, torch.arange(T), call.own_keys + T]
    assert torch.equal(call.real_queries, itself if self_attention else seen.any(2))
    assert torch.equal(call.real_keys, itself if self_attention and T == S else seen.any(1))
    assert call.is_causal


HOLE = torch.tensor([[True, False, True, True]])
ALONE, CROSS, LOWEST = hk.Mask(window=(0, 0)), {"self_attention": False}, torch.finfo(torch.float32).min
#: A document with keys and no rows.
PACKED = hk.Mask(document_ids=(torch.tensor([0, 2, 2]), torch.tensor([0, 1, 1, 2, 3])))
#: Rows and keys of a call, its mask and options, and which rows or keys of it are tokens.
TOKENS: dict[str, tuple[int, int, Any, dict[str, Any], str, list[int]]] = {
    "rows before the first key": (5, 3, None, {}, "real_queries", [0, 0, 1, 1, 1]),
    "rows that see a hole alone": (4, 4, ALONE & hk.Mask(key_mask=HOLE), CROSS, "real_queries", [1, 0, 1, 1]),
    "what a table hides": (4, 4, ALONE, {"bias": hk.OffsetBias(torch.full((2, 8), LOWEST))}, "real_queries", [0] * 4),
    "keys between those that rows see": (3, 5, PACKED, CROSS, "real_keys", [1, 0, 0, 1, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_what_is_a_token(name: str) -> None:
    """In encoder-decoder attention row and key of a number are different tokens."""
    T, S, mask, options, side, expected = TOKENS[name]
    query, key = torch.randn(1, 2, T, 4), torch.randn(1, 2, S, 4)
    call = AttentionCall.of(hk.gated_attention, query, key, key, mask, **options)
    assert getattr(call, side).tolist() == [list(map(bool, expected))]


def test_a_later_key_that_is_hidden_too_is_none() -> None:
    x, dense = torch.randn(1, 2, 6, 4), torch.ones(6, 6, dtype=torch.bool).tril()
    dense[0, 5] = True
    for keys, expected in ((5, True), (6, False)):
        mask = hk.Mask.of((Dense(dense[None, None]),)) & hk.Mask(key_lengths=torch.tensor([keys]))
        assert AttentionCall.of(hk.gated_attention, x, x, x, mask).is_causal == expected


@pytest.mark.parametrize("lowest", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf, None])
def test_dense_and_float_masks_hide_padding(lowest: float | None) -> None:
    """By whatever number models hide keys, alone and with a bias of pairs; None: a bool mask."""
    layer, x = hk.nn.GatedMultiheadAttention(16, 4), torch.randn(2, 6, 16)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    for bias in (torch.zeros(1), 9 * torch.randn(4, 6, 6), torch.full((1,), -1e5)):
        for visible in (REAL[:, None, None], REAL[:, None, None] & causal):
            hidden = ~visible if lowest is None else torch.where(visible, 0.0, lowest) + bias
            [(_, call)] = calls_of(layer, x, attn_mask=hidden.expand(2, 4, 6, 6).flatten(0, 1))
            assert torch.equal(call.real_queries, REAL)
            assert torch.equal(call.real_keys, REAL)
            assert call.is_causal == (visible.shape[-2] == 6)


# ---------------------------------------------------------------------- rows of cross-attention
def test_rows_of_cross_attention_are_the_decoders_whatever_is_looked_at() -> None:
    """Never the encoder's: of sentences of one length on both sides, and where no decoder layer says which are real."""
    model, ids = hk.integrations.transformers.use(tiny_models.build("bart")), torch.arange(3, 15).view(2, 6)
    arguments = {"input_ids": ids, "attention_mask": (torch.arange(6) < torch.tensor([[3], [6]])).long()}
    arguments |= {"decoder_input_ids": ids, "decoder_attention_mask": REAL.long()}
    layers = hk.heads.attention_layers(model)
    some = [layer.index for layer in layers if layer.kind != "decoder"]
    seen = calls_of(model, layers=some, **arguments)
    assert [layer.index for layer, _ in seen] == some
    rows = [call.real_queries for layer, call in seen if layer.kind == "cross"]
    assert [torch.equal(each, REAL) for each in rows] == [True, True]
    assert all(layer.module.__dict__.get("observer") is None for layer in layers)
    every = [layer.index for layer, _ in calls_of(model, **arguments)]
    assert sorted(every) == list(range(len(layers)))
    hk.heads.prune(model, {layer.index: range(4) for layer in layers if layer.kind == "decoder"})
    seen = calls_of(model, **arguments)
    assert {layer.kind for layer, _ in seen} == {"encoder", "cross"}
    assert all(call.real_queries.all() for layer, call in seen if layer.kind == "cross")


# ---------------------------------------------------------------------- caches, bad use and copies
@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_a_cache_with_room_for_more_tokens(name: str) -> None:
    """Of a prompt and the steps after it the rows, the keys and the statistics of a cache that grows."""
    model = hk.integrations.transformers.use(tiny_models.build(name))
    prompt, real = tiny_models.batch(model).values()
    real[:, -1] = 1
    found = []
    for cache in ("dynamic", "static"):
        seen: list[tuple[Any, ...]] = []

        def look(_: Any, call: AttentionCall, seen: list[Any] = seen) -> None:
            rows, keys = call.real_queries, call.real_keys
            statistics = call.statistics(received=rows[:, None].float())
            own = statistics.argmax - call.own_keys  # the offset of the key that a row looks at
            share = statistics.received.transpose(1, 2)[keys]
            assert call.is_causal
            seen.append((rows, keys.sum(1), own.where(rows[:, None], 0), share))

        options = {"cache_implementation": cache, "max_new_tokens": 4, "do_sample": False}
        with torch.no_grad(), hk.analysis.observe(model, look):
            model.generate(prompt, attention_mask=real, pad_token_id=0, **options)
        found.append(seen)
    for (rows, keys, own, share), other in zip(*found, strict=True):
        assert rows.any()
        for each, same in zip((rows, keys, own), other, strict=False):
            assert torch.equal(each, same)
        assert_alike(other[3], share)


def test_a_cache_with_room_for_more_tokens_and_a_mask_of_pairs() -> None:
    """Of a prompt and a step after it; the caller's mask says where the rows are."""
    model = hk.integrations.transformers.use(tiny_models.build("llama"))
    cache = tiny_models.transformers.StaticCache(model.config, max_cache_len=8)
    visible = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    positions = torch.arange(5)[None]
    for rows in (slice(4), slice(4, 5)):
        own = {"attention_mask": visible[:, :, rows], "position_ids": positions[:, rows], "past_key_values": cache}
        calls = calls_of(model, positions[:, rows], **own)
        assert all(torch.equal(call.own_keys, positions[0, rows]) and call.real_queries.all() for _, call in calls)


def test_bad_use_is_refused() -> None:
    layer = hk.nn.GatedMultiheadAttention(16, 4)
    assert_refused(
        (hk.analysis.observe(layer, print, [3]).__enter__, "names layer 3"),
        (hk.analysis.observe(layer, None).__enter__, TypeError, "observer is a NoneType"),
        unchanged=[layer],
    )
    layer.observer = print
    assert_refused((hk.analysis.observe(layer, print).__enter__, "observed already"), unchanged=[layer])


def test_replicas_are_refused() -> None:
    """`nn.DataParallel` runs them on threads that entered no block."""
    layer, x = hk.nn.GatedMultiheadAttention(16, 4), torch.randn(1, 5, 16)

    def replica() -> Any:
        made = layer._replicate_for_data_parallel()
        vars(made).update(layer._parameters)  # which it has copies of on its device
        return made

    with hk.analysis.observe(layer, print):
        assert_refused((partial(replica(), x), "runs as a replica of nn"))
    assert_alike(replica()(x)[0], layer(x)[0])


@pytest.mark.parametrize("name", ["", "bert"])
def test_copies_made_in_a_block_are_not_observed(name: str) -> None:
    """Neither in the block nor after it, until a block of their own."""
    model: nn.Module = nn.Sequential(hk.nn.GatedMultiheadAttention(32, 4))
    if name:
        model = hk.integrations.transformers.use(tiny_models.build(name)).encoder.layer[0].attention
    x, seen = torch.randn(1, 5, 32), list[str]()

    def look(layer: hk.heads.AttentionLayer, call: AttentionCall) -> None:
        seen.append(layer.name)

    with hk.analysis.observe(model, look) as [layer]:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        shallow = copy.copy(layer.module)
        for copied in copies:
            assert not any(part._forward_hooks or part._forward_pre_hooks for part in copied.modules())
        for copied in (*copies, shallow):
            copied(x)
            assert all(getattr(part, "observer", None) is None for part in copied.modules())
        assert not seen
        model(x)
    for copied in (*copies, shallow):
        with hk.analysis.observe(copied, look):
            copied(x)
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in copied.modules())
    assert len(seen) == 4
