"""Heads with rotary positions: shared pairs of features against dense algebra, and models that have them."""

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.convert.budget import allot
from heads_kernels.convert.collaborate import read_heads
from heads_kernels.convert.features import METHODS
from heads_kernels.convert.rotary import RotaryFactors, RotaryHeads, RotaryMoments
from heads_kernels.heads import projected_layers
from tests.convert.converted_models import convert, in_use
from tests.support.alike import assert_alike
from tests.support.nn_layers import random
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, outputs

H, F, D_in = 6, 4, 20
ALL = 2 * H * F


def random_heads() -> RotaryHeads:
    """Heads that have something in common, each with a share of its own."""
    sides = []
    for _ in range(2):
        common = torch.einsum("hfr,rfe->hfe", random(H, F, 3), random(3, F, 2 * D_in + 2))
        sides.append(torch.complex(*(common + 0.3 * random(H, F, 2 * D_in + 2)).chunk(2, 2)))
    return RotaryHeads(sides[0], sides[1], 0.5)


def products(heads: RotaryHeads) -> Tensor:
    """What the scores are made of, complex `[H, F, D_in + 1, D_in + 1]`."""
    return torch.einsum("hfq,hfk->hfqk", heads.query, heads.key.conj())


def products_after(factors: RotaryFactors) -> Tensor:
    query, key = (torch.complex(rows[0::2], rows[1::2]) for rows in (factors.query, factors.key))
    found = torch.zeros(H, F, D_in + 1, D_in + 1, dtype=query.dtype)
    for pair, f in enumerate(factors.frequency.tolist()):
        product = torch.outer(query[pair], key[pair].conj())
        found[:, f] += factors.mixing[:, pair, None, None] * product
    return found


def turned(heads: RotaryHeads, x: Tensor, y: Tensor, angles: Tensor) -> list[Tensor]:
    """Queries and keys `[H, F, T]` of inputs `[T, D_in + 1]` at positions 0 to T - 1."""
    return [
        torch.einsum("hfe,te->hft", side, inputs.to(side.dtype))
        * torch.exp(1j * angles[:, None] * torch.arange(len(inputs)))
        for side, inputs in ((heads.query, x), (heads.key, y))
    ]


def scores(heads: RotaryHeads, x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    """`[H, F, T, S]`, of mean 0 over keys."""
    query, key = turned(heads, x, y, angles)
    return torch.einsum("hft,hfs->hfts", query, (key - key.mean(2, keepdim=True)).conj())


# ---------------------------------------------------------------------- the factors
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dim", [2, 14, 30, ALL, ALL + 10])
def test_the_error_is_that_of_the_products(method: str, dim: int) -> None:
    """All features are exact, and no more are made."""
    heads = random_heads()
    factors = heads.fit(dim, method=method)
    before, after = products(heads), products_after(factors)
    assert factors.dim == min(dim, ALL)
    assert factors.error == pytest.approx(float((before - after).norm() / before.norm()))
    if dim >= ALL:
        assert_alike(*map(torch.view_as_real, (after, before)))
    assert factors.error <= heads.fit(dim, method="ragged").error


@pytest.mark.parametrize("method", METHODS)
def test_the_calibrated_error_is_that_of_the_scores(method: str) -> None:
    """Of rotated queries and keys of random inputs, each frequency by itself, for phases that are spread evenly."""
    heads, angles = random_heads(), torch.tensor([1.0, 0.3, 0.1, 0.02]).double()
    x, y = (torch.cat((random(40, D_in) @ random(D_in, D_in), torch.ones(40, 1)), 1) for _ in "xy")
    operands = [torch.cat((each.real, each.imag), 1).transpose(1, 2)[None] for each in turned(heads, x, y, angles)]
    real = torch.ones(1, 40, dtype=torch.bool)
    moments = RotaryMoments.of(*operands, query_mask=real, key_mask=real)
    factors = heads.fit(20, moments, method=method)
    shared = [torch.complex(rows[0::2], rows[1::2]) for rows in (factors.query, factors.key)]
    after = torch.zeros(H, F, 40, 40, dtype=torch.complex128)
    for pair, f in enumerate(factors.frequency.tolist()):
        own = RotaryHeads(shared[0][None, pair, None], shared[1][None, pair, None], 1.0)
        found = scores(own, x, y, angles[f : f + 1])[0, 0]
        after[:, f] += factors.mixing[:, pair, None, None] * found
    before = scores(heads, x, y, angles)
    assert factors.error == pytest.approx(float((before - after).norm() / before.norm()))


def test_planted_pairs_are_found() -> None:
    """Heads that share 3 pairs at each frequency, each turned and scaled in its own way."""
    turns = torch.exp(1j * random(H, F))[..., None]
    which = torch.arange(H) % 3
    query, key = (torch.complex(random(3, F, D_in), random(3, F, D_in)) for _ in "qk")
    heads = RotaryHeads(query[which] * turns * random(H, F, 1), key[which] * turns, 1.0)
    assert heads.fit(6 * F).error < 1e-6
    assert heads.fit(6 * F).frequency.bincount().tolist() == [3] * F
    assert heads.fit(6 * F, method="ragged").error > 0.1


def test_keys_in_a_real_span_share_pairs() -> None:
    """One query for all heads, and keys that mix two keys with real weights: two pairs of a frequency hold them."""
    query, key = (torch.complex(random(n, F, D_in), random(n, F, D_in)) for n in (1, 2))
    keys = torch.einsum("hfr,rfe->hfe", random(H, F, 2).to(key.dtype), key)
    assert RotaryHeads(query.expand(H, F, D_in), keys, 1.0).fit(4 * F).error < 1e-6


def test_moments_of_two_batches_add_up() -> None:
    query, key = random(3, H, 5, 2 * F), random(3, 2, 5, 2 * F)
    real = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 0, 1, 0, 0]]).bool()
    whole, *parts = (
        RotaryMoments.of(query[rows], key[rows], query_mask=real[rows], key_mask=real[rows], is_causal=True)
        for rows in (slice(0, 3), slice(0, 1), slice(1, 3))
    )
    summed = parts[0] + parts[1]
    assert_alike(*map(torch.view_as_real, (summed.key_outer, whole.key_outer)))
    assert_alike(*map(torch.view_as_real, (summed.query_outer, whole.query_outer)))
    pair = torch.complex(key[..., :F], key[..., F:])[:, [0] * 3 + [1] * 3]  # by query head
    expected = torch.zeros(F, H, H, dtype=pair.dtype)
    for b, t in real.nonzero().tolist():
        seen = pair[b, :, : t + 1][:, real[b, : t + 1]]  # [H, S, F]
        centred = seen - seen.mean(1, keepdim=True)
        expected += torch.einsum("hsf,gsf->fhg", centred, centred.conj()) / seen.shape[1]
    assert_alike(*map(torch.view_as_real, (whole.key_outer, expected)))


