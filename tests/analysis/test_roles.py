"""Roles of heads: positional, syntactic and rare-word heads that were planted, and counts against plain loops."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.analysis.attention_maps import stock_maps
from tests.support import tiny_models
from tests.support.alike import assert_alike

use = hk.integrations.transformers.use
LONGEST = 12


class Planted(nn.Module):
    """A layer of 4 heads whose rows attend to the given keys, `targets` `[B, 4, T]`."""

    def __init__(self, **names: Any) -> None:
        super().__init__()
        H, width = 4, 4 * LONGEST
        self.attention = hk.nn.GatedMultiheadAttention(
            width + LONGEST, H, head_dim=LONGEST, bias=False
        )
        with torch.no_grad():
            self.attention.q_proj.weight.copy_(30 * torch.eye(width, width + LONGEST))
            places = torch.eye(LONGEST).repeat(H, 1)
            self.attention.k_proj.weight.copy_(nn.functional.pad(places, (width, 0)))

    def forward(self, input_ids: Tensor, targets: Tensor, padding: Tensor | None = None) -> Tensor:
        B, T = input_ids.shape
        asked = nn.functional.one_hot(targets, LONGEST).transpose(1, 2).flatten(2)
        places = nn.functional.one_hot(torch.arange(T), LONGEST).expand(B, -1, -1)
        x = torch.cat([asked, places], 2).float()
        output: Tensor = self.attention(x, key_padding_mask=padding)[0]
        return output


def ids(*sentences: list[int]) -> Tensor:
    return torch.tensor(sentences)


def following(step: int, T: int) -> Tensor:
    """The key at this offset from each row, where there is one."""
    return (torch.arange(T) + step).clamp(0, T - 1)


def batch(tokens: Tensor, *targets: Tensor, padding: Tensor | None = None) -> dict[str, Any]:
    """Targets of the 4 heads, `[T]` or `[B, T]`; those that are not given look at themselves."""
    B, T = tokens.shape
    heads = [*targets, *[torch.arange(T)] * (4 - len(targets))]
    return {
        "input_ids": tokens,
        "targets": torch.stack([each.expand(B, T) for each in heads], 1),
        "padding": padding,
    }


# ---------------------------------------------------------------------- one offset
def test_positional_heads() -> None:
    T = 12
    mixed = following(1, T)
    mixed[:2] = 7  # 9 of 12 rows at +1; the last one has nothing behind it
    data = [batch(ids(list(range(T))), following(-1, T), following(2, T), mixed)]
    found = hk.analysis.roles(Planted(), data)
    assert [offset.tolist() for offset in found.offset] == [[-1, 2, 1, 0]]
    shares = found.offset_share.scores[0]
    assert_alike(shares, torch.tensor([11, 10, 9, 12]).double() / 12)
    assert found.positional() == [
        hk.analysis.Role("attention", 0, "positional", "offset -1", 11 / 12, None),
        hk.analysis.Role("attention", 3, "positional", "offset +0", 1.0, None),
    ]
    assert len(found.positional(0.5)) == 4
    assert found.relations == ()
    assert found.rare_words is None
    assert repr(found).splitlines() == [
        "HeadRoles: 2 of 4 heads have a role",
        "layer      role        what       head  share  baseline",
        "attention  positional  offset -1     0   0.92",
        "attention  positional  offset +0     3   1.00",
    ]


def test_no_head_has_a_role() -> None:
    found = hk.analysis.roles(
        Planted(), [batch(ids([3] * 6), *[torch.tensor([1, 0, 3, 2, 5, 4])] * 4)]
    )
    assert repr(found) == (
        "HeadRoles: 0 of 4 heads have a role; the highest share of rows at one offset is 0.50"
    )


def test_what_is_no_batch_or_token_is_refused() -> None:
    with pytest.raises(TypeError, match=r"special is a str; pass a list of token ids"):
        hk.analysis.roles(
            Planted(), [{"input_ids": torch.ones(1, 6, dtype=torch.long)}], special="[CLS]"
        )
    with pytest.raises(TypeError, match=r"batch is text; pass the output of the tokenizer"):
        hk.analysis.roles(Planted(), ["a sentence"])


def test_special_tokens_are_neither_rows_nor_keys() -> None:
    """Rows 0 and 5 are special, and the others' first choice, too, but for head 3."""
    tokens = ids([1, 10, 11, 12, 13, 2])
    at_first, at_last = torch.zeros(6, dtype=torch.int64), torch.full((6,), 5)
    data = [batch(tokens, following(-1, 6), at_first, at_last)]
    found = hk.analysis.roles(Planted(), data, special=[1, 2])
    counted = [4, 4, 4, 4]
    assert found.offset_share.scores[0][0] == 3 / counted[0]  # row 1 may not look at key 0
    assert found.offset_share.scores[0][3] == 1
    by_function = hk.analysis.roles(
        Planted(), data, special=lambda batch: torch.isin(batch["input_ids"], torch.tensor([1, 2]))
    )
    assert_alike(by_function.offset_share.scores[0], found.offset_share.scores[0])


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2", "llama"])
def test_offsets_as_the_maps_say(name: str) -> None:
    stock = tiny_models.build(name).double()
    arguments = tiny_models.batch(stock)
    found = hk.analysis.roles(use(copy.deepcopy(stock)), [arguments])
    for kind, maps in stock_maps(stock, arguments).items():
        layers = [i for i, each in enumerate(found.offset_share.kinds) if each == kind]
        best = maps.maps.argmax(-1)  # [L, B, H, T]
        offsets = maps.offsets[None, :, None].expand(*best.shape, -1).gather(4, best[..., None])
        for place, layer in enumerate(layers):
            for head in range(best.shape[2]):
                chosen = offsets[place, :, head, :, 0][maps.rows].tolist()
                offset, count = Counter(sorted(chosen)).most_common(1)[0]
                assert found.offset[layer][head] == offset
                assert found.offset_share.scores[layer][head] == pytest.approx(count / len(chosen))


