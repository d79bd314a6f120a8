"""What attention modules add to their scores (`bias`, float `attn_mask`), and inputs of several batch dimensions."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import B, E, H, S, T, calls_of, formula, gradients, layer_of, random, shared_layer_of
from tests.support.refusals import assert_refused

N = 3  # rows of an alignment


# ---------------------------------------------------------------------- the bias of a call
@pytest.mark.parametrize("shape", [(B, H, T, S), (1, H, T, S), (B, 1, 1, S), (H, T, 1), (T, S), (S,), ()])
def test_bias_is_added_to_the_scores(shape: tuple[int, ...]) -> None:
    """test_attention.py has it beside masks and gates of heads."""
    layer = layer_of(num_key_heads=2, output_gate="element")
    x, y, bias = random(B, T, E), random(B, S, E), random(*shape).requires_grad_()
    out, expected = layer(x, y, bias=bias)[0], formula(layer, x, y, bias=bias)
    assert_alike(out, expected)
    leaves = bias, *layer.parameters()
    assert_alike(gradients(out, *leaves), gradients(expected, *leaves))


def test_offset_bias_is_its_dense_form() -> None:
    x, table = random(B, S, E), random(H, 5).requires_grad_()
    for layer in (layer_of(), shared_layer_of()):
        out = layer(x, bias=hk.OffsetBias(table))[0]
        expected = layer(x, bias=hk.OffsetBias(table).to_dense(S, S))[0]
        assert_alike(out, expected)
        assert_alike(gradients(out, table), gradients(expected, table))


# ---------------------------------------------------------------------- masks of torch
@pytest.mark.parametrize("shape", [(S, S), (B * H, S, S)])
def test_masks_are_those_of_torch(shape: tuple[int, ...]) -> None:
    """Float ones are added, bool ones hide."""
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    for bias in (theirs.in_proj_bias, theirs.out_proj.bias):
        nn.init.normal_(bias)
    ours = hk.nn.GatedMultiheadAttention.from_torch(theirs)
    x, added = random(B, S, E), random(*shape).requires_grad_()
    added.data[..., 0, 1:] = -torch.inf
    out, expected = ours(x, attn_mask=added)[0], theirs(x, x, x, attn_mask=added)[0]
    assert_alike(out, expected)
    assert_alike(gradients(out, added)[0].nan_to_num(), gradients(expected, added)[0])
    hidden = torch.arange(added.numel()).view(shape) % 5 == 1
    assert_alike(ours(x, attn_mask=hidden)[0], theirs(x, x, x, attn_mask=hidden)[0])


def test_a_float_mask_of_zeros_that_learns_has_a_gradient() -> None:
    layer, x, added = layer_of(), random(B, S, E), torch.zeros(S, S).requires_grad_()
    layer(x, attn_mask=added)[0].square().sum().backward()
    assert added.grad.ne(0).any()
    words = r"attn_mask requires a gradient.*is_causal; pass it as bias"
    assert_refused((lambda: layer(x, attn_mask=added, is_causal=True), words))


# ---------------------------------------------------------------------- several batch dimensions
@pytest.mark.parametrize(
    ("shape", "make"),
    [
        ((B, 1, H, S, S), layer_of),
        ((1, N, 1, S, S), shared_layer_of),
        ((B, N, H, 1, S), shared_layer_of),
        ((H, S, S), layer_of),
    ],
)
def test_batch_dimensions(shape: tuple[int, ...], make: Any) -> None:
    """Those of the inputs and the bias, as if each element were a call of its own."""
    layer = make(output_gate="element")
    x, bias = random(B, N, S, E).requires_grad_(), random(*shape).requires_grad_()
    hidden = torch.rand(B, N, S) > 0.8
    out = layer(x, key_padding_mask=hidden, bias=bias)[0]
    rows_of = x.flatten(0, 1), hidden.flatten(0, 1), bias.expand(B, N, H, S, S).flatten(0, 1)
    one = [
        layer(own[None], key_padding_mask=padded[None], bias=added)[0]
        for own, padded, added in zip(*rows_of, strict=True)
    ]
    expected = torch.cat(one).view(out.shape)
    assert_alike(out, expected)
    assert_alike(gradients(out, x, bias), gradients(expected, x, bias))


def test_a_bias_that_rows_share_is_not_expanded() -> None:
    """The operator, and whoever observes it, gets it as it is."""
    x, bias = random(B, N, S, E), random(B, 1, H, S, S)
    [(_, call)] = calls_of(layer_of(), x, bias=bias)
    assert call.query.shape == (B * N, H, S, E // H)
    assert call.bias.shape == (B, 1, H, S, S)
    assert call.bias.data_ptr() == bias.data_ptr()
    p = call.probabilities(slice(0, S))
    assert_alike(call.statistics().max_prob, p.amax(-1))


# ---------------------------------------------------------------------- caches
@pytest.mark.parametrize("batch", [(B,), (B, N)])
@torch.no_grad()
def test_decoding_with_a_bias_is_the_full_pass(batch: tuple[int, ...]) -> None:
    layer, x = layer_of(num_key_heads=2), random(*batch, S, E)
    dense = random(*batch[:1], *(1,) * (len(batch) - 1), H, S, S)
    for bias in (dense, hk.OffsetBias(random(H, 9), first=-6), hk.OffsetBias.alibi(torch.rand(H))):
        full = layer(x, is_causal=True, bias=bias)[0]
        cache, steps, start = hk.nn.KeyValueCache(), [], 0
        for part in x.split([2, 1, 1, 3], dim=-2):
            stop = start + part.shape[-2]
            own = bias if isinstance(bias, hk.OffsetBias) else bias[..., start:stop, :stop]
            steps += [layer(part, is_causal=True, bias=own, cache=cache)[0]]
            start = stop
        assert_alike(torch.cat(steps, -2), full)


@torch.no_grad()
def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    layer, x, cache = layer_of(), random(B, 2, E), hk.nn.KeyValueCache()
    layer(x, cache=cache)
    assert_refused(
        ({"bias": random(H, 2, 2)}, r"bias has shape \[4, 2, 2\], but scores are \[2, 4, 2, 4\]"),
        ({"bias": hk.OffsetBias(random(H, 3)).starting_at(2)}, "bias starts at row 2.*cache.*at 2"),
        ({"attn_mask": random(2, 2)}, r"attn_mask has shape \[2, 2\]"),
        of=partial(layer, x, cache=cache),
    )
    assert cache.length == 2


# ---------------------------------------------------------------------- heads
def test_a_bias_is_of_the_heads_that_are_left() -> None:
    model, x, bias = nn.Sequential(layer_of()), random(B, S, E), random(H, S, S)
    layer = model[0]
    layer.head_gate = hk.nn.FixedGate(torch.tensor([1.0, 0.0, 1.0, 1.0]))
    expected = layer(x, bias=bias)[0]
    hk.heads.prune(model, hk.heads.closed(model))
    assert_alike(layer(x, bias=bias[[0, 2, 3]])[0], expected)
    words = r"bias has 4 heads; pass 3.*original heads \[0, 2, 3\]"
    assert_refused(({"bias": bias}, words), ({"bias": hk.OffsetBias(random(H, 3))}, words), of=partial(layer, x))
    hk.heads.prune(model, {0: [0, 1, 2]})
    alone = layer(x, bias=random(1, S, S).requires_grad_())[0]
    assert_alike(alone, layer.out_proj.bias.expand_as(alone))


class Paired(nn.Module):
    """Two layers whose scores have a bias of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer_of(bias=False) for _ in range(2))
        self.bias = nn.Parameter(random(1, H, S, S))
        self.pairs = nn.Parameter(random(E, H))

    def forward(self, x: Tensor, depends: bool = False) -> Tensor:
        bias = self.bias
        for layer in self.layers:
            x = x + layer(x, bias=bias)[0]
            if depends:
                bias = self.bias + torch.nn.functional.linear(x, self.pairs.mT).mT[..., None]
        return x[..., 0, :]