def test_bad_arguments_are_refused() -> None:
    heads, good = random_heads(), random(2, 4, 3)
    assert_refused(
        (lambda: heads.fit(5), "^dim is 5; pass an even number"),
        (lambda: RotaryHeads.of(good, good / 0, 1.0), "^key holds NaN or infinity"),
        (lambda: RotaryHeads.of(good, good, 1.0, None, random(2, 3)), "^key_bias has shape"),
    )


# ---------------------------------------------------------------------- models
@pytest.mark.parametrize("name", ["llama", "modernbert"])
def test_the_scores_depend_on_distances_alone(name: str) -> None:
    """With half of the features too: positions that are all shifted change nothing."""
    model = convert(in_use(name).double(), 16, "cp")
    tokens = batch(model)["input_ids"][:1]
    positions = torch.arange(tokens.shape[1])[None]
    found, shifted = (model(tokens, position_ids=positions + by)[0] for by in (0, 7))
    assert_alike(shifted.float(), found.float())


def test_one_slot_of_features_is_told_from_a_cache() -> None:
    """As many features as a head has, one at each place: the cache would look like the projection."""
    heads = random_heads()
    frequency = torch.arange(F)
    rows = random(2 * F, D_in + 1)
    factors = RotaryFactors(rows, rows, random(H, F), heads.scale, 0.0, frequency)
    places, slots = factors.places(F)
    assert slots == 2
    assert places.tolist() == [0, F, 1, F + 1, 2, F + 2, 3, F + 3]


def test_a_budget_counts_the_parameters_of_rotary_heads() -> None:
    """Mixing has one weight for a pair of features, there are no content weights; biases count, 0 or not."""
    weights, bias = random(2, 2 * F, D_in), torch.zeros(2, 2 * F)
    for biases in ((bias, None), (None, bias)):
        assert RotaryHeads.of(weights, weights, 1.0, *biases).sizes.bias
    heads = random_heads()
    for dim in (2, 9):
        params = heads.sizes.parameters(dim)
        assert allot([heads.sizes], [heads.spectrum()], params, None) == [dim // 2 * 2]


@pytest.mark.parametrize(("name", "method"), [("llama", "cp"), ("modernbert", "ragged")])
def test_collaborate(name: str, method: str) -> None:
    """The whole command: features are allotted in pairs, and reports count what there is."""
    model = in_use(name)
    options = {"method": method, "progress": False, "length": 4}
    found = hk.convert.collaborate(model, 16, calibration=[batch(model)], **options)
    assert sum(found.dims) <= 32
    assert all(dim % 2 == 0 for dim in found.dims)
    for layer, report in zip(projected_layers(model), found.reports, strict=True):
        mixing = layer.module.mixing  # both features of a pair have one weight in a head
        assert mixing.shape[1] == report.dim // 2
        parts = [mixing, *layer.query.linear.parameters(), *layer.key.linear.parameters()]
        assert report.parameters == sum(part.numel() for part in parts)
    outputs(model).square().sum().backward()
    assert all(layer.module.mixing.grad.any() for layer in projected_layers(model))
    small = hk.convert.collaborate(in_use(name), error=0.3, **options | {"method": "ragged"})
    assert 0.2 < small.error <= 0.3
    errors = hk.convert.curves(in_use(name), progress=False).errors[0]
    heads_of = read_heads(projected_layers(in_use(name))[0])
    for dim in (2, 8, 20):
        assert float(errors[dim]) == pytest.approx(heads_of.fit(dim, method="ragged").error)
