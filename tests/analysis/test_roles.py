"""Roles of heads: positional, syntactic and rare-word heads that were planted, and counts against plain loops."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.analysis import Role
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused

use = hk.integrations.transformers.use
roles: Any = hk.analysis.roles
LONGEST = 12


class Planted(nn.Module):
    """A layer of 4 heads whose rows attend to the given keys, `targets` `[B, 4, T]`."""

    def __init__(self) -> None:
        super().__init__()
        H, width = 4, 4 * LONGEST
        self.attention = hk.nn.GatedMultiheadAttention(width + LONGEST, H, head_dim=LONGEST, bias=False)
        with torch.no_grad():
            self.attention.q_proj.weight.copy_(30 * torch.eye(width, width + LONGEST))
            places = torch.eye(LONGEST).repeat(H, 1)
            self.attention.k_proj.weight.copy_(nn.functional.pad(places, (width, 0)))

    def forward(self, input_ids: Tensor, targets: Tensor, padding: Tensor | None = None, times: int = 1) -> Tensor:
        """On `times` as many tokens as there are ids."""
        B, T = input_ids.shape
        asked = nn.functional.one_hot(targets, LONGEST).transpose(1, 2).flatten(2)
        places = nn.functional.one_hot(torch.arange(T), LONGEST).expand(B, -1, -1)
        x = torch.cat([asked, places], 2).float().repeat(1, times, 1)
        output: Tensor = self.attention(x, key_padding_mask=padding)[0]
        return output


def planted(data: list[Any], **options: Any) -> Any:
    return roles(Planted(), data, **options)


def ids(*sentences: list[int]) -> Tensor:
    return torch.tensor(sentences)


def following(step: int, T: int) -> Tensor:
    """The key at this offset from each row, where there is one."""
    return (torch.arange(T) + step).clamp(0, T - 1)


def batch(tokens: Tensor, *targets: Tensor, padding: Tensor | None = None) -> dict[str, Any]:
    """Targets of the 4 heads, `[T]` or `[B, T]`; those that are not given look at themselves."""
    B, T = tokens.shape
    heads = [*targets, *[torch.arange(T)] * (4 - len(targets))]
    return {"input_ids": tokens, "targets": torch.stack([each.expand(B, T) for each in heads], 1), "padding": padding}


# ---------------------------------------------------------------------- one offset
def test_positional_heads() -> None:
    T = 12
    mixed = following(1, T)
    mixed[:2] = 7  # 9 of 12 rows at +1; the last one has nothing behind it
    data = [batch(ids(list(range(T))), following(-1, T), following(2, T), mixed)]
    found = planted(data)
    assert [offset.tolist() for offset in found.offset] == [[-1, 2, 1, 0]]
    shares = found.offset_share.scores[0]
    assert_alike(shares, torch.tensor([11, 10, 9, 12]).double() / 12)
    assert found.positional() == [
        Role("attention", 0, "positional", "offset -1", 11 / 12, None),
        Role("attention", 3, "positional", "offset +0", 1.0, None),
    ]
    assert len(found.positional(0.5)) == 4
    assert found.relations == ()
    assert found.rare_words is None
    assert "attention  positional  offset -1     0   0.92" in repr(found)


def test_special_tokens_are_neither_rows_nor_keys() -> None:
    """Rows 0 and 5 are special, and the others' first choice, too, but for head 3."""
    tokens = ids([1, 10, 11, 12, 13, 2])
    at_first, at_last = torch.zeros(6, dtype=torch.int64), torch.full((6,), 5)
    data = [batch(tokens, following(-1, 6), at_first, at_last)]
    found = planted(data, special=[1, 2])
    assert found.offset_share.scores[0][0] == 3 / 4  # row 1 may not look at key 0
    assert found.offset_share.scores[0][3] == 1