@pytest.mark.filterwarnings("ignore:At T = 128")  # all features: more FLOPs than before
@pytest.mark.parametrize("batch", [(B,), (B, N)])
def test_a_converted_layer_takes_the_bias_on(batch: tuple[int, ...]) -> None:
    model, x = Paired(), random(*batch, S, E)
    expected = model(x)
    hk.convert.collaborate(model, E, calibration=[x])
    assert all(isinstance(each, hk.nn.CollaborativeMultiheadAttention) for each in model.layers)
    assert_alike(model(x), expected, dtype=torch.float32)


def test_readers_of_heads_read_the_biased_scores() -> None:
    """A bias that lets a row see one key alone makes a head that is sure of it, in several batch dimensions too."""
    model, x = Paired(), random(B, N, S, E)
    model.bias.data[0, 1] = torch.full((S, S), -torch.inf).fill_diagonal_(0.0).roll(1, 1)
    confidence = hk.analysis.statistics(model, [x]).confidence.table()
    assert_alike(confidence[:, 1], torch.ones(2, dtype=confidence.dtype))
    assert confidence[:, 0].max() < 1


def test_relevance_takes_a_bias_as_constant() -> None:
    model, x = Paired(), random(B, S, E)
    for attention in ("constant", "full"):
        found = hk.analysis.relevance(model, [x], attention=attention).table()
        assert_alike(found.sum(1), torch.ones(2, dtype=found.dtype))

    def depending(model: Any, x: Tensor) -> Tensor:
        return model(x, depends=True)

    hk.analysis.relevance(model, [x], depending)
    refused = partial(hk.analysis.relevance, model, [x], depending, attention="full")
    assert_refused((refused, "attention, whose bias depends on heads"), unchanged=[model])


def test_bad_calls() -> None:
    x, both = torch.zeros(B, N, S, E), torch.ones(S, S)
    assert_refused(
        ({"bias": 1.0}, TypeError, "bias is a float; pass a tensor of float32"),
        ({"bias": both.bool()}, TypeError, "bias has dtype torch.bool"),
        ({"bias": torch.zeros(H - 1, S, S)}, "bias has 3 heads; pass 4"),
        ({"bias": torch.zeros(N, H, S, T)}, r"bias has shape .* scores are \[2, 3, 4, 7, 7\]"),
        ({"bias": hk.OffsetBias(torch.zeros(2, 3))}, "bias has 2 heads; pass 4"),
        ({"bias": both, "attn_mask": both}, "attn_mask is a float tensor, and bias .*pass their sum"),
        ({"attn_mask": torch.ones(T, S)}, r"attn_mask has shape \[5, 7\]"),
        ({"key_padding_mask": both[:B].bool()}, r"key_padding_mask has shape \[2, 7\]; pass .*\[..., S\]"),
        ({"key": x[:, :1]}, r"key has batch \[2, 1\], but query has batch \[2, 3\]"),
        of=partial(hk.nn.GatedMultiheadAttention(E, H), x),
    )
