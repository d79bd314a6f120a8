"""Moments of the inputs of layers against sums made row by row: of tensors, and of whole models by `calibrate`."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import Heads, Moments, calibrate, collaborate, curves
from heads_kernels.heads import projected_layers
from tests.convert.converted_models import torch_encoder
from tests.support.alike import assert_alike
from tests.support.model_state import state
from tests.support.nn_layers import PADDED, B, E, H, S
from tests.support.tiny_models import batch, build

T, D_in, D_in_k = 7, 6, 4


def real(*lengths: int, size: int, left: bool = False) -> Tensor:
    mask = torch.arange(size) < torch.tensor(lengths)[:, None]
    return mask.flip(1) if left else mask


#: Inputs of queries and keys of one call, which are real, and whether it is causal.
Call = tuple[Tensor, Tensor, Tensor, Tensor, bool]


def moments_by_hand(runs: list[Call]) -> Moments:
    """Row after row."""
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
WHOLE = real(T, T, T, size=T)
#: Real rows, and real keys: whole, padded, empty, of their own and on the left.
MASKS = [
    (WHOLE, WHOLE),
    *((rows := real(*lengths, size=T), rows) for lengths in ((7, 1, 4), (0, 3, 5))),
    (real(7, 3, 5, size=T), real(4, 7, 6, size=T, left=True)),
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
    rows, keys = real(7, 2, 4, size=T), real(5, 1, 3, size=5)
    found = Moments.of(x, y, query_mask=rows, key_mask=keys)
    assert_moments(found, moments_by_hand([(x, y, rows, keys, False)]))
    expected = moments_by_hand([(x, y, WHOLE, real(5, 5, 5, size=5), False)])
    assert_moments(Moments.of(x, y), expected)


def test_batches_add_up() -> None:
    x, mask = torch.randn(3, T, D_in, dtype=torch.bfloat16), real(7, 3, 5, size=T)
    one, *others = (Moments.of(x[b], query_mask=mask[b]) for b in range(3))
    assert_moments(sum(others, start=one), Moments.of(x, query_mask=mask))


def test_a_row_of_sentences_added_to_each_sees_its_own_mean() -> None:
    """What a whole sentence of keys shares is no matter: the softmax does not see it."""
    x = torch.randn(3, T, D_in, dtype=torch.double)
    moved = x + 100 * torch.randn(3, 1, D_in, dtype=torch.double)
    assert_alike(Moments.of(moved).key_outer, Moments.of(x).key_outer)


# ---------------------------------------------------------------------- of models
FAMILIES = ("bert", "albert", "vit", "gpt2", "t5", "bart")


def calls(model: Any, arguments: dict[str, Tensor]) -> dict[str, list[Call]]:
    """For each run of each layer of a stock model: inputs of queries and keys, which are real, whether causal."""
    found: dict[str, list[Call]] = {}
    real = arguments.get("attention_mask")
    target = arguments.get("decoder_attention_mask", real)

    def keep(layer: Any) -> Any:
        def hook(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = named["hidden_states"] if "hidden_states" in named else positional[0]
            y = named.get("key_value_states")
            y = named.get("encoder_hidden_states") if y is None else y
            y = x if y is None or layer.kind != "cross" else y
            rows, keys = real, real
            if layer.kind != "encoder":
                rows = target
                keys = real if layer.kind == "cross" else target
            rows = torch.ones(x.shape[:2]) if rows is None else rows
            keys = torch.ones(y.shape[:2]) if keys is None else keys
            call = x.detach(), y.detach(), rows.bool(), keys.bool(), layer.kind == "decoder"
            found.setdefault(layer.name, []).append(call)

        return hook

    for layer in projected_layers(model):
        layer.module.register_forward_pre_hook(keep(layer), with_kwargs=True)
    with torch.no_grad():
        model(**arguments)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_moments_of_transformers_models(name: str) -> None:
    """A batch with a whole row, one padded on the right and one on the left; batches add up."""
    model = build(name)
    arguments = batch(model)
    found = calibrate(model, [arguments])
    expected = calls(build(name), arguments)
    assert found.keys() == expected.keys()
    for layer, runs in expected.items():
        assert_moments(found[layer], moments_by_hand(runs))
    assert all(len(runs) == (2 if name == "albert" else 1) for runs in expected.values())
    size = next(iter(arguments.values())).shape[0]
    rows = [{key: each[n : n + 1] for key, each in arguments.items()} for n in range(size)]
    for layer, moments in calibrate(model, iter(rows)).items():
        assert_moments(moments, found[layer])


def test_rows_of_cross_attention_alone() -> None:
    """Padded rows of the decoder do not count, though its self-attention is not asked for."""
    model = build("bart")
    arguments = batch(model)
    names = [layer.name for layer in projected_layers(model) if layer.kind == "cross"]
    found = calibrate(model, [arguments], names)
    assert list(found) == names
    assert int(found[names[0]].count) == int(arguments["decoder_attention_mask"].sum())


# ---------------------------------------------------------------------- memory, and a state of the model's own
def test_one_batch_at_a_time() -> None:
    """When the third batch is made, nothing of the first is left; nor of a layer's inputs when a later one has run."""
    model = torch_encoder(3)
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
        self.encoder, self.seen = torch_encoder(), 0

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
def padded(model: Any) -> list[dict[str, Tensor]]:
    arguments = batch(model)
    return [arguments | {"attention_mask": torch.zeros_like(arguments["attention_mask"])}]


