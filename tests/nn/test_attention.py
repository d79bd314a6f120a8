"""Attention modules against their formulas in float64, with caches, entmax, averages; made of torch's own modules."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import heads_kernels as hk
from tests.support import nn_layers
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, B, E, Gates, H, S, T, formula, gradients, layer_of, shared_layer_of, spread
from tests.support.refusals import assert_refused


# ---------------------------------------------------------------------- torch.nn.MultiheadAttention
def test_from_torch_keeps_what_the_module_was() -> None:
    theirs = nn.MultiheadAttention(E, H, dropout=0.1, batch_first=True, dtype=torch.float64)
    theirs.in_proj_weight.requires_grad_(False)
    with torch.no_grad():
        ours = hk.nn.GatedMultiheadAttention.from_torch(theirs)
    assert ours.training
    assert ours.dropout == 0.1
    assert ours.q_proj.weight.dtype == torch.float64
    assert type(hk.nn.MergedAttention.from_torch(theirs)) is hk.nn.MergedAttention
    asked = {name for name, each in ours.named_parameters() if not each.requires_grad}
    assert asked == {"q_proj.weight", "k_proj.weight", "v_proj.weight"}
    ours.out_proj.weight.data.zero_()
    assert theirs.out_proj.weight.any()
    assert not hk.nn.GatedMultiheadAttention.from_torch(nn.MultiheadAttention(E, H)).batch_first
    ours.load_state_dict(theirs.state_dict(), assign=True)
    storages = {parameter.untyped_storage().data_ptr() for parameter in ours.parameters()}
    assert len(storages) == 8  # the parts of a packed projection are apart


def test_the_hint_is_taken_and_the_tensor_is_not_read() -> None:
    layer, x = layer_of(dtype=torch.float32), torch.randn(B, S, E)
    nonsense = torch.full((3, 1), torch.nan)
    out = layer(x, attn_mask=nonsense, is_causal=True)[0]
    assert_alike(out, layer(x, mask=hk.Mask(causal=True))[0])


# ---------------------------------------------------------------------- the formulas
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ordinary": (layer_of, {}),
    "entmax": (layer_of, {"entmax": True}),
    "gate of heads": (layer_of, {"output_gate": "head"}),
    "gate of elements": (shared_layer_of, {"output_gate": "element"}),
    "content bias": (shared_layer_of, {}),
    "shared biases": (shared_layer_of, {"qk_bias": True, "content_bias": False}),
    "both": (shared_layer_of, {"qk_bias": True}),
    "no bias": (shared_layer_of, {"bias": False, "content_bias": False}),
}


@given(
    form=st.sampled_from(list(FORMS)),
    sizes=st.tuples(*(st.integers(1, 4) for _ in range(8))),
    causal=st.booleans(),
    alone=st.booleans(),
    gated=st.booleans(),
)
def test_any_shape_is_the_formula(form: str, sizes: tuple[int, ...], causal: bool, alone: bool, gated: bool) -> None:
    """Outputs and all gradients, with padded keys, of self-attention and of cross-attention of other widths.

    Without a bias of the scores and gates of heads, and with both: a bias that hides pairs, and a closed head.
    """
    b, t, s, key_heads, group, D, Dv, width = sizes
    make, options = FORMS[form]
    options = options | {"embed_dim": 6, "num_heads": key_heads * group, "value_dim": Dv}
    options |= {"scale": 1.3} | ({} if alone else {"kdim": width, "vdim": width})
    if make is layer_of:
        options |= {"num_key_heads": key_heads, "head_dim": D}
    else:
        options |= {"num_value_heads": key_heads, "shared_dim": D, "mixing_init": "normal"}
    layer = make(**options)
    x, y = torch.randn(b, t, 6).double(), torch.randn(b, s, width).double()
    y = x if alone else y
    hidden = torch.rand(b, y.shape[1]) > 0.7
    visible = ~hidden[:, None, None] & torch.ones(b, 1, t, y.shape[1], dtype=torch.bool)
    visible = visible & ~hidden[:, None, :, None] if alone else visible
    gates = bias = None
    if gated:
        layer.head_gate = Gates([0.0, *torch.randn(layer.num_heads - 1).tolist()]).double()
        gates, bias = layer.head_gate.gates[:, None, None], nn_layers.random(layer.num_heads, t, y.shape[1])
        bias[torch.rand(bias.shape) < 0.2] = -torch.inf
        visible = visible & bias.isfinite()
        bias.requires_grad_()
    out = layer(x, y, key_padding_mask=hidden, is_causal=causal, bias=bias)[0]
    expected = formula(layer, x, y, visible.tril() if causal else visible, gates, bias)
    assert_alike(out, expected)
    leaves = [*layer.parameters(), *([bias] if gated else [])]
    assert_alike(gradients(out, *leaves), gradients(expected, *leaves))


def test_the_scale_is_that_of_ordinary_heads() -> None:
    """Whatever heads share, and however wide they are."""
    assert hk.nn.CollaborativeMultiheadAttention(E, H, 10).scale == (E / H) ** -0.5
    assert hk.nn.GatedMultiheadAttention(E, H, head_dim=9).scale == 9**-0.5


# ---------------------------------------------------------------------- gates
def test_head_gate_says_whether_closed_heads_have_a_gradient() -> None:
    layer, x = layer_of(), torch.randn(B, S, E).double()
    gate = layer.head_gate = Gates([0.0, 1.0, 1.0, 1.0])
    for gate.closed_grad in (True, False):
        gate.gates.grad = None
        layer(x)[0].square().sum().backward()
        assert bool(gate.gates.grad[0]) == gate.closed_grad


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_zeros_of_mixing_train_unless_ragged(ragged: bool, gated: bool) -> None:
    """Whatever a head gate says of its own zeros."""
    layer = hk.nn.CollaborativeMultiheadAttention(E, H, 10, ragged=ragged)
    if gated:
        layer.head_gate = hk.nn.HardConcrete(H)
    layer(torch.randn(B, T, E))[0].square().sum().backward()
    zeros = layer.mixing == 0
    assert layer.mixing.grad[~zeros].any()
    assert layer.mixing.grad[zeros].any() != ragged


# ---------------------------------------------------------------------- caches
@torch.no_grad()
def test_a_growing_cache_is_copied_seldom() -> None:
    layer, cache, rooms = layer_of(), hk.nn.KeyValueCache(), set()
    for _ in range(33):
        layer(torch.randn(B, 1, E).double(), cache=cache)
        nothing = torch.empty(B, 0, H, 6).double()
        rooms.add(cache.append(nothing, nothing)[0].data_ptr())
    assert cache.length == 33
    assert len(rooms) <= 7  # 1, 2, 4, 8, 16, 32, 64


@torch.no_grad()
def test_the_source_of_encoder_decoder_attention_is_projected_once() -> None:
    layer, x, memory = layer_of(), torch.randn(B, T, E).double(), torch.randn(B, S, E).double()
    full = layer(x, memory, key_padding_mask=PADDED)[0]
    calls = []
    layer.k_proj.register_forward_hook(lambda *call: calls.append(call))
    cache = hk.nn.KeyValueCache()
    steps = [layer(row, memory, key_padding_mask=PADDED, cache=cache)[0] for row in x.split(2, dim=1)]
    assert_alike(torch.cat(steps, 1), full)
    assert len(calls) == 1
    assert cache.length == S


def test_a_cache_that_does_not_fit_is_refused() -> None:
    layer, x, cache = layer_of(), torch.randn(B, S, E).double(), hk.nn.KeyValueCache()
    grouped = hk.nn.GatedMultiheadAttention(E, H, num_key_heads=2, dtype=x.dtype)
    filled = r"cache is filled while gradients.*no_grad"
    assert_refused(
        (lambda: layer(x, cache=hk.nn.KeyValueCache()), filled),
        (lambda: layer(x, x.clone(), cache=hk.nn.KeyValueCache()), filled),
    )
    with torch.no_grad():
        layer(x, cache=cache)
        layer(x, x.clone(), cache=(of_source := hk.nn.KeyValueCache()))
        assert_refused(
            (lambda: layer(x[:1, :1], cache=cache), r"cache holds \[\(2, 4, 6, .*\[\(1, 4, 6, "),
            (lambda: layer(x, x.clone(), cache=cache), "cache holds the tokens of self-attention"),
            (lambda: layer(x, cache=of_source), "cache holds the source of encoder-decoder"),
            (lambda: layer(x[:1], x[:1].clone(), cache=of_source), "cache holds batch 2, but query has"),
            (lambda: grouped(x, x.clone(), cache=of_source), r"holds values of heads \[0, 1, 2, 3\], .* \[0, 1\]; use"),
            (lambda: cache.reorder(torch.ones(2)), TypeError, "beams has"),
            (lambda: cache.reorder(torch.tensor([[0]])), "beams has"),
            (lambda: cache.reorder([0, 1]), TypeError, "beams is"),
        )


@torch.no_grad()
@pytest.mark.parametrize("source", [{}, {"key": torch.randn(B, S, E).double()}], ids=["own", "other"])
def test_a_cache_from_before_a_change(source: dict[str, Tensor]) -> None:
    """Pruned to as many key heads, which are others or the same; and converted."""
    model = nn.ModuleList([layer_of(num_heads=6, num_key_heads=3), shared_layer_of(num_value_heads=2)])
    x, caches = torch.randn(B, T, E).double(), [hk.nn.KeyValueCache() for _ in model]
    calls = [lambda i=i: model[i](x, **source, cache=caches[i])[0] for i in range(2)]
    calls[0](), calls[1]()
    before = copy.deepcopy(caches)
    hk.heads.prune(model, {0: [0, 4, 5], 1: [3]})
    assert model[0].kept_key_heads == [0, 1, 1]
    refused = (calls[0], r"cache holds values of heads \[0, 1, 2\], but the layer reads .*\[0, 1, 1\]; use one")
    assert_refused(refused, (calls[1], "a shared key, 4 biases, .*, but the layer reads a shared key, 3 biases, "))
    caches = before
    hk.convert.collaborate(model, E, layers=[0], progress=False)
    assert_refused((calls[0], "reads a shared key, 3 biases, values of heads"))
    model, caches = nn.ModuleList([layer_of(num_key_heads=2)]), [hk.nn.KeyValueCache()]
    calls[0]()
    hk.heads.prune(model, {0: [1, 3]})
    assert_alike(calls[0](), model[0](x, **(source or {"key": torch.cat((x, x), 1)}))[0])


@pytest.mark.parametrize("grad", [False, True])
def test_a_cache_filled_in_inference_mode(grad: bool) -> None:
    """Continued outside, where there is still room."""
    layer, x, memory = layer_of().requires_grad_(False), torch.randn(B, 4, E).double(), torch.randn(B, S, E).double()
    own, other = hk.nn.KeyValueCache(), hk.nn.KeyValueCache()
    with torch.inference_mode():
        for row in x[:, :3].split(1, 1):
            layer(row, is_causal=True, cache=own)
        layer(row, memory, cache=other)
    layer.q_proj.requires_grad_(grad)
    out = layer(x[:, 3:], is_causal=True, cache=own)[0]
    assert_alike(out, layer(x, is_causal=True)[0][:, 3:])
    assert_alike(layer(x, memory, cache=other)[0], layer(x, memory)[0])
    assert out.requires_grad == grad


@torch.no_grad()
def test_a_cache_of_shared_keys_and_grouped_values() -> None:
    """`Ds + H + Hv Dv` numbers a token; test_modules.py has the outputs."""
    layer = hk.nn.CollaborativeMultiheadAttention(E, H, 10, num_value_heads=2)
    cache, x = hk.nn.KeyValueCache(), torch.randn(B, S, E)
    layer(x, is_causal=True, cache=cache)
    held = cache.append(*(each[:, :0] for each in layer.source(x, x)))
    assert sum(each.nbytes for each in held) == B * S * (10 + H + 2 * E // H) * x.element_size()


# ---------------------------------------------------------------------- entmax
def entmax_layer(*logits: float, dtype: torch.dtype = torch.float32) -> hk.nn.GatedMultiheadAttention:
    """Of sharp attention, with these `alpha_logits`."""
    made = hk.nn.GatedMultiheadAttention(E, H, entmax=True, dtype=dtype)
    with torch.no_grad():
        made.alpha_logits.copy_(torch.tensor(logits))
        made.q_proj.weight.mul_(4)
    return made


def test_alpha_begins_in_the_middle() -> None:
    made = hk.nn.GatedMultiheadAttention(E, H, entmax=True)
    assert torch.equal(made.alpha, torch.full((H,), 1.5))
    assert "entmax=True" in repr(made)
    assert hk.nn.GatedMultiheadAttention(E, H).alpha is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_alpha_stays_where_entmax_is_defined(dtype: torch.dtype) -> None:
    made = entmax_layer(-1000.0, -30.0, 30.0, 1000.0, dtype=dtype)
    assert ((made.alpha > 1) & (made.alpha <= 2)).all()
    assert made(torch.randn(B, S, E, dtype=dtype))[0].isfinite().all()


def test_support_sizes_and_probabilities() -> None:
    torch.manual_seed(0)
    [(_, call)] = nn_layers.calls_of(entmax_layer(-2.0, 0.0, 1.0, 3.0), torch.randn(B, S, E), is_causal=True)
    every_key = torch.eye(S).expand(B, H, S, S)
    options = {"alpha": call.alpha, "scale": call.scale, "is_causal": True}
    p = hk.entmax_attention(call.query, call.key, every_key, **options)
    assert_alike(call.probabilities(slice(0, S)), p)
    assert torch.equal(call.support_sizes(), (call.probabilities(slice(0, S)) > 0).sum(-1))
    assert (call.support_sizes()[:, -1] < call.support_sizes()[:, 0]).any()  # alpha 1.95 and 1.1
    assert_refused((call.statistics, "statistics is that of softmax"))


def test_what_is_of_softmax_is_refused() -> None:
    model, x = nn.Sequential(entmax_layer(0.0, 0.0, 0.0, 0.0)), torch.randn(B, S, E)
    mesh: Any = SimpleNamespace(size=lambda: 2)
    plan = hk.integrations.distributed.tensor_parallel_plan
    assert_refused(
        (lambda: hk.convert.collaborate(model, 8, progress=False), "has entmax, which collabor"),
        (lambda: plan(model, mesh), "has entmax, .* no DTensors"),
        (lambda: hk.analysis.relevance(model, [x]), "relevance is that of softmax, but the layer has entmax"),
        unchanged=[model],
    )
    model[0].context = object()
    assert_refused((lambda: model[0](x), "context is set, but entmax"))


# ---------------------------------------------------------------------- merged attention
ROWS = torch.tensor([[False] * T, [True, False, True, False, False]])  # [B, T]: padded at the left, and a hole


def merged(**options: Any) -> hk.nn.MergedAttention:
    return spread(hk.nn.MergedAttention(E, H, **{"dtype": torch.float64, **options}))


@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({}, {}),
        ({"num_key_heads": 2, "bias": False}, {"mask": hk.Mask(query_mask=~ROWS)}),
        ({"value_dim": 3}, {"mask": hk.Mask(query_lengths=[5, 2])}),
        ({"output_gate": "head"}, {}),
        ({"output_gate": "element"}, {}),
    ],
)
def test_merged_attention(options: dict[str, Any], hidden: dict[str, Any]) -> None:
    """Output and the gradients of input and weights; test_modules.py has head gates."""
    layer, x, y = merged(**options), torch.randn(B, T, E).double().requires_grad_(), torch.randn(B, S, E).double()
    mask = hidden.get("mask", hk.Mask())
    out = layer(x, y, key_padding_mask=PADDED, **hidden)[0]
    visible = mask.to_dense(B, 1, T, 1) & ~PADDED[:, None, None, :]
    wanted = formula(layer, x, y, visible.expand(B, H, T, S))
    assert_alike(out, wanted)
    leaves = [x, *layer.parameters()]
    assert_alike(gradients(out, *leaves), gradients(wanted, *leaves))


def test_the_average_of_bfloat16_is_summed_in_float32() -> None:
    """The mean of 4,096 equal rows; sums in bfloat16 would stop growing at 256."""
    layer = hk.nn.MergedAttention(8, 1, bias=False, dtype=torch.bfloat16)
    for part in (layer.v_proj, layer.out_proj):
        nn.init.eye_(part.weight)
    x = torch.ones(1, 4096, 8, dtype=torch.bfloat16)
    out = layer(x, torch.zeros(1, 1, 8, dtype=torch.bfloat16))[0]
    assert torch.equal(out, x)


def test_what_merged_attention_refuses() -> None:
    layer, x, y = merged(), torch.zeros(B, T, E).double(), torch.zeros(B, S, E).double()
    ids = torch.arange(T) // 2, torch.arange(S) // 3
    assert_refused(
        *((lambda source=source: layer(x, source), "^key is None or query; pass the out") for source in (None, x)),
        (lambda: layer(x, y, mask=hk.Mask(document_ids=ids)), "^mask has document_ids"),
        (lambda: hk.nn.MergedAttention(E, H, vdim=12), "^vdim is 12, but embed_dim is 24"),
        (lambda: hk.convert.collaborate(nn.Sequential(layer), 12), TypeError, "what its class adds would be lost"),
    )