# ---------------------------------------------------------------------- relations
def test_a_syntactic_head_and_its_baseline() -> None:
    """Head 0 looks from subjects to their verbs, head 1 always at +1, which is where half of the verbs are."""
    first = torch.tensor([0, 3, 0, 3, 4, 5])  # subject 1 -> verb 3
    second = torch.tensor([1, 1, 2, 3, 5, 5])  # 0 -> 1, 4 -> 5
    pairs = [{"nsubj": [(3, 1)]}, {"nsubj": [(1, 0), (5, 4)], "amod": [(2, 3)]}]
    data = [batch(ids([3] * 6, [4] * 6), torch.stack([first, second]), following(1, 6))]
    found = hk.analysis.roles(Planted(), data, relations=pairs)
    named = {(of.name, of.direction): of for of in found.relations}
    assert list(named) == [
        (name, way) for name in ("amod", "nsubj") for way in ("to head", "to dependent")
    ]
    nsubj = named["nsubj", "to head"]
    assert (nsubj.pairs, nsubj.offset, nsubj.baseline) == (3, 1, 2 / 3)
    assert_alike(nsubj.accuracy.scores[0], torch.tensor([1.0, 2 / 3, 0.0, 0.0]).double())
    back = named["nsubj", "to dependent"]
    assert (back.pairs, back.offset, back.baseline) == (3, -1, 2 / 3)
    assert not back.accuracy.scores[0].any()
    assert found.syntactic() == [
        hk.analysis.Role("attention", 0, "syntactic", "nsubj to head", 1.0, 2 / 3)
    ]
    assert found.syntactic(margin=0.4) == []
    assert "attention  syntactic   nsubj to head     0   1.00      0.67" in repr(found)


