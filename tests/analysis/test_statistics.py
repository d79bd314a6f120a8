"""Statistics of heads: against maps in memory, on every kind of model, with padding on either side."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import heads_kernels as hk
from heads_kernels.analysis.positions import Band, attended, own_keys
from heads_kernels.analysis.statistics import MEASURES
from heads_kernels.testing import peak_memory
from tests.analysis.attention_maps import Layers, Maps, maps_of_layers, stock_maps
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.nn_layers import spread

use = hk.integrations.transformers.use
SETS = {"some": [5, 6, 7, 8, 9], "even": list(range(0, 40, 2))}


def read(model: nn.Module, *data: Any, **options: Any) -> hk.analysis.HeadStatistics:
    return hk.analysis.statistics(model, list(data), **options)


def of_kind(scores: hk.analysis.HeadScores, kind: str) -> Tensor:
    chosen = [i for i, each in enumerate(scores.kinds) if each == kind]
    return torch.stack([scores.scores[i] for i in chosen])


def assert_reads(
    found: hk.analysis.HeadStatistics, maps: Maps, kind: str = "encoder", tolerance: float = 1e-7
) -> None:
    for name, expected in maps.measures().items():
        got = of_kind(getattr(found, name), kind)
        assert got.dtype == torch.float64
        if len(got) < len(expected):  # one layer that runs several times
            expected = expected.mean(0, keepdim=True)
        assert_alike(got, expected, dtype=torch.float32, name=name)
    rows = [n for n, each in zip(found.rows, found.confidence.kinds, strict=True) if each == kind]
    runs = len(maps.maps) // len(rows)
    assert rows == [int(maps.rows.sum()) * runs] * len(rows)


def layers(**options: Any) -> Layers:
    torch.manual_seed(0)
    makes = hk.nn.GatedMultiheadAttention, hk.nn.CollaborativeMultiheadAttention
    return Layers(
        spread(makes[0](16, 4, dtype=torch.float64, **options)),
        spread(makes[1](16, 4, 12, dtype=torch.float64)),
    )


# ---------------------------------------------------------------------- against maps in memory
@pytest.mark.parametrize(
    "name",
    [
        "albert", "bert", "modernbert", "vit", "bart", "marian", "t5", "gpt2", "llama", "mistral", "gemma3_text",
        "qwen3_next",
    ],
)  # fmt: skip
def test_transformers_models_as_their_maps_say(name: str) -> None:
    """Padding on the right and on the left, causal, windows, grouped keys, position biases, cross-attention."""
    stock = tiny_models.build(name).double()
    arguments = tiny_models.batch(stock)
    found = read(use(copy.deepcopy(stock)), arguments)
    for kind, maps in stock_maps(stock, arguments).items():
        assert_reads(found, maps, kind)


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])
def test_float32_to_1e_5(name: str) -> None:
    stock = tiny_models.build(name)
    arguments = tiny_models.batch(stock)
    arguments["attention_mask"][1, 6] = arguments["attention_mask"][2, :2] = 1
    maps = stock_maps(copy.deepcopy(stock).double(), arguments)
    found = read(use(stock), arguments)
    for kind, each in maps.items():
        assert_reads(found, each, kind, 1e-5)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_our_modules(left: bool, causal: bool) -> None:
    model, x = layers(num_key_heads=2), torch.randn(2, 9, 16, dtype=torch.float64)
    real = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    real = real.flip(1) if left else real
    visible = real[:, None] & real[:, :, None]
    visible = visible.tril() if causal else visible
    with torch.no_grad():
        maps = maps_of_layers(model, x, visible)
    arguments = {"x": x, "padding": ~real, "is_causal": causal}
    assert_reads(read(model, arguments), maps, tolerance=1e-12)


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


def test_offsets_of_the_most_probable_key() -> None:
    stock = tiny_models.build("t5").double()
    arguments = tiny_models.batch(stock)
    found = read(use(copy.deepcopy(stock)), arguments)
    at = {"encoder": 0, "decoder": 2, "cross": 3}  # T5 has both kinds in each layer of its decoder
    for kind, maps in stock_maps(stock, arguments).items():
        best = maps.maps[0].argmax(-1)  # [B, H, T]
        offsets = maps.offsets[:, None].expand(*best.shape, -1).gather(3, best[..., None])[..., 0]
        counts = found.offsets[at[kind]]
        N = counts.shape[1] // 2
        for head in range(4):
            chosen = offsets[:, head][maps.rows] + N
            assert torch.equal(counts[head], torch.bincount(chosen, minlength=2 * N + 1))


def test_rows_without_an_allowed_key_have_no_offset() -> None:
    model, x = layers(), torch.randn(2, 6, 16, dtype=torch.float64)
    every = {"exclude_keys": lambda batch: torch.ones(2, 6, dtype=torch.bool)}
    found = read(model, x, **every)
    assert not any(counts.any() for counts in found.offsets)
    assert not found.confidence.table().any()


# ---------------------------------------------------------------------- what must not matter
def test_how_data_are_cut_into_batches() -> None:
    model = use(tiny_models.build("bert").double())
    whole = tiny_models.batch(model)
    rows = [{name: tensor[i : i + 1] for name, tensor in whole.items()} for i in range(3)]
    short = {name: tensor[:, :7] for name, tensor in rows[1].items()}
    together = read(model, whole, token_sets=SETS)
    apart = read(model, rows[0], short, rows[2], token_sets=SETS)
    assert together.rows == apart.rows
    for name, scores in together.measures.items():
        assert_alike(scores.table(), apart.measures[name].table())
    assert all(map(torch.equal, together.offsets, apart.offsets))


def test_the_side_of_the_padding() -> None:
    model, x = layers(), torch.randn(1, 7, 16, dtype=torch.float64)
    alone = read(model, x)
    for before, behind in ((0, 4), (4, 0), (3, 2)):
        padded = nn.functional.pad(x, (0, 0, before, behind), value=9.0)
        padding = nn.functional.pad(
            torch.zeros(1, 7, dtype=torch.bool), (before, behind), value=True
        )
        found = read(model, (padded, padding))
        assert found.rows == alone.rows == (7, 7)
        for name, scores in alone.measures.items():
            assert_alike(scores.table(), found.measures[name].table())


def test_the_side_of_the_padding_in_cross_attention() -> None:
    model = use(tiny_models.build("t5").double())  # its positions are relative
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 40, (1, 12), generator=generator)
    source, target = tokens[:, :7], tokens[:, 7:]

    def batch(left: int, right: int) -> dict[str, Tensor]:
        pad = nn.functional.pad
        return {
            "input_ids": pad(source, (left, right)),
            "attention_mask": pad(torch.ones_like(source), (left, right)),
            "decoder_input_ids": pad(target, (right, left)),
            "decoder_attention_mask": pad(torch.ones_like(target), (right, left)),
        }

    alone = read(model, batch(0, 0))
    for sides in ((0, 3), (3, 0), (1, 2)):
        found = read(model, batch(*sides))
        assert found.rows == alone.rows
        for name in MEASURES:
            expected, got = getattr(alone, name), getattr(found, name)
            assert_alike(got.table(), expected.table(), dtype=torch.float32)


def test_a_dense_mask_reads_as_a_native_one() -> None:
    """No fused kernel takes it: sums go by blocks of rows."""
    model, x = layers(), torch.randn(2, 40, 16, dtype=torch.float64)
    native = read(model, {"x": x, "is_causal": True})
    dense = read(model, {"x": x, "attn_mask": torch.ones(40, 40, dtype=torch.bool).triu(1)})
    for name, scores in native.measures.items():
        assert_alike(scores.table(), dense.measures[name].table())
    assert all(map(torch.equal, native.offsets, dense.offsets))


def test_rows_behind_a_cache() -> None:
    layer = spread(hk.nn.GatedMultiheadAttention(16, 4, dtype=torch.float64))

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layer

        def forward(self, x: Tensor, parts: list[int]) -> None:
            cache = hk.nn.KeyValueCache()
            for part in x.split(parts, 1):
                self.attention(part, is_causal=True, cache=cache)

    x = torch.randn(2, 9, 16, dtype=torch.float64)
    whole, steps = read(Steps(), (x, [9])), read(Steps(), (x, [4, 1, 3, 1]))
    assert whole.rows == steps.rows
    for name, scores in whole.measures.items():
        assert_alike(scores.table(), steps.measures[name].table())


def test_models_in_half_precision() -> None:
    """Places of keys are exact all the same."""
    torch.manual_seed(0)
    model = Layers(spread(hk.nn.GatedMultiheadAttention(16, 4))).bfloat16()
    x = torch.randn(1, 600, 16).bfloat16()
    found = read(model, x)
    layer, wide = model.layers[0], copy.deepcopy(model).float()
    with torch.no_grad():  # the operands as the model rounds them
        wide.layers[0].q_proj = _Given(layer.q_proj(x).float())
        wide.layers[0].k_proj = _Given(layer.k_proj(x).float())
        maps = maps_of_layers(wide, x.float(), torch.ones(1, 600, 600, dtype=torch.bool))
    for name, expected in maps.measures().items():
        torch.testing.assert_close(
            getattr(found, name).table(), expected.double(), rtol=1e-2, atol=1e-3
        )


class _Given(nn.Module):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        return self.output


@pytest.mark.parametrize("lowest", [-1e4, torch.finfo(torch.float64).min])
def test_float_masks_of_models(lowest: float) -> None:
    """MarkupLM hides padding by -10000."""
    model = use(tiny_models.build("bert").double())
    arguments = tiny_models.batch(model)
    real = arguments["attention_mask"]
    added = (1.0 - real[:, None, None].double()) * lowest
    for found in (read(model, arguments), read(model, {**arguments, "attention_mask": added})):
        assert found.rows == (int(real.sum()),) * 2
    gradients = [
        hk.analysis.importance(
            model, [{**arguments, "attention_mask": mask}], lambda m, x: m(**x)[0][real > 0].sum()
        )
        for mask in (real, added)
    ]
    assert_alike(*(each.scores for each in gradients))


# ---------------------------------------------------------------------- pruned, closed, put back
def test_pruned_models_and_layers_without_heads() -> None:
    model = use(tiny_models.build("bert").double())
    arguments = tiny_models.batch(model)
    hk.heads.close(model, {0: [0, 2], 1: [0, 1, 2, 3]})
    before = read(model, arguments)
    hk.heads.prune(model, hk.heads.closed(model))
    found = read(model, arguments)
    assert found.rows == (int(arguments["attention_mask"].sum()), 0)
    for name in MEASURES:
        expected, got = getattr(before, name).scores, getattr(found, name).scores
        assert_alike(got[0], expected[0][[1, 3]])
        assert got[1].shape == (0,)
    assert torch.equal(found.offsets[0], before.offsets[0][[1, 3]])
    assert found.to_dict()["layers"][1]["confidence"] == []


def test_pruned_layers_with_a_position_bias() -> None:
    model = use(tiny_models.build("t5").double())
    arguments = tiny_models.batch(model)
    hk.heads.close(model, {0: [1]})
    before = read(model, arguments)
    hk.heads.prune(model, hk.heads.closed(model))
    found = read(model, arguments)
    for name in MEASURES:
        expected = getattr(before, name).scores[0][[0, 2, 3]]
        assert_alike(getattr(found, name).scores[0], expected)


def test_the_model_is_put_back() -> None:
    model = use(tiny_models.build("bert")).train()
    model.embeddings.eval()
    model.encoder.layer[0].requires_grad_(False)
    modes = [module.training for module in model.modules()]
    asking = [parameter.requires_grad for parameter in model.parameters()]

    def data() -> Any:
        yield tiny_models.batch(model)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hk.analysis.statistics(model, data())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == asking
    read(model, tiny_models.batch(model))  # nothing observes it still


def test_dropout_is_off() -> None:
    model = use(
        tiny_models.build("bert", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.5)
    )
    arguments = tiny_models.batch(model)
    expected = read(model.eval(), arguments).entropy.table()
    assert_alike(read(model.train(), arguments).entropy.table(), expected)


def test_memory_is_bounded() -> None:
    """T 2048: the maps of the 4 heads would take 64 MiB."""
    model, x = Layers(spread(hk.nn.GatedMultiheadAttention(16, 4))), torch.randn(1, 2048, 16)
    read(model, x[:, :64])
    assert peak_memory(lambda: read(model, x, token_sets={"x": _first})).extra < 16 << 20


def _first(batch: Tensor) -> Tensor:
    return torch.arange(batch.shape[1])[None] == 0


@pytest.mark.check
@torch.no_grad()
def test_memory_is_bounded_where_no_operator_serves() -> None:
    """T 4096: the maps would take 256 MiB."""
    query, key = torch.randn(2, 1, 4, 4096, 8)
    bias = torch.zeros(1, 1, 1, 4096)
    call = hk.analysis.AttentionCall(query, key, key, None, None, None, 0.3, bias)
    own = own_keys(call)
    band = Band(own * 0, own + 1, torch.ones(1, 4096, 1))
    lse = (0.3 * query @ key.mT).logsumexp(-1)
    found: list[Tensor] = []
    assert peak_memory(lambda: found.extend(attended(call, lse, [band]))).extra < 64 << 20
    rows = torch.tensor([0, 7, 1000, 4095])
    p = (0.3 * query[:, :, rows] @ key.mT).softmax(-1)
    expected = (p * (torch.arange(4096) <= rows[:, None])).sum(-1)
    assert_alike(found[0][:, :, rows, 0], expected)


# ---------------------------------------------------------------------- bad input
def test_bad_data() -> None:
    model = use(tiny_models.build("bert"))
    arguments = tiny_models.batch(model)
    with pytest.raises(ValueError, match=r"data has no batches"):
        read(model)
    with pytest.raises(ValueError, match=r"data has no batches"):
        hk.analysis.statistics(model, iter(()))
    with pytest.raises(TypeError, match=r"data is a dict"):
        hk.analysis.statistics(model, arguments)
    nothing = {**arguments, "attention_mask": torch.zeros_like(arguments["attention_mask"])}
    with pytest.raises(ValueError, match=r"data has no token that reaches layer 0"):
        read(model, nothing)
    assert read(model, nothing, arguments).rows == (22, 22)


def test_bad_sets() -> None:
    model = use(tiny_models.build("bert"))
    arguments = tiny_models.batch(model)
    with pytest.raises(TypeError, match=r"token_sets is a list"):
        read(model, arguments, token_sets=[5])
    with pytest.raises(ValueError, match=r"token_sets\['x'\] is torch.bool \[3, 2\]"):
        read(model, arguments, token_sets={"x": lambda batch: batch["input_ids"][:, :2] == 5})
    with pytest.raises(TypeError, match=r"token_sets\['x'\], as in exclude_keys: .* is a str"):
        read(model, arguments, token_sets={"x": "five"})
    with pytest.raises(ValueError, match=r"token_sets\['x'\], .* a batch has no 'input_ids'"):
        read(model, arguments["input_ids"], token_sets={"x": [5]})


class Stream(IterableDataset[Any]):
    """A batch that comes out of no list: a loader of it has a `len` that raises."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        yield self.batch


