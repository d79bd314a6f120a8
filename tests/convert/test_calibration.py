"""Moments of the inputs of layers against sums made row by row: of tensors, and of whole models by `calibrate`."""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heads_kernels.convert import Heads, Moments, calibrate, collaborate, curves
from heads_kernels.heads import projected_layers
from tests.convert.converted_models import encoder
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, B, E, S
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, build

T, D_in, D_in_k = 7, 6, 4


def real(*lengths: int, left: bool = False) -> Tensor:
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    return mask.flip(1) if left else mask


#: Inputs of queries and keys of one call, which are real, and whether it is causal.
Call = tuple[Tensor, Tensor, Tensor, Tensor, bool]


def moments_by_hand(runs: list[Call]) -> Moments:
    x, y = runs[0][:2]
    count, total = 0, torch.zeros(x.shape[-1], dtype=torch.float64)
    query_outer = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float64)
    key_outer = torch.zeros(y.shape[-1], y.shape[-1], dtype=torch.float64)
    for x, y, rows, keys, causal in runs:
        for b in range(len(x)):
            for t in rows[b].nonzero().flatten().tolist():
                seen = keys[b].clone()
                if causal:
                    seen[t + 1 :] = False
                row, among = x[b, t].double(), y[b][seen].double()
                count += 1
                total += row
                query_outer += torch.outer(row, row)
                if len(among):
                    key_outer += torch.cov(among.T, correction=0)
    return Moments(torch.tensor(count), query_outer, key_outer, total)


def assert_moments(found: Moments, expected: Moments) -> None:
    assert int(found.count) == int(expected.count)
    for name in ("query_sum", "query_outer", "key_outer"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == torch.float64
        assert_alike(one, other, dtype=torch.float32)


# ---------------------------------------------------------------------- of tensors
WHOLE = real(T, T, T)
#: Real rows, and real keys: whole, padded, empty, of their own and on the left.
MASKS = [
    (WHOLE, WHOLE),
    *((rows := real(*lengths), rows) for lengths in ((7, 1, 4), (0, 3, 5))),
    (real(7, 3, 5), real(4, 7, 6, left=True)),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), MASKS)
def test_self_attention(rows: Tensor, keys: Tensor, is_causal: bool) -> None:
    """What is not real is not read."""
    x = torch.randn(3, T, D_in)
    expected = moments_by_hand([(x, x, rows, keys, is_causal)])
    read = x.masked_fill(~(rows | keys)[..., None], torch.nan)
    found = Moments.of(read, query_mask=rows, key_mask=keys, is_causal=is_causal)
    assert_moments(found, expected)


def test_cross_attention() -> None:
    x, y = torch.randn(3, T, D_in), torch.randn(3, 5, D_in_k)
    rows, keys = real(7, 2, 4), real(5, 1, 3)[:, :5]
    found = Moments.of(x, y, query_mask=rows, key_mask=keys)
    assert_moments(found, moments_by_hand([(x, y, rows, keys, False)]))
    expected = moments_by_hand([(x, y, WHOLE, WHOLE[:, :5], False)])
    assert_moments(Moments.of(x, y), expected)


def test_a_row_of_sentences_added_to_each_sees_its_own_mean() -> None:
    """What a whole sentence of keys shares is no matter: the softmax does not see it."""
    x = torch.randn(3, T, D_in, dtype=torch.double)
    moved = x + 100 * torch.randn(3, 1, D_in, dtype=torch.double)
    assert_alike(Moments.of(moved).key_outer, Moments.of(x).key_outer)


# ---------------------------------------------------------------------- of models
def calls(model: Any, arguments: dict[str, Tensor]) -> dict[str, list[Call]]:
    """For each run of each layer of a stock model: inputs of queries and keys, which are real, whether causal."""
    layers = projected_layers(model)
    inputs: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}  # of a query, of a key and so on
    for layer in layers:
        for projection in (layer.query, layer.key):
            keep = partial(lambda own, _, args: own.append(args[0]), inputs[layer.name])
            projection.linear.register_forward_pre_hook(keep)
    with torch.no_grad():
        model(**arguments)
    real = arguments.get("attention_mask", torch.ones(inputs[layers[0].name][0].shape[:2])).bool()
    target = arguments.get("decoder_attention_mask", real).bool()
    found = {}
    for layer in layers:
        masks = real if layer.kind == "encoder" else target, target if layer.kind == "decoder" else real
        pairs = zip(inputs[layer.name][::2], inputs[layer.name][1::2], strict=True)
        found[layer.name] = [(*pair, *masks, layer.kind == "decoder") for pair in pairs]
    return found


@pytest.mark.parametrize("name", ["bert", "albert", "vit", "gpt2", "t5", "bart"])
def test_moments_of_transformers_models(name: str) -> None:
    """A batch with a whole row, one padded on the right and one on the left; batches add up.

    A layer that is asked for alone has the same: padded rows of a decoder do not count in its cross-attention.
    """
    model = build(name)
    arguments = batch(model)
    found = calibrate(model, [arguments])
    expected = calls(build(name), arguments)
    assert found.keys() == expected.keys()
    for layer, runs in expected.items():
        assert_moments(found[layer], moments_by_hand(runs))
        ((only, alone),) = calibrate(model, [arguments], [layer]).items()
        assert only == layer
        assert_moments(alone, found[layer])
    assert all(len(runs) == (2 if name == "albert" else 1) for runs in expected.values())
    size = next(iter(arguments.values())).shape[0]
    rows = [{key: each[n : n + 1] for key, each in arguments.items()} for n in range(size)]
    for layer, moments in calibrate(model, iter(rows)).items():
        assert_moments(moments, found[layer])