@pytest.mark.parametrize("left", [False, True])
def test_relations_count_tokens_from_the_first_real_one(left: bool) -> None:
    """The same sentence, padded; and relations go on in the next batch."""
    T, N = 5, 9
    start = N - T if left else 0
    verb = torch.full((N,), start + 2)
    padding = torch.ones(1, N, dtype=torch.bool)
    padding[:, start : start + T] = False
    padded = batch(torch.full((1, N), 3), verb, padding=padding)
    plain = batch(torch.full((1, T), 3), torch.full((T,), 2))
    pairs = [{"nsubj": [(2, 4), (2, 0)]}, {"nsubj": [(2, 1)]}]
    [to_head, _] = hk.analysis.roles(Planted(), [padded, plain], relations=pairs).relations
    assert to_head.accuracy.scores[0].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert to_head.offset in (-2, 2, 1)
    assert to_head.baseline == 1 / 3


def test_relations_of_a_translation_model_are_of_its_encoder() -> None:
    model = use(tiny_models.build("bart"))
    arguments = tiny_models.batch(model)
    found = hk.analysis.roles(model, [arguments], relations=[{"x": [(0, 1)]}, {}, {}])
    assert set(found.relations[0].accuracy.kinds) == {"encoder"}
    assert len(found.offset) == 6


@pytest.mark.parametrize(
    ("relations", "message"),
    [
        ([{}], r"relations has 1 entries, but data has more examples"),
        ([{}, {}, {}], r"relations has 3 entries, but data has 2 examples"),
        ([{}, {"x": [(0, 5)]}], r"relations names a token beyond the 4 of example 1"),
        ([{}, {"x": [(0, 99)]}], r"relations names a token beyond the 4 of example 1"),
        ([{"x": [(0, -1)]}, {}], r"relations\[0\]\['x'\] has \(0, -1\)"),
        ([{"x": [(0, 1, 2)]}, {}], r"relations\[0\]\['x'\] has \(0, 1, 2\)"),
        ([[(0, 1)], {}], r"relations\[0\] is a list"),
        ([{"x": [3]}, {}], r"relations\[0\]\['x'\] has 3; pass"),
        ([{"x": 3}, {}], r"relations\[0\]\['x'\] is 3; pass"),
        ([{"x": [(0.5, 1)]}, {}], r"relations\[0\]\['x'\] has \(0.5, 1\)"),
        (5, r"relations is a int; pass a list with an entry for each example"),
    ],
)
def test_bad_relations(relations: Any, message: str) -> None:
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    data = [batch(ids([3] * 6, [4] * 6), padding=padding)]
    with pytest.raises((TypeError, ValueError), match=message):
        hk.analysis.roles(Planted(), data, relations=relations)


def test_accuracy_of_a_layer_that_runs_twice_is_the_mean_of_its_runs() -> None:
    model = use(tiny_models.build("albert").double())
    arguments = tiny_models.batch(model)
    pairs = [{"x": [(head, row) for row in range(9) for head in range(9)]}, {}, {}]
    [to_head, to_dependent] = hk.analysis.roles(model, [arguments], relations=pairs).relations
    every_key_once = torch.full((1, 4), 1 / 9).double()
    assert_alike(to_head.accuracy.table(), every_key_once)
    assert to_dependent.accuracy.table().max() <= 1


def test_pairs_may_be_of_numpy() -> None:
    data = [batch(ids([3] * 6), following(1, 6))]
    numbers = np.array([[1, 0], [2, 1]])
    plain = hk.analysis.roles(Planted(), data, relations=[{"x": numbers.tolist()}], counts={3: 1})
    of_numpy: dict[str, Any] = {"relations": [{"x": numbers}], "counts": {np.int64(3): np.int64(1)}}
    found = hk.analysis.roles(Planted(), data, **of_numpy)
    assert json.dumps(found.to_dict()) == json.dumps(plain.to_dict())


def test_nothing_is_left_that_reads_the_sentences() -> None:
    model = use(tiny_models.build("bart"))
    hk.heads.prune(model, {0: range(4), 1: range(4)})
    arguments = tiny_models.batch(model)
    for options in ({"relations": [{}, {}, {}]}, {"counts": {3: 1}}):
        with pytest.raises(ValueError, match=r"no layer that reads the sentences has a head left"):
            hk.analysis.roles(model, [arguments], **options)


