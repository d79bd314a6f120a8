"""Readings of heads against maps in memory, of stock models and of the package's modules; statistics under options."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.analysis.statistics import MEASURES
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.nn_layers import Layers, calls_of, spread
from tests.support.refusals import assert_refused

use = hk.integrations.transformers.use


# ---------------------------------------------------------------------- maps in memory
@dataclass(frozen=True, eq=False)
class Maps:
    """Of the layers of one kind: `[L, B, H, T, S]`, bool `[B, T]` and `[B, S]`."""

    maps: Tensor
    rows: Tensor
    keys: Tensor

    @property
    def offsets(self) -> Tensor:
        """`[B, T, S]`: places from row to key, each counted from the first real one."""
        places = [
            torch.arange(real.shape[1])[None] - torch.tensor([[row.tolist().index(True)] for row in real])
            for real in (self.rows, self.keys)
        ]
        return places[1][:, None, :] - places[0][:, :, None]

    def mean(self, values: Tensor) -> Tensor:
        """Of `[L, B, H, T]` over the real rows, `[L, H]`."""
        return values.permute(0, 2, 1, 3)[:, :, self.rows].mean(2)

    def share(self, pairs: Tensor) -> Tensor:
        """Mean probability of the pairs, `[B, T, S]`, by which they are weighted, `[L, H]`."""
        return self.mean((self.maps * pairs[None, :, None]).sum(-1))

    def measures(self) -> dict[str, Tensor]:
        """The means that `hk.analysis.statistics` gives, `[L, H]` each."""
        logs = self.maps.clamp(min=1e-300).log()
        return {
            "confidence": self.mean(self.maps.amax(-1)),
            "entropy": self.mean(-(self.maps * logs).sum(-1)),
            "distance": self.share(self.offsets.abs().double()),
            "to_self": self.share(self.offsets == 0),
            "to_previous": self.share(self.offsets == -1),
            "to_next": self.share(self.offsets == 1),
        }

    def divergences(self) -> Tensor:
        """`[L H, L H]`: mean Jensen-Shannon divergence of all pairs of heads, by its definition."""
        rows = self.maps.permute(0, 2, 1, 3, 4).flatten(0, 1)[:, self.rows]  # [L H, rows, S]
        pairs = torch.broadcast_tensors(rows[:, None], rows)  # [L H, L H, rows, S]
        middle = (pairs[0] + pairs[1]) / 2
        kl = [torch.where(x > 0, x * (x / middle).log(), 0.0).sum(-1) for x in pairs]
        return (kl[0] + kl[1]).mean(-1) / 2


def stock_maps(model: Any, arguments: dict[str, Tensor]) -> dict[str, Maps]:
    """By kind of layer, from a transformers model of eager attention."""
    with torch.no_grad():
        out = model(**arguments, output_attentions=True)
    rows = {"encoder": arguments.get("attention_mask"), "decoder": arguments.get("decoder_attention_mask")}
    if not model.config.is_encoder_decoder:
        maps = torch.stack([each for each in out.attentions if each is not None])
        mask = rows["encoder"]
        real = torch.ones(maps.shape[1], maps.shape[3]) if mask is None else mask
        real = real.bool()
        kinds = [layer.kind for layer in hk.heads.attention_layers(model)]
        return {kinds[0]: Maps(maps, real, real)}
    found = {}
    for kind, queries, keys in (
        ("encoder", "encoder", "encoder"),
        ("decoder", "decoder", "decoder"),
        ("cross", "decoder", "encoder"),
    ):
        maps = torch.stack(out[f"{kind}_attentions"])
        found[kind] = Maps(maps, rows[queries].bool(), rows[keys].bool())
    return found


def of_kind(scores: hk.analysis.HeadScores, kind: str) -> Tensor:
    chosen = [i for i, each in enumerate(scores.kinds) if each == kind]
    return torch.stack([scores.scores[i] for i in chosen])


def assert_reads(found: hk.analysis.HeadStatistics, maps: Maps, kind: str = "encoder") -> None:
    for name, expected in maps.measures().items():
        got = of_kind(getattr(found, name), kind)
        assert got.dtype == torch.float64
        if len(got) < len(expected):  # one layer that runs several times
            expected = expected.mean(0, keepdim=True)
        assert_alike(got, expected, dtype=torch.float32, name=name)
    kinds = found.confidence.kinds
    runs = len(maps.maps) // kinds.count(kind)
    rows = [n for n, each in zip(found.rows, kinds, strict=True) if each == kind]
    assert rows == [int(maps.rows.sum()) * runs] * len(rows)
    best = maps.maps[:runs].argmax(-1)  # of the first layer, [runs, B, H, T]
    offsets = maps.offsets[:, None].expand(*best.shape, -1).gather(-1, best[..., None])[..., 0]
    counts = found.offsets[kinds.index(kind)]
    N = counts.shape[1] // 2
    for of_head, own in zip(offsets.unbind(2), counts, strict=True):
        chosen = of_head[:, maps.rows].flatten() + N
        assert torch.equal(own, torch.bincount(chosen, minlength=2 * N + 1))


def assert_received(found: hk.analysis.HeadReceived, maps: Maps, kind: str, last_rows: int | None = None) -> None:
    """Means over the real rows, or the last of them; of a layer that runs several times over its runs too."""
    of_kind = [each for each, name in zip(found.examples, found.kinds, strict=True) if name == kind]
    runs = len(maps.maps) // len(of_kind)
    for examples, of_layer in zip(of_kind, maps.maps.unflatten(0, (-1, runs)).mean(1), strict=True):
        assert len(examples) == len(maps.rows)
        for b, example in enumerate(examples):
            rows = maps.rows[b].nonzero()[:, 0]
            rows = rows if last_rows is None else rows[-last_rows:]
            expected = of_layer[b][:, rows].mean(1)[:, maps.keys[b]]
            assert_alike(example, expected, dtype=torch.float32)  # as rotary angles are


# ---------------------------------------------------------------------- all readings
FAMILIES = [
    "albert", "bert", "modernbert", "vit", "bart", "t5", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "qwen3_next",
    "llama", "mistral",
]  # fmt: skip


def assert_readings(model: Any, batch: Any, expected: dict[str, Maps]) -> None:
    """Statistics, what tokens receive, distances and maps, by kind of layer."""
    statistics = hk.analysis.statistics(model, [batch])
    received = {rows: hk.analysis.received(model, [batch], last_rows=rows) for rows in (None, 1, 4)}
    examples = range(len(next(iter(expected.values())).rows))
    of_examples = [hk.analysis.maps(model, batch, example=example) for example in examples]
    for kind, maps in expected.items():
        assert_reads(statistics, maps, kind)
        for last_rows, found in received.items():
            assert_received(found, maps, kind, last_rows)
        distance = hk.analysis.distance(model, [batch], kind=kind)
        assert_alike(distance.matrix, maps.divergences(), dtype=torch.float32)
        L, _, H = maps.maps.shape[:3]
        assert (distance.kind, distance.rows, len(distance.layers)) == (kind, maps.rows.sum(), L)
        assert distance.heads == tuple((layer, head) for layer in range(L) for head in range(H))
        for example, of_layers in enumerate(of_examples):
            own = [one for one in of_layers if one.kind == kind]
            for one, of_layer in zip(own, maps.maps[:, example], strict=True):
                real = of_layer[:, maps.rows[example]][:, :, maps.keys[example]]
                assert_alike(one.maps, real, dtype=torch.float32)
                assert one.heads == tuple(range(H))


@pytest.mark.parametrize("name", FAMILIES)
def test_readings_of_families(name: str) -> None:
    """Padding on the right and on the left, causal, windows, grouped keys, cross-attention, all terms of scores.

    An observed call has the arguments of the operator, and of the statistics that test_families.py has of all families.
    """
    stock = tiny_models.build(name).double()
    batch = tiny_models.batch(stock)
    model = use(copy.deepcopy(stock))
    assert_readings(model, batch, stock_maps(stock, batch))


def layers() -> Layers:
    """Grouped heads, and collaborative ones."""
    grouped = hk.nn.GatedMultiheadAttention(16, 4, num_key_heads=2, dtype=torch.float64)
    collaborative = hk.nn.CollaborativeMultiheadAttention(16, 4, 12, dtype=torch.float64)
    return Layers(spread(grouped), spread(collaborative))


@pytest.mark.parametrize(("left", "causal"), [(False, False), (False, True), (True, True)])
def test_readings_of_modules(left: bool, causal: bool) -> None:
    """Maps are those that give the outputs of heads by the values that the operator takes."""
    model, x = layers(), torch.randn(2, 9, 16, dtype=torch.float64)
    real = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    real = real.flip(1) if left else real
    calls: list[hk.analysis.AttentionCall] = []
    batch = {"x": x, "padding": ~real, "is_causal": causal}
    with (
        torch.no_grad(),
        hk.analysis.observe(model, lambda _, call: calls.append(call)),
        hk.heads.outputs(model) as heads,
    ):
        model(**batch)
    maps = torch.stack([call.probabilities() for call in calls])
    for p, call, [found] in zip(maps, calls, heads.values(), strict=True):
        value = call.value.repeat_interleave(4 // call.value.shape[1], 1)
        assert_alike((p @ value).transpose(1, 2), found)
    kind = hk.heads.attention_layers(model)[0].kind
    assert_readings(model, batch, {kind: Maps(maps, real, real)})


# ---------------------------------------------------------------------- sets of tokens
SETS = {"some": [5, 6, 7, 8, 9], "even": list(range(0, 40, 2))}


def read(model: nn.Module, *data: Any, **options: Any) -> hk.analysis.HeadStatistics:
    return hk.analysis.statistics(model, list(data), **options)


def assert_same(found: hk.analysis.HeadStatistics, expected: hk.analysis.HeadStatistics) -> None:
    assert found.rows == expected.rows
    for name, scores in expected.measures.items():
        assert_alike(found.measures[name].table(), scores.table(), name=name)
    assert all(map(torch.equal, found.offsets, expected.offsets))


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_token_sets_and_excluded_keys(name: str) -> None:
    stock = tiny_models.build(name).double()
    arguments = tiny_models.batch(stock)
    found = read(use(copy.deepcopy(stock)), arguments, exclude_keys=SETS["even"], token_sets=SETS)
    assert list(found.measures) == [*MEASURES, "to_some", "to_even"]
    for kind, maps in stock_maps(stock, arguments).items():
        ids = arguments["decoder_input_ids" if kind == "decoder" else "input_ids"]
        for key, tokens in SETS.items():
            members = torch.isin(ids, torch.tensor(tokens))[:, None]
            assert_alike(of_kind(found.to_tokens[key], kind), maps.share(members))
        odd = (ids % 2 == 1)[None, :, None, None]
        allowed = maps.maps.masked_fill(~odd, -1.0)
        assert_alike(of_kind(found.confidence, kind), maps.mean(allowed.amax(-1).clamp(min=0)))
        entropy = maps.measures()["entropy"]  # nothing is renormalised
        assert_alike(of_kind(found.entropy, kind), entropy)


def test_sets_by_a_function_of_the_batch() -> None:
    model = use(tiny_models.build("bart").double())
    arguments = tiny_models.batch(model)

    def five(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"encoder": batch["input_ids"] == 5, "decoder": batch["decoder_input_ids"] == 5}

    by_function = read(model, arguments, token_sets={"five": five}).to_tokens["five"]
    by_ids = read(model, arguments, token_sets={"five": [5]}).to_tokens["five"]
    for kind in ("encoder", "decoder"):
        assert_alike(of_kind(by_function, kind), of_kind(by_ids, kind))
    assert not of_kind(by_function, "cross").any()


def test_rows_without_an_allowed_key_have_no_offset() -> None:
    model, x = layers(), torch.randn(2, 6, 16, dtype=torch.float64)
    found = read(model, x, exclude_keys=lambda batch: torch.ones(2, 6, dtype=torch.bool))
    assert not any(counts.any() for counts in found.offsets)
    assert not found.confidence.table().any()


# ---------------------------------------------------------------------- other ways to the same numbers
def test_a_dense_mask_reads_as_a_native_one() -> None:
    model, x = layers(), torch.randn(2, 40, 16, dtype=torch.float64)
    for native in (hk.Mask(causal=True), hk.Mask(causal=True, window=(5, 0), first_keys=2)):
        hidden = ~native.to_dense(2, 4, 40, 40)[0, 0]
        assert_same(read(model, {"x": x, "attn_mask": hidden}), read(model, {"x": x, "mask": native}))


class Steps(Layers):
    """A layer that reads its input in parts, behind a cache."""

    def forward(self, x: Tensor, parts: list[int]) -> None:
        cache = hk.nn.KeyValueCache()
        for part in x.split(parts, 1):
            self.layers[0](part, is_causal=True, cache=cache)


def test_rows_behind_a_cache() -> None:
    model, x = Steps(layers().layers[0]), torch.randn(2, 9, 16, dtype=torch.float64)
    assert_same(read(model, (x, [4, 1, 3, 1])), read(model, (x, [9])))
    assert_refused(
        ({"data": [(x, [6, 3])]}, "data has a pass in which .* runs on different tokens"),
        ({"data": [], "last_rows": 0}, "last_rows is 0; pass an int of at least 1"),
        of=partial(hk.analysis.received, model),
    )


class Views(Layers):
    """Layers that see other keys of one memory."""

    def forward(self, x: Tensor, memory: Tensor) -> None:
        for layer, causal in zip(self.layers, (True, False), strict=True):
            layer(x, memory, mask=hk.Mask(causal=causal))


def test_distance_of_layers_that_see_other_keys() -> None:
    model = Views(*(spread(hk.nn.GatedMultiheadAttention(16, 4, dtype=torch.float64)) for _ in range(2)))
    batch = torch.randn(2, 3, 16, dtype=torch.float64), torch.randn(2, 9, 16, dtype=torch.float64)
    maps = torch.stack([call.probabilities() for _, call in calls_of(model, *batch)])
    expected = Maps(maps, maps[0, :, 0, :, 0] >= 0, maps[0, :, 0, 0] >= 0).divergences()
    assert_alike(hk.analysis.distance(model, [batch]).matrix, expected, dtype=torch.float32)


def test_places_are_exact_in_half_precision() -> None:
    model = Layers(hk.nn.GatedMultiheadAttention(16, 4)).bfloat16()
    for weight in model.parameters():
        nn.init.zeros_(weight)  # every row attends to all keys alike
    places = torch.arange(600.0)
    distance = (places[:, None] - places).abs().mean().double()
    found = read(model, torch.randn(1, 600, 16).bfloat16()).distance.table()
    assert_alike(found, distance.expand(1, 4), dtype=torch.float32)


@pytest.mark.parametrize("name", ["bert", "t5"])  # whose position bias goes another way
def test_bad_sets(name: str) -> None:
    model = use(tiny_models.build(name))
    arguments = tiny_models.batch(model)
    assert_refused(
        ({"token_sets": [5]}, TypeError, "token_sets is a list"),
        ({"token_sets": {"x": lambda b: b["input_ids"][:, :2] == 5}}, r"token_sets\['x'\] is torch.b"),
        ({"token_sets": {"x": "five"}}, TypeError, r"token_sets\['x'\] is a str"),
        ({"exclude_keys": lambda b: b["input_ids"][:, :2] == 5}, r"exclude_keys .*has shape \[3, 2\]; .* = \[9\]"),
        ({"exclude_keys": lambda b: b["input_ids"]}, TypeError, "exclude_keys has dtype torch.int64"),
        ({"exclude_keys": lambda b: None}, TypeError, "exclude_keys gave a NoneType; give a bool tensor"),
        ({"exclude_keys": lambda b: {"encoder": None}}, TypeError, "exclude_keys gave a NoneType"),
        ({"exclude_keys": lambda b: {"self": b["input_ids"] == 5}}, "exclude_keys gave the kind 'self'"),
        ({"token_sets": {"x": lambda b: [True]}}, TypeError, r"token_sets\['x'\] gave a list"),
        of=partial(read, model, arguments),
        unchanged=[model],
    )
    without = partial(read, model, arguments["input_ids"], token_sets={"x": [5]})
    assert_refused((without, r"token_sets\['x'\] .* a batch has no '\w*input_ids'"))
    last = torch.arange(9) == 8
    for keys in (last, last[None], last.expand(3, 9)):
        read(model, arguments, exclude_keys=lambda batch, keys=keys: {"encoder": keys})