# ---------------------------------------------------------------------- memory, and a state of the model's own
def test_one_batch_at_a_time() -> None:
    """When the third batch is made, nothing of the first is left; nor of a layer's inputs when a later one has run."""
    model = encoder(3)
    alive: list[weakref.ref[Tensor]] = []
    inputs: list[weakref.ref[Tensor]] = []
    left: list[bool] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(4):
            assert not any(each() is not None for each in alive[:-1])
            made = torch.randn(B, S, E)
            alive.append(weakref.ref(made))
            yield made

    model.layers[1].register_forward_pre_hook(lambda _, x: inputs.append(weakref.ref(x[0])))
    model.layers[2].register_forward_hook(lambda *_: left.append(inputs[-1]() is not None))
    calibrate(model, batches())
    assert not any(left)


class Counting(nn.Module):
    """It counts its calls, as models with running statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.seen = encoder(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if not hasattr(self, "first"):
            self.register_buffer("first", x.mean())
        return self.encoder(x)


def test_what_the_forward_keeps_stays() -> None:
    model = Counting()
    calibrate(model, [torch.randn(B, S, E)] * 3)
    assert (model.seen, hasattr(model, "first")) == (3, True)
    curves(model, [torch.randn(B, S, E)])
    assert model.seen == 4
    assert not any(each.layout.shared for each in projected_layers(model))
    collaborate(model, 8, calibration=[torch.randn(B, S, E)] * 2)
    assert model.seen == 6


def test_moments_serve_several_conversions() -> None:
    moments = calibrate(build("bert"), [batch(build("bert"))])
    one = collaborate(build("bert"), 16, calibration=moments, layers=[1])
    other = collaborate(build("bert"), 16, calibration=[batch(build("bert"))], layers=[1])
    assert one.layers == other.layers == (list(moments)[1],)
    assert one.errors == pytest.approx(other.errors, rel=1e-6)


# ---------------------------------------------------------------------- what is refused
def broken(where: int) -> Tensor:
    x = torch.randn(B, S, E)
    x[1, where, 3] = torch.nan
    return x


X = torch.randn(B, S, E)


def test_refused() -> None:
    bert, gpt2, ours, half = build("bert"), build("gpt2"), encoder(), nn.ModuleList([encoder(1), encoder(1)])
    half.forward = lambda x: half[0](x)
    ids, hidden = torch.randint(3, 40, (2, 6)), batch(bert)
    hidden["attention_mask"] = torch.zeros_like(hidden["attention_mask"])
    cached = {"input_ids": ids[:, 4:], "past_key_values": gpt2(ids[:, :4]).past_key_values}
    assert_refused(
        ((bert, [hidden]), r".*layer 0 \('encoder.* has no tokens"),
        ((bert, []), "calibration has no batches"),
        ((gpt2, [cached]), ".*without a cache"),
        ((half, [X]), r".*has no moments of layer 1 \('1\.layers\.0\."),
        ((ours, [X, broken(2)]), r".*layer 'layers\.0\.self_attn' in batch 1 holds NaN"),
        ((ours, [X[:, :1]]), ".*keys of layer 0 .* never vary"),
        *(((ours, data), TypeError, "calibration is a") for data in ("text", 3, None, {"src": 1}, X)),
        of=calibrate,
        unchanged=[bert, gpt2, ours, half],
    )


def test_padding_may_hold_nan() -> None:
    calibrate(encoder(1), [{"src": broken(5), "src_key_padding_mask": PADDED}])


def test_moments_of_another_model() -> None:
    moments = calibrate(encoder(2, 12), [torch.randn(B, S, 12)])
    fewer = calibrate(encoder(2), [X])
    missing = r"calibration has no moments of layer 2 .*; calibrate this model with batches that bring tokens"
    assert_refused(
        ((encoder(), moments), r"calibration of layer 0 .* has widths \(12, 12\); .*\(24, 24\)"),
        ((encoder(3), fewer), missing),
        of=lambda model, moments: collaborate(model, 8, calibration=moments),
    )


def test_bad_batches() -> None:
    pair, mask = torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)
    of_key = r"key_mask has dtype torch.bool and shape \[2\]; pass bool \[4\]"
    assert_refused(
        ({"query_inputs": pair.long()}, "query_inputs has dtype torch.int64"),
        ({"query_inputs": pair[0]}, "query_inputs has dtype torch.float32 and shape"),
        ({"query_inputs": pair, "query_mask": torch.ones(2)}, "query_mask has dtype"),
        ({"query_inputs": pair, "key_inputs": torch.zeros(4, 5), "key_mask": mask}, of_key),
        ((torch.zeros(2, 2, 3), torch.zeros(3, 4, 5)), r"key_inputs has shape \[3, 4, 5\]"),
        ({"query_inputs": pair, "key_inputs": pair, "is_causal": True}, "is_causal is True with key_in"),
        of=Moments.of,
    )


def test_moments_that_do_not_fit() -> None:
    heads = Heads(torch.randn(2, 3, D_in), torch.randn(2, 3, D_in_k), scale=1.0)
    x, y = torch.randn(T, D_in), torch.randn(5, D_in_k)
    none = Moments.of(x, y, query_mask=torch.zeros(T, dtype=torch.bool))
    assert_refused(
        ((2, Moments.of(x)), r"moments has widths \(6, 6\); those of the layer are \(6, 4\)"),
        ((2, none), "moments has no tokens"),
        ((2, Moments.of(x * torch.nan, y)), "moments holds NaN or infinity"),
        of=heads.fit,
    )
    assert_refused((lambda: Moments.of(x, y) + Moments.of(x), r"widths \(6, 6\); those that they are added to"))