# ---------------------------------------------------------------------- rare words
def test_a_rare_word_head() -> None:
    """Head 0 looks at the rarest word, head 1 at the second rarest; the last sentence has no rare word."""
    tokens = ids([1, 10, 20, 30, 2], [1, 30, 10, 10, 2], [1, 10, 11, 10, 2])
    counts = {1: 900, 2: 900, 10: 100, 11: 90, 20: 5, 30: 7}
    rarest = torch.tensor([[2] * 5, [1] * 5, [2] * 5])
    second = torch.tensor([[3] * 5, [2] * 5, [1] * 5])
    data = [batch(tokens, rarest, second)]
    found = hk.analysis.roles(Planted(), data, special=[1, 2], counts=counts, common=4)
    rare = found.rare_words
    assert rare is not None
    assert rare.sentences == 2
    assert rare.rarest.scores[0].tolist() == [1.0, 0.0, 1 / 3, 1 / 3]
    assert_alike(
        rare.two_rarest.scores[0], torch.tensor([1.0, 1.0, 5 / 6, 5 / 6], dtype=torch.float64)
    )
    assert rare.chance == pytest.approx((2 / 6, 5 / 6))
    assert found.rare_word() == [
        hk.analysis.Role("attention", 0, "rare words", "the rarest token", 1.0, 2 / 6)
    ]
    table = torch.zeros(31, dtype=torch.int64)
    table[list(counts)] = torch.tensor(list(counts.values()))
    same = hk.analysis.roles(Planted(), data, special=[1, 2], counts=table, common=4).rare_words
    assert same is not None
    assert_alike(same.rarest.scores[0], rare.rarest.scores[0])


def test_half_of_the_rows_are_no_role_where_chance_gives_them() -> None:
    """Head 0 always looks at the rarest word, head 1 in half of the rows, as one that chooses at random does."""
    data = [batch(ids([10, 20]), torch.tensor([1, 1]))]
    found = hk.analysis.roles(Planted(), data, counts={10: 9, 20: 1}, common=0)
    assert found.rare_words is not None
    assert found.rare_words.chance[0] == 0.5
    assert found.rare_words.rarest.scores[0].tolist() == [1.0, 0.5, 0.5, 0.5]
    assert [role.head for role in found.rare_word()] == [0]


def test_rare_words_as_loops_say() -> None:
    model = use(tiny_models.build("bert").double())
    arguments = tiny_models.batch(model)
    counts = {token: (token * 37) % 29 for token in range(3, 36)}  # ids 36 to 39 were never seen
    common = 20
    chosen: list[Tensor] = []
    with (
        torch.no_grad(),
        hk.analysis.observe(model, lambda layer, call: chosen.append(call.statistics().argmax)),
    ):
        model(**arguments)
    found = hk.analysis.roles(model, [arguments], counts=counts, common=common).rare_words
    assert found is not None
    limit = sorted([*counts.values(), 0], reverse=True)[common]
    hits, rows, expected = torch.zeros(2, 2, 4).double(), 0, [0, 0]
    for example, sentence in enumerate(arguments["input_ids"].tolist()):
        real = arguments["attention_mask"][example].bool().tolist()
        words = {place: counts.get(token, 0) for place, token in enumerate(sentence) if real[place]}
        least, *others = sorted(set(words.values()))
        if least > limit:
            continue
        for which, values in enumerate(({least}, {least, *others[:1]})):
            targets = [place for place, count in words.items() if count in values]
            expected[which] += len(targets)
            for layer, keys in enumerate(chosen):
                for head in range(4):
                    hits[which, layer, head] += sum(
                        keys[example, head, row].item() in targets for row in words
                    )
        rows += len(words)
    assert_alike(found.rarest.table(), hits[0] / rows)
    assert_alike(found.two_rarest.table(), hits[1] / rows)
    assert found.chance == pytest.approx((expected[0] / rows, expected[1] / rows))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, r"counts is empty"),
        ({"word": 3}, r"holds something else than ints"),
        ({-1: 4}, r"counts has a negative token id"),
        ({3: -4}, r"counts has the count -4"),
        (torch.tensor([1, -2]), r"counts has the count -2"),
        (torch.ones(3), r"counts is torch.float32 \[3\]"),
        ([1, 2], r"counts is a list"),
    ],
)
def test_bad_counts(counts: Any, message: str) -> None:
    data = [batch(ids([10, 10, 10]))]
    with pytest.raises((TypeError, ValueError), match=message):
        hk.analysis.roles(Planted(), data, counts=counts, common=2)