def cached(model: Any) -> list[dict[str, Any]]:
    ids = torch.randint(3, 40, (2, 6))
    return [{"input_ids": ids[:, 4:], "past_key_values": model(ids[:, :4]).past_key_values}]


def broken(where: int) -> Tensor:
    x = torch.randn(B, S, E)
    x[1, where, 3] = torch.nan
    return x


def half_run() -> nn.Module:
    model = nn.ModuleList([torch_encoder(1), torch_encoder(1)])
    model.forward = lambda x: model[0](x)
    return model


X = torch.randn(B, S, E)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "all is padding": (lambda: build("bert"), padded, r"layer 0 \('encoder.* has no tokens"),
    "nothing": (lambda: build("bert"), lambda _: [], "calibration has no batches"),
    "a cache": (lambda: build("gpt2"), cached, "without a cache"),
    "a layer that does not run": (half_run, lambda _: [X], r"no token to layer 1 \('1\.layers\.0\."),
    "NaN": (
        torch_encoder, lambda _: [X, broken(2)], r"layer 'layers\.0\.self_attn' in batch 1 holds NaN",
    ),
    "keys that never vary": (torch_encoder, lambda _: [X[:, :1]], "keys of layer 0 .* never vary"),
    **{
        repr(data): (torch_encoder, lambda _, data=data: data, "calibration is a")
        for data in ("text", 3, None, {"src": 1})
    },
    "a tensor": (torch_encoder, lambda _: torch.zeros(2, 3), "calibration is a"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, data, message = REFUSED[name]
    model = make()
    arguments = data(model)
    before = state(model)
    with pytest.raises((TypeError, ValueError), match=message):
        calibrate(model, arguments)
    assert state(model) == before


def test_padding_may_hold_nan() -> None:
    calibrate(torch_encoder(1), [{"src": broken(5), "src_key_padding_mask": PADDED}])


def test_moments_of_another_model() -> None:
    layer = nn.TransformerEncoderLayer(12, H, 16, batch_first=True)
    other = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    moments = calibrate(hk.nn.replace_attention_(other), [torch.randn(B, S, 12)])
    with pytest.raises(ValueError, match=r"layer 0 .* has widths \(12, 12\); .*\(24, 24\)"):
        collaborate(torch_encoder(), 8, calibration=moments)
    moments = calibrate(torch_encoder(2), [X])
    message = r"has moments of 'layers\.0\.self_attn', .*also has 'layers\.2\.self_attn': calibrate"
    with pytest.raises(ValueError, match=message):
        collaborate(torch_encoder(3), 8, calibration=moments)


PAIR = torch.zeros(2, 3)
BAD_TENSORS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((PAIR.long(),), {}, "query_inputs has dtype torch.int64"),
    ((PAIR[0],), {}, "query_inputs has dtype torch.float32 and shape"),
    ((PAIR,), {"query_mask": torch.ones(2)}, "query_mask has dtype"),
    (
        (PAIR, torch.zeros(4, 5)),
        {"key_mask": torch.ones(2, dtype=torch.bool)},
        "key_mask has dtype torch.bool and shape [2]; pass bool [4]",
    ),
    ((torch.zeros(2, 2, 3), torch.zeros(3, 4, 5)), {}, "key_inputs has shape [3, 4, 5]"),
    ((PAIR, PAIR), {"is_causal": True}, "is_causal is True with key_in"),
]


def test_bad_batches() -> None:
    for arguments, options, message in BAD_TENSORS:
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            Moments.of(*arguments, **options)


def test_moments_that_do_not_fit() -> None:
    heads = Heads(torch.randn(2, 3, D_in), torch.randn(2, 3, D_in_k), scale=1.0)
    x, y = torch.randn(T, D_in), torch.randn(5, D_in_k)
    for moments, message in (
        (Moments.of(x), re.escape("widths (6, 6); those of the layer are (6, 4)")),
        (Moments.of(x, y, query_mask=torch.zeros(T, dtype=torch.bool)), "moments has no tokens"),
        (Moments.of(x * torch.nan, y), "moments holds NaN or infinity"),
    ):
        with pytest.raises(ValueError, match=message):
            heads.fit(2, moments)
    with pytest.raises(ValueError, match=re.escape("widths (6, 6); those that they are added to")):
        Moments.of(x, y) + Moments.of(x)


def test_a_pass_of_another_thread() -> None:
    """Between the projections and the operator; its inputs are not those of the batch."""
    model = hk.integrations.transformers.use(build("bert"))
    arguments = batch(model)
    others = {name: each.flip(0, 1) for name, each in arguments.items()}
    own = threading.get_ident()

    def run(*_: Any) -> None:
        if threading.get_ident() == own:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(model, **others).result()

    expected = calibrate(model, [arguments], progress=False)
    with hk.analysis.observe(model, run):
        found = calibrate(model, [arguments], progress=False)
    for name, moments in expected.items():
        assert_alike(found[name].query_outer, moments.query_outer)
