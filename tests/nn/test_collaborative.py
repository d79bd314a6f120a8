"""`hk.nn.CollaborativeMultiheadAttention` against eq. 7 of its paper in float64, and against ordinary attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import (
    PADDED,
    B,
    E,
    H,
    S,
    T,
    assert_as_accurate_as,
    spread,
    torch_attention,
)

Ds = 10
FORMS: dict[str, dict[str, Any]] = {
    "content": {},
    "biases": {"qk_bias": True, "content_bias": False},
    "both": {"qk_bias": True},
    "none": {"bias": False, "content_bias": False},
}


def layer_of(**options: Any) -> hk.nn.CollaborativeMultiheadAttention:
    sizes = {"embed_dim": E, "num_heads": H, "shared_dim": Ds, "dtype": torch.float64}
    return spread(hk.nn.CollaborativeMultiheadAttention(**{**sizes, **options}))


def formula(
    layer: hk.nn.CollaborativeMultiheadAttention,
    x: Tensor,
    y: Tensor,
    visible: Tensor | None = None,
    gates: Tensor | None = None,
) -> Tensor:
    """Eq. 7 by the weights, head by head; `visible` `[B, H, T, S]`, `gates` `[H]`."""
    output = layer.out_proj(torch.zeros(*x.shape[:2], layer.out_proj.in_features, dtype=x.dtype))
    query, key = layer.q_proj(x), layer.k_proj(y)
    for h in range(layer.num_heads):
        scores = query @ torch.diag(layer.mixing[h]) @ key.mT
        if layer.content_proj is not None:
            scores = scores + (y @ layer.content_proj.weight[h])[:, None, :]
        scores = layer.scale * scores
        if visible is not None:
            scores = scores.masked_fill(~visible[:, h], -1e30)
        features = slice(h * layer.value_dim, (h + 1) * layer.value_dim)
        head = scores.softmax(-1) @ layer.v_proj(y)[..., features]
        if visible is not None:
            head = head * visible[:, h].any(-1, keepdim=True)
        if gates is not None:
            head = head * gates[h]
        output = output + head @ layer.out_proj.weight[:, features].mT
    return output


# ---------------------------------------------------------------------- the formula
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_three_uses(options: dict[str, Any]) -> None:
    """Encoder, decoder and encoder-decoder attention, padded; all gradients."""
    layer = layer_of(kdim=E, vdim=E, **options)
    x, y = torch.randn(B, S, E).double(), torch.randn(B, T, E).double()
    real = ~PADDED[:, None, :, None] & ~PADDED[:, None, None, :]  # [B, 1, S, S]
    ones = torch.ones(B, H, S, S, dtype=torch.bool)
    assert_alike(layer(x, key_padding_mask=PADDED)[0], formula(layer, x, x, real & ones))
    assert_alike(
        layer(x, is_causal=True, key_padding_mask=PADDED)[0],
        formula(layer, x, x, real & ones.tril()),
    )
    hidden = PADDED[:, :T]
    out = layer(x, y, key_padding_mask=hidden)[0]
    expected = formula(layer, x, y, (~hidden[:, None, None]).expand(B, H, S, T))
    assert_alike(out, expected)
    weight = torch.randn_like(out)
    named = dict(layer.named_parameters())
    grads = torch.autograd.grad((out * weight).sum(), list(named.values()))
    wanted = torch.autograd.grad((expected * weight).sum(), list(named.values()))
    for name, grad, want in zip(named, grads, wanted, strict=True):
        assert_alike(grad, want, name=name)


@given(sizes=st.tuples(*(st.integers(1, 4) for _ in range(7))))
def test_any_shape_is_the_formula(sizes: tuple[int, ...]) -> None:
    b, t, s, heads, shared, Dv, width = sizes
    layer = layer_of(
        embed_dim=6, num_heads=heads, shared_dim=shared, value_dim=Dv, kdim=width, vdim=width,
        mixing_init="normal",
    )  # fmt: skip
    x, y = torch.randn(b, t, 6).double(), torch.randn(b, s, width).double()
    assert_alike(layer(x, y)[0], formula(layer, x, y))


def test_default_scale_is_that_of_the_heads_whatever_they_share() -> None:
    assert layer_of().scale == pytest.approx((E / H) ** -0.5)
    assert layer_of(shared_dim=20).scale == layer_of().scale
    layer, x = layer_of(scale=1.3), torch.randn(B, T, E).double()
    assert_alike(layer(x)[0], formula(layer, x, x))


def test_grouped_values_are_values_repeated() -> None:
    """Outputs and gradients, and a cache of as many values as there are."""
    grouped, repeated = layer_of(num_value_heads=2), layer_of()
    state = grouped.state_dict()
    for name in ("weight", "bias"):
        own = state[f"v_proj.{name}"].unflatten(0, (2, -1))
        state[f"v_proj.{name}"] = own.repeat_interleave(H // 2, 0).flatten(0, 1)
    repeated.load_state_dict(state)
    x = torch.randn(B, T, E).double()
    assert_alike(grouped(x, is_causal=True)[0], repeated(x, is_causal=True)[0])
    (found,), (expected,) = (
        torch.autograd.grad(each(x)[0].square().sum(), [each.v_proj.weight])
        for each in (grouped, repeated)
    )
    assert_alike(found, expected.unflatten(0, (2, H // 2, -1)).sum(1).flatten(0, 1))

    cache = hk.nn.KeyValueCache()
    with torch.no_grad():
        steps = [grouped(each, is_causal=True, cache=cache)[0] for each in x.split(1, dim=1)]
    assert_alike(torch.cat(steps, 1), grouped(x, is_causal=True)[0])
    assert f"[{B}, S, 2, {E // H}]" in repr(cache)


def test_gates_and_closed_heads() -> None:
    layer, x = layer_of(), torch.randn(B, T, E).double()
    gates = torch.tensor([0.0, 1.0, 0.5, 0.0])
    layer.head_gate = hk.nn.FixedGate(gates)
    out = layer(x)[0]
    assert_alike(out, formula(layer, x, x, gates=gates))

    removed = copy.deepcopy(layer)
    removed.head_gate = hk.nn.FixedGate(gates[1:3])
    removed.mixing = nn.Parameter(layer.mixing[1:3].detach())
    removed.v_proj.weight.data = layer.v_proj.weight.data[6:18]
    removed.v_proj.bias.data = layer.v_proj.bias.data[6:18]
    assert removed.content_proj is not None
    removed.content_proj.weight.data = removed.content_proj.weight.data[1:3]
    removed.out_proj.weight.data = layer.out_proj.weight.data[:, 6:18]
    removed.num_heads = removed.num_value_heads = 2
    assert_alike(removed(x)[0], out)

    layer.head_gate = None
    layer.output_gate, layer.gate_proj = "head", nn.Linear(E, H).double()
    gated = layer(x)[0]
    nn.init.zeros_(layer.gate_proj.weight)
    nn.init.constant_(layer.gate_proj.bias, 100.0)
    assert_alike(layer(x)[0], formula(layer, x, x))
    assert not torch.allclose(gated, layer(x)[0])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_zeros_of_mixing_train_unless_ragged(ragged: bool, gated: bool) -> None:
    """Whatever a head gate says of its own zeros."""
    layer = hk.nn.CollaborativeMultiheadAttention(E, H, Ds, ragged=ragged)
    if gated:
        layer.head_gate = hk.nn.HardConcrete(H)
    layer(torch.randn(B, T, E))[0].square().sum().backward()
    zeros = layer.mixing == 0
    assert layer.mixing.grad is not None
    assert layer.mixing.grad[~zeros].any()
    assert layer.mixing.grad[zeros].any() != ragged


def test_without_heads_it_is_the_bias() -> None:
    layer, x = layer_of(), torch.randn(B, T, E).double().requires_grad_()
    layer.num_heads = layer.num_value_heads = 0
    layer.mixing = nn.Parameter(torch.empty(0, Ds).double())
    layer.v_proj.weight.data = torch.empty(0, E).double()
    layer.v_proj.bias.data = torch.empty(0).double()
    assert layer.content_proj is not None
    layer.content_proj.weight.data = torch.empty(0, E).double()
    layer.out_proj.weight.data = torch.empty(E, 0).double()
    out = layer(x, is_causal=True)[0]
    assert_alike(out, layer.out_proj.bias.expand_as(out))
    out.sum().backward()
    assert x.grad is None or not x.grad.any()
    assert_alike(layer.out_proj.bias.grad, torch.full((E,), 10.0).double())


def test_padding_changes_no_real_row() -> None:
    layer, x = layer_of(), torch.randn(1, 4, E).double()
    padded = torch.cat([x, torch.full((1, 2, E), torch.nan).double()], 1)
    hidden = padded.isnan().any(2)
    out = layer(padded, is_causal=True, key_padding_mask=hidden)[0]
    assert_alike(out[:, :4], layer(x, is_causal=True)[0])


def test_statistics_are_those_of_the_probabilities() -> None:
    layer, x = layer_of(), torch.randn(B, T, E).double()
    rows = layer(x, is_causal=True, need_statistics=True)[1]
    scores = torch.einsum("btd,hd,bsd->bhts", layer.q_proj(x), layer.mixing, layer.k_proj(x))
    assert layer.content_proj is not None
    scores = layer.scale * (scores + layer.content_proj(x).transpose(1, 2)[:, :, None])
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    assert_alike(rows.lse, scores.masked_fill(hidden, -torch.inf).logsumexp(-1))


def test_dropout_in_training_only() -> None:
    layer, x = layer_of(dropout=0.5), torch.randn(B, T, E).double()
    assert_alike(layer(x)[0], formula(layer, x, x))
    layer.train()
    assert not torch.allclose(layer(x)[0], layer(x)[0])


# ---------------------------------------------------------------------- decoding with a cache
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@torch.no_grad()
def test_decoding_is_the_full_pass(options: dict[str, Any]) -> None:
    layer, x = layer_of(**options), torch.randn(B, S, E).double()
    full = layer(x, is_causal=True)[0]
    cache = hk.nn.KeyValueCache()
    steps = [layer(part, is_causal=True, cache=cache)[0] for part in x.split([2, 1, 1, 3], dim=1)]
    assert_alike(torch.cat(steps, 1), full)
    held = cache.append(*(part[:, :0] for part in layer.source(x, x)))
    assert held[0].shape == (B, S, Ds)  # one key for all heads
    assert len(held) == (2 if layer.content_proj is None else 3)

    memory = hk.nn.KeyValueCache()
    out = torch.cat([layer(part, x, cache=memory)[0] for part in x.split(1, dim=1)], 1)
    assert_alike(out, layer(x, x.clone())[0])
    memory.reorder(torch.tensor([1]))
    assert_alike(layer(x[:1], x[1:], cache=memory)[0], formula(layer, x[:1], x[1:]))


# ---------------------------------------------------------------------- ordinary attention is a special case
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("content", {}),
        ("biases", {}),
        ("both", {}),
        ("content", {"bias": False}),
        ("none", {"bias": False}),
        ("content", {"kdim": 10, "vdim": 12}),
        ("biases", {"kdim": 10, "vdim": 12}),
    ],
)
def test_state_dict_of_torch_loads_exactly(form: str, options: dict[str, Any]) -> None:
    theirs = torch_attention(**options)
    layer = hk.nn.CollaborativeMultiheadAttention(
        E, H, E, **(FORMS[form] | options), mixing_init="normal"
    )
    query, key, value = (
        torch.randn(B, T, E),
        torch.randn(B, S, theirs.kdim),
        torch.randn(B, S, theirs.vdim),
    )
    expected = theirs(query, key, value, key_padding_mask=PADDED, need_weights=False)[0]
    gated = hk.nn.GatedMultiheadAttention.from_torch(theirs)
    for state in (theirs.state_dict(), gated.state_dict()):
        layer.reset_parameters()
        layer.load_state_dict(state)
        out = layer(query, key, value, key_padding_mask=PADDED)[0]
        assert_alike(out, expected)
    assert layer.mixing.equal(torch.block_diag(*torch.ones(H, 1, E // H)))


def test_wide_heads_load_with_their_scale() -> None:
    gated = hk.nn.GatedMultiheadAttention(
        E, H, head_dim=5, value_dim=3, output_gate="head"
    ).double()
    nn.init.normal_(gated.q_proj.bias)
    layer = layer_of(shared_dim=20, value_dim=3, scale=gated.scale, output_gate="head")
    layer.load_state_dict(gated.state_dict())
    x = torch.randn(B, T, E).double()
    assert_alike(layer(x)[0], gated(x)[0])


def test_state_dict_round_trip() -> None:
    """With its own names nothing is taken for ordinary attention."""
    for options in FORMS.values():
        layer, again = layer_of(**options, shared_dim=E), layer_of(**options, shared_dim=E)
        again.load_state_dict(layer.state_dict())
        x = torch.randn(B, T, E).double()
        assert_alike(again(x)[0], layer(x)[0])


def test_state_dict_that_does_not_fit() -> None:
    state = nn.ModuleDict({"a": torch_attention()}).state_dict()
    for shared_dim, options, match in (
        (12, {}, r"a\.q_proj\.weight has 24 rows, but shared_dim is 12 .*shared_dim=24 fits"),
        (24, {"content_bias": False}, r"a\.q_proj\.bias is in the state dict.*content_bias=True"),
    ):
        layer = hk.nn.CollaborativeMultiheadAttention(E, H, shared_dim, **options)
        with pytest.raises(ValueError, match=match):
            nn.ModuleDict({"a": layer}).load_state_dict(state)
    grouped = hk.nn.GatedMultiheadAttention(E, H, num_key_heads=2).state_dict()
    with pytest.raises(ValueError, match=r"k_proj\.weight has 12 rows.*repeat grouped keys"):
        layer_of(shared_dim=E).load_state_dict(grouped)
    with pytest.raises(RuntimeError, match=r"size mismatch for v_proj\.weight"):
        layer_of(shared_dim=E, value_dim=2).load_state_dict(torch_attention().state_dict())


# ---------------------------------------------------------------------- parameters
def query_key_parameters(layer: nn.Module) -> int:
    """Weights that make the scores."""
    names = ("q_proj", "k_proj", "mixing", "content_proj")
    return sum(p.numel() for name, p in layer.named_parameters() if name.startswith(names))


@pytest.mark.parametrize(
    ("shared_dim", "millions"),
    [(768, 108.5), (512, 103.75), (384, 101.37), (256, 98.99), (128, 96.61)],
)
def test_parameters_of_bert(shared_dim: int, millions: float) -> None:
    """`(2 D_in + H) Ds + H D_in` in each of the 12 layers of BERT-base, 108.3 million parameters as it is."""
    ordinary = hk.nn.GatedMultiheadAttention(768, 12, device="meta")
    assert query_key_parameters(ordinary) == 2 * 768 * 768 + 2 * 768
    layer = hk.nn.CollaborativeMultiheadAttention(768, 12, shared_dim, device="meta")
    count = query_key_parameters(layer)
    assert count == (2 * 768 + 12) * shared_dim + 12 * 768
    saved = 12 * (query_key_parameters(ordinary) - count)
    assert 108.3 - saved / 1e6 == pytest.approx(millions, abs=0.006)


@pytest.mark.parametrize(
    ("width", "concatenated", "collaborative"),
    [(512, 60.9, 60.97), (256, 56.17, 56.21), (128, 53.81, 53.83), (64, 52.63, 52.64)],
)
def test_parameters_of_translation(width: int, concatenated: float, collaborative: float) -> None:
    """The 18 attention layers of the base model, 60.9 million parameters; shared biases, no content bias."""
    base = hk.nn.GatedMultiheadAttention(512, 8, device="meta")
    narrow = hk.nn.GatedMultiheadAttention(512, 8, head_dim=width // 8, value_dim=64, device="meta")
    shared = hk.nn.CollaborativeMultiheadAttention(
        512, 8, width, qk_bias=True, content_bias=False, device="meta"
    )
    assert query_key_parameters(shared) == (2 * 512 + 8) * width + 2 * width
    for layer, millions in ((narrow, concatenated), (shared, collaborative)):
        saved = 18 * (query_key_parameters(base) - query_key_parameters(layer))
        assert 60.9 - saved / 1e6 == pytest.approx(millions, abs=0.01)


# ---------------------------------------------------------------------- inside PyTorch
def test_inside_a_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    nn.init.normal_(layer.self_attn.in_proj_weight, std=0.4)
    theirs = nn.TransformerEncoder(layer, 2).eval()
    layer.self_attn = hk.nn.CollaborativeMultiheadAttention(E, H, E)
    ours = nn.TransformerEncoder(layer, 2).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, S, E)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            out = ours(x, src_key_padding_mask=PADDED)
            expected = theirs(x, src_key_padding_mask=PADDED)
        assert_alike(out[~PADDED], expected[~PADDED], dtype=torch.float32)


def test_compile() -> None:
    layer, x = layer_of(dtype=torch.float32, qk_bias=True), torch.randn(B, S, E)
    layer.head_gate = hk.nn.FixedGate(torch.tensor([1.0, 0.0, 0.5, 1.0]))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    options = {"key_padding_mask": PADDED, "is_causal": True}
    out, expected = compiled(x, **options)[0], layer(x, **options)[0]
    assert_alike(out, expected)
    grads = [torch.autograd.grad(o.square().sum(), layer.mixing)[0] for o in (out, expected)]
    assert_alike(*grads)


def test_export() -> None:
    layer, x = layer_of(dtype=torch.float32), torch.randn(B, S, E)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), {"is_causal": True})
        out = program.module()(x, is_causal=True)[0]
        assert_alike(out, layer(x, is_causal=True)[0])


def test_autocast() -> None:
    layer, x = layer_of(dtype=torch.float32), torch.randn(B, S, E)
    with torch.autocast("cpu", torch.bfloat16):
        out, plain = layer(x)[0], formula(layer, x, x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.mixing.grad is not None
    assert layer.mixing.grad.dtype == torch.float32
    assert_as_accurate_as(out, plain, formula(layer.double(), x.double(), x.double()))


def test_gradcheck() -> None:
    layer = layer_of(embed_dim=4, num_heads=2, shared_dim=3, qk_bias=True)
    x, y = (torch.randn(1, n, 4).double().requires_grad_() for n in (2, 3))

    def run(x: Tensor, y: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        out: Tensor = torch.func.functional_call(layer, named, (x, y))[0]
        return out

    assert torch.autograd.gradcheck(run, (x, y, *layer.parameters()), fast_mode=True)


# ---------------------------------------------------------------------- bad input
BAD_LAYERS = [
    ({"embed_dim": 0}, ValueError, "embed_dim is 0"),
    ({"num_heads": 2.0}, TypeError, "num_heads is a float"),
    ({"num_heads": 5}, ValueError, "embed_dim is 24, but num_heads is 5; .* value_dim"),
    ({"shared_dim": 0}, ValueError, "shared_dim is 0"),
    ({"shared_dim": 3}, ValueError, "kind is 'concatenate', but 4 heads share 3 features"),
    ({"mixing_init": "uniform"}, ValueError, "kind is 'uniform'; use one of 'concatenate'"),
    (
        {"num_value_heads": 3},
        ValueError,
        "num_value_heads is 3, but num_heads is 4; .*divisor of 4",
    ),
    ({"num_value_heads": 0}, ValueError, "num_value_heads is 0"),
    ({"qk_bias": None}, TypeError, "qk_bias is a NoneType"),
    ({"content_bias": 1}, TypeError, "content_bias is a int"),
    ({"ragged": "yes"}, TypeError, "ragged is a str"),
    ({"scale": float("inf")}, ValueError, "scale is inf"),
    ({"batch_first": 0}, TypeError, "batch_first is a int"),
]


@pytest.mark.parametrize(("options", "error", "match"), BAD_LAYERS)
def test_bad_layers(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        hk.nn.CollaborativeMultiheadAttention(
            **{"embed_dim": E, "num_heads": H, "shared_dim": Ds, **options}
        )


def test_bad_calls() -> None:
    layer = hk.nn.CollaborativeMultiheadAttention(E, H, Ds)
    with pytest.raises(ValueError, match=r"key has shape \[2, 7, 10\]; pass \[B, S, 24\]"):
        layer(torch.zeros(B, T, E), torch.zeros(B, S, Ds))
    with pytest.raises(ValueError, match="need_weights is True"):
        layer(torch.zeros(B, T, E), need_weights=True)