def test_no_sentence_with_a_rare_word() -> None:
    found = hk.analysis.roles(Planted(), [batch(ids([10, 10, 11]))], counts={10: 5, 11: 4, 12: 3})
    assert found.rare_words is None
    assert found.rare_word() == []
    assert found.to_dict()["rare_words"] is None


def test_counts_need_token_ids() -> None:
    arguments = batch(ids([10, 10, 10]))
    with pytest.raises(ValueError, match=r"counts are given, but a batch has no 'input_ids'"):
        hk.analysis.roles(Planted(), [tuple(arguments.values())], counts={10: 1})


# ---------------------------------------------------------------------- what must not matter, and bad input
def test_how_data_are_cut_into_batches() -> None:
    model = use(tiny_models.build("bert").double())
    whole = tiny_models.batch(model)
    rows = [{name: tensor[i : i + 1] for name, tensor in whole.items()} for i in range(3)]
    pairs = [{"x": [(0, 4)]}, {"x": [(3, 1), (0, 1)]}, {"y": [(2, 1)]}]
    counts = {token: token for token in range(40)}
    options: dict[str, Any] = {"relations": pairs, "counts": counts, "common": 9}
    together = hk.analysis.roles(model, [whole], **options)
    apart = hk.analysis.roles(model, rows, **options)
    assert json.dumps(together.to_dict()) == json.dumps(apart.to_dict())


def test_pruned_models() -> None:
    model = use(tiny_models.build("bert"))
    arguments = tiny_models.batch(model)
    hk.heads.prune(model, {0: [0, 3], 1: range(4)})
    counts = {token: token for token in range(40)}
    options: dict[str, Any] = {
        "relations": [{"x": [(0, 1)]}, {}, {}],
        "counts": counts,
        "common": 9,
    }
    found = hk.analysis.roles(model, [arguments], **options)
    assert [len(each) for each in found.offset] == [2, 0]
    assert [len(each) for each in found.relations[0].accuracy.scores] == [2, 0]
    assert found.rare_words is not None
    assert [len(each) for each in found.rare_words.rarest.scores] == [2, 0]
    json.dumps(found.to_dict())


def test_bad_data() -> None:
    with pytest.raises(ValueError, match=r"data has no batches"):
        hk.analysis.roles(Planted(), [])
    nothing = batch(ids([3, 3]), padding=torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"data has no word that reaches layer 0"):
        hk.analysis.roles(Planted(), [nothing])
    with pytest.raises(ValueError, match=r"common is -1"):
        hk.analysis.roles(Planted(), [nothing], common=-1)


# ---------------------------------------------------------------------- a pretrained model
@pytest.mark.check
def test_positional_heads_of_a_pretrained_model() -> None:
    """MiniLM has heads in its first layers that look at the token before or behind."""
    minilm = pytest.importorskip("benchmarks.minilm", reason="needs the extra bench")
    try:
        model = use(minilm.load(attn_implementation="sdpa"))
    except minilm.Unavailable as error:
        pytest.skip(str(error))
    tokens, lengths = minilm.tokens(24)
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    data = [{"input_ids": tokens, "attention_mask": real.long()}]
    found = hk.analysis.roles(model, data, special=[101, 102])  # [CLS], [SEP]
    positional = {(role.layer, role.head): role.what for role in found.positional()}
    assert positional == {
        ("encoder.layer.0.attention.self", 2): "offset -1",
        ("encoder.layer.1.attention.self", 8): "offset +1",
    }
    statistics = hk.analysis.statistics(model, data, exclude_keys=[101, 102])
    assert statistics.to_previous.scores[0][2] > 0.5
    assert statistics.to_next.scores[1][8] > 0.5