def test_a_syntactic_head_and_its_baseline() -> None:
    """Head 0 looks from subjects to their verbs, head 1 always at +1, which is where half of the verbs are."""
    first = torch.tensor([0, 3, 0, 3, 4, 5])  # subject 1 -> verb 3
    second = torch.tensor([1, 1, 2, 3, 5, 5])  # 0 -> 1, 4 -> 5
    pairs = [{"nsubj": [(3, 1)]}, {"nsubj": [(1, 0), (5, 4)], "amod": [(2, 3)]}]
    data = [batch(ids([3] * 6, [4] * 6), torch.stack([first, second]), following(1, 6))]
    found = planted(data, relations=pairs)
    named = {(of.name, of.direction): of for of in found.relations}
    assert list(named) == [(name, way) for name in ("amod", "nsubj") for way in ("to head", "to dependent")]
    nsubj = named["nsubj", "to head"]
    assert (nsubj.pairs, nsubj.offset, nsubj.baseline) == (3, 1, 2 / 3)
    assert_alike(nsubj.accuracy.scores[0], torch.tensor([3, 2, 0, 0]).double() / 3)
    back = named["nsubj", "to dependent"]
    assert (back.pairs, back.offset, back.baseline) == (3, -1, 2 / 3)
    assert not back.accuracy.scores[0].any()
    assert found.syntactic() == [Role("attention", 0, "syntactic", "nsubj to head", 1.0, 2 / 3)]
    assert found.syntactic(margin=0.4) == []


# ---------------------------------------------------------------------- rare words
def test_a_rare_word_head() -> None:
    """Head 0 looks at the rarest word, head 1 at the second rarest; the last sentence has no rare word."""
    tokens = ids([1, 10, 40, 30, 2], [1, 30, 10, 10, 2], [1, 10, 11, 10, 2])
    counts = {1: 900, 2: 900, 10: 100, 11: 90, 30: 7}  # 40 was never seen
    rarest = torch.tensor([[2] * 5, [1] * 5, [2] * 5])
    second = torch.tensor([[3] * 5, [2] * 5, [1] * 5])
    data = [batch(tokens, rarest, second)]
    found = planted(data, special=[1, 2], counts=counts, common=4)
    rare = found.rare_words
    assert rare.sentences == 2
    assert rare.rarest.scores[0].tolist() == [1.0, 0.0, 1 / 3, 1 / 3]
    assert_alike(rare.two_rarest.scores[0], torch.tensor([6, 6, 5, 5]).double() / 6)
    assert rare.chance == pytest.approx((2 / 6, 5 / 6))
    assert found.rare_word() == [Role("attention", 0, "rare words", "the rarest token", 1.0, 2 / 6)]
    table = torch.zeros(31, dtype=torch.int64)
    table[list(counts)] = torch.tensor(list(counts.values()))
    same = planted(data, special=[1, 2], counts=table, common=4).rare_words
    assert_alike(same.rarest.scores[0], rare.rarest.scores[0])


def test_half_of_the_rows_are_no_role_where_chance_gives_them() -> None:
    """Head 0 always looks at the rarest word, head 1 in half of the rows, as one that chooses at random does."""
    data = [batch(ids([10, 20]), torch.tensor([1, 1]))]
    found = planted(data, counts={10: 9, 20: 1}, common=0)
    assert found.rare_words.chance[0] == 0.5
    assert found.rare_words.rarest.scores[0].tolist() == [1.0, 0.5, 0.5, 0.5]
    assert [role.head for role in found.rare_word()] == [0]


# ---------------------------------------------------------------------- no role, and bad input
def test_sentences_without_a_rare_word_and_heads_without_a_role() -> None:
    everywhere = [torch.tensor([1, 0, 3, 2, 5, 4])] * 4
    data = [batch(ids([10, 10, 11, 11, 10, 11]), *everywhere)]
    found = planted(data, counts={10: 5, 11: 4, 12: 3})
    assert found.rare_words is None
    assert found.rare_word() == []
    assert repr(found) == ("HeadRoles: 0 of 4 heads have a role; the highest share of rows at one offset is 0.50")


def test_a_translation_model_reads_sentences_with_its_encoder() -> None:
    model = use(tiny_models.build("bart"))
    data = [tiny_models.batch(model)]
    numpy = [{"x": np.array([[0, 1]])}, {}, {}]
    found = roles(model, data, relations=numpy, counts={np.int64(3): np.int64(1)})
    assert set(found.relations[0].accuracy.kinds) == {"encoder"}
    assert len(found.offset) == 6
    hk.heads.prune(model, {0: range(4), 1: range(4)})
    words = ".*no layer that reads the sentences has a head left"
    assert_refused(({"relations": [{}, {}, {}]}, words), ({"counts": {3: 1}}, words), of=partial(roles, model, data))