def test_data_that_do_not_know_their_length() -> None:
    model = use(tiny_models.build("bert"))
    arguments = tiny_models.batch(model)
    loader = DataLoader(Stream(arguments), batch_size=None)
    assert hk.analysis.statistics(model, loader).rows == (22, 22)

    def loss(model: Any, batch: Any) -> Tensor:
        return model(**batch)[0].square().sum((1, 2))

    for method in ("gradient", "leave_one_out"):
        found, same = (
            hk.analysis.importance(model, data, loss, method=method).table()
            for data in (loader, [arguments])
        )
        assert_alike(found, same)


def test_excluded_keys_of_a_position_bias_are_checked() -> None:
    model = use(tiny_models.build("t5"))
    arguments = tiny_models.batch(model)
    last = torch.arange(9) == 8
    for shape in (last, last[None], last.expand(3, 9)):
        read(model, arguments, exclude_keys=lambda batch, s=shape: {"encoder": s})
    with pytest.raises(
        ValueError, match=r"exclude_keys has shape \[3, 2\]; pass bool \[S\] = \[9\]"
    ):
        read(model, arguments, exclude_keys=lambda batch: batch["input_ids"][:, :2] == 5)
    with pytest.raises(TypeError, match=r"exclude_keys has dtype torch.int64"):
        read(model, arguments, exclude_keys=lambda batch: batch["input_ids"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"exclude_keys gave a NoneType; give a bool tensor"),
        ([True], r"exclude_keys gave a list"),
        ({"encoder": None}, r"exclude_keys gave a NoneType"),
        ({"self": torch.zeros(3, 9, dtype=torch.bool)}, r"exclude_keys gave the kind 'self'"),
    ],
)
def test_what_a_function_of_a_batch_gives_is_checked(given: Any, message: str) -> None:
    model = use(tiny_models.build("bert"))
    arguments = tiny_models.batch(model)
    with pytest.raises((TypeError, ValueError), match=message):
        read(model, arguments, exclude_keys=lambda batch: given)
    with pytest.raises((TypeError, ValueError), match=message):
        read(model, arguments, token_sets={"x": lambda batch: given})


def test_a_model_that_is_not_in_use() -> None:
    stock = tiny_models.build("bert")
    with pytest.raises(ValueError, match=r"call hk.integrations.transformers.use\(model\) first"):
        read(stock, tiny_models.batch(stock))


def test_weights_of_inference_mode_are_read_too() -> None:
    with torch.inference_mode():
        model = hk.nn.GatedMultiheadAttention(8, 2)
    found = hk.analysis.statistics(model, [torch.randn(2, 3, 8)])
    assert found.rows == (6,)
    assert all(weight.requires_grad for weight in model.parameters())