def test_bad_arguments() -> None:
    """For two sentences of 6 and 4 tokens."""
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    data = batch(ids([3] * 6, [4] * 6), padding=padding)
    assert_refused(
        ({"relations": [{}]}, "relations has 1 entries, but data has more examples"),
        ({"relations": [{}, {}, {}]}, "relations has 3 entries, but data has 2 examples"),
        ({"relations": [{}, {"x": [(0, 5)]}]}, "relations names a token beyond the 4 of example 1"),
        ({"relations": [{"x": [(0, -1)]}, {}]}, r"relations\[0\]\['x'\] has \(0, -1\)"),
        ({"relations": [[(0, 1)], {}]}, TypeError, r"relations\[0\] is a list"),
        ({"relations": [{"x": [3]}, {}]}, r"relations\[0\]\['x'\] has 3"),
        ({"relations": [{"x": 3}, {}]}, TypeError, r"relations\[0\]\['x'\] is 3"),
        ({"relations": 5}, TypeError, "relations is a int"),
        ({"counts": {}}, "counts is empty"),
        ({"counts": {"word": 3}}, "counts holds something else than ints"),
        ({"counts": {-1: 4}}, "counts has a negative token id"),
        ({"counts": {3: -4}}, "counts has the count -4"),
        ({"counts": torch.ones(3)}, r"counts is torch.float32 \[3\]"),
        ({"counts": [1, 2]}, TypeError, "counts is a list"),
        ({"common": -1}, "common is -1"),
        ({"special": "[CLS]"}, TypeError, "special is a str; pass a list of token ids"),
        of=partial(planted, [data]),
    )
    unnamed, alone = tuple(data.values()), data | {"padding": torch.ones(2, 6, dtype=torch.bool)}
    twice, plain = batch(ids([1, 2, 1])) | {"times": 2}, (torch.randn(1, 4, 16), hk.nn.GatedMultiheadAttention(16, 4))
    longer = r"data has 'input_ids' .*, but layer 0 .* runs on"
    assert_refused(
        (lambda: planted([unnamed], counts={10: 1}), "counts is given, but a batch has no 'input_ids'"),
        (lambda: planted([alone]), "data has no word that reaches layer 0"),
        (lambda: planted([batch(ids([1, 2, 3]))], repeats=True), "repeats is True, but no token of the data comes tw"),
        (lambda: planted([twice], repeats=True), longer),
        (lambda: planted([twice], counts={1: 2}), longer),
        (lambda: roles(plain[1], [plain[0]], repeats=True), "repeats is given, but a batch has no 'input_ids'"),
    )


# ---------------------------------------------------------------------- repeated tokens
def test_planted_heads_of_repeated_tokens() -> None:
    half = torch.tensor([[7, 3, 9, 4, 5]])
    tokens = torch.cat([half, half], 1)
    given = batch(tokens, following(-1, 10), following(-5, 10), following(-4, 10))
    found = planted([given], repeats=True)
    assert found.repeats.rows == (9, 5, 5)
    assert [(role.head, role.role) for role in found.repeating()] == [
        (0, "previous token"), (1, "duplicate token"), (2, "induction")]  # fmt: skip
    assert "an earlier copy" in repr(found)


def test_rows_of_repeats_are_those_of_layers_that_have_heads() -> None:
    model = use(tiny_models.build("gpt2"))
    hk.heads.prune(model, {0: range(4)})
    found = roles(model, [{"input_ids": ids([7, 3, 7, 3])}], repeats=True)
    assert found.repeats.rows == (3, 2, 2)


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_repeats_are_sums_of_maps(family: str) -> None:
    model = use(tiny_models.build(family))
    arguments = tiny_models.batch(model)
    tokens = arguments["input_ids"] = arguments["input_ids"] % 4
    real = arguments["attention_mask"].bool()
    found = roles(model, [arguments], repeats=True).repeats
    layers = [each for each in hk.analysis.maps(model, arguments, example=None)
              if each.kind == ("decoder" if family == "gpt2" else "encoder")]  # fmt: skip
    sums = torch.zeros(3, len(layers), 4, dtype=torch.float64)
    rows = [0, 0, 0]
    for b, sentence in enumerate(tokens.tolist()):
        for i, token in enumerate(sentence):
            copies = [j for j in range(i) if sentence[j] == token and real[b, j]]
            keys = [i - 1, *([copies[-1], copies[-1] + 1] if copies else [])]
            for kind, j in enumerate(keys):
                if real[b, i] and j >= 0 and real[b, j]:
                    rows[kind] += 1
                    sums[kind] += torch.stack([each.maps[b, :, i, j] for each in layers])
    assert found.rows == tuple(rows)
    for kind, scores in enumerate((found.previous_token, found.duplicate_token, found.induction)):
        assert_alike(torch.stack(scores.scores), sums[kind] / rows[kind], dtype=torch.float32)
