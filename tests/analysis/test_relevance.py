"""Layer-wise relevance propagation against Jacobians: every rule, whole models, outputs, refusals."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heads_kernels as hk
from heads_kernels.analysis import relevance
from heads_kernels.analysis import relevance_rules as rules
from heads_kernels.analysis.relevance_rules import RULES
from heads_kernels.parse import parse
from tests.support.alike import assert_alike
from tests.support.nn_layers import Layers, random, spread
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, build

use = hk.integrations.transformers.use
REAL = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


# ---------------------------------------------------------------------- the rule as it is written
def by_jacobian(function: Callable[..., Tensor], inputs: list[Tensor], given: Tensor) -> list[Tensor]:
    """For one example: its Jacobian, both signs with a factor of 1/2, then scaled."""
    slopes = torch.autograd.functional.jacobian(function, tuple(inputs))
    m, n = given.numel(), sum(x.numel() for x in inputs)
    owed = [slope.reshape(m, -1) * x.flatten() for slope, x in zip(slopes, inputs, strict=True)]
    at_zero = function(*map(torch.zeros_like, inputs)).flatten()
    z = torch.cat(owed, 1) + at_zero[:, None] / n
    up, down = z * (z > 0), z * (z < 0)
    shares = 0.5 * up / (up.sum(1, keepdim=True) + 1e-5)
    shares = shares + 0.5 * down / (down.sum(1, keepdim=True) - 1e-5)
    found = given.flatten() @ shares
    if found.sum() > 0:
        found = found * given.sum() / found.sum()
    parts = found.split([x.numel() for x in inputs])
    return [part.view(x.shape) for part, x in zip(parts, inputs, strict=True)]


def by_rows(function: Callable[..., Tensor], inputs: list[Tensor], given: Tensor) -> list[Tensor]:
    """`by_jacobian` of each row of tensors of two dimensions or more."""
    flat = [x.reshape(-1, x.shape[-1]) for x in inputs]
    rows = [
        by_jacobian(function, list(parts), each)
        for *parts, each in zip(*flat, given.reshape(-1, given.shape[-1]), strict=True)
    ]
    return [torch.stack(found).view(x.shape) for found, x in zip(zip(*rows, strict=True), inputs, strict=True)]


# ---------------------------------------------------------------------- rules
WEIGHT, GAIN, BIAS = torch.randn(7, 5).double(), torch.randn(5).double(), torch.randn(7).double()
#: A function of rows of 5 features, and its rule.
ROWS: dict[str, tuple[Callable[..., Tensor], Callable[..., Any]]] = {
    "linear": (lambda x: F.linear(x, WEIGHT, BIAS), lambda x: rules.linear(x, WEIGHT, BIAS)),
    "without a bias": (lambda x: F.linear(x, WEIGHT), lambda x: rules.linear(x, WEIGHT)),
    "matrix product": (lambda x: x @ WEIGHT.T, lambda x: RULES["matmul"](x, WEIGHT.T)),
    "Conv1D": (lambda x: F.linear(x, WEIGHT, BIAS), lambda x: RULES["addmm"](BIAS, x, WEIGHT.T)),
    "layer norm": (
        lambda x: F.layer_norm(x, [5], GAIN, BIAS[:5], 0.1),
        lambda x: RULES["layer_norm"](x, [5], GAIN, BIAS[:5], 0.1),
    ),
    "plain layer norm": (
        lambda x: F.layer_norm(x, [5], None, None, 0.1),
        lambda x: RULES["layer_norm"](x, [5], eps=0.1),
    ),
    "RMS norm": (
        lambda x: F.rms_norm(x, [5], GAIN, 0.1),
        lambda x: rules.rms_norm(x, F.rms_norm(x, [5], GAIN, 0.1), 0.1),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_functions_of_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of several rows, of some outputs of a row, and of one output."""
    function, rule = ROWS[name]
    x = random(2, 3, 5)
    given = random(*function(x).shape).abs()
    given[0, 1], given[..., 2] = 0, 0  # a row and an output without relevance
    [expected] = by_rows(function, [x], given)
    for elements in (1 << 18, 40, 1):
        monkeypatch.setitem(rules.TILES, "cpu", elements)
        _, back = rule(x)
        [found] = back(given)
        assert_alike(found, expected)
        assert_alike(found.sum(-1), given.sum(-1))
        assert not found[0, 1].any()


def test_sum_of_tensors() -> None:
    """A term that broadcasts gets what its copies get."""
    x, y, given = random(2, 3, 5), random(3, 5), random(2, 3, 5).abs()
    for name, function in (("add", torch.add), ("sub", torch.sub)):
        _, back = RULES[name](x, y)
        expected = by_rows(function, [x, y.expand(2, 3, 5)], given)
        assert_alike(back(given), [expected[0], expected[1].sum(0)])


def test_mean_within_examples() -> None:
    """Over tokens, and over all that an example has; not over examples, also if they are as many as tokens."""
    x = random(4, 4, 5)
    for dims in ((0,), (0, 1)):
        over = [1 + dim for dim in dims]
        given = random(*x.mean(over).shape).abs()
        [found] = RULES["mean"](x, over)[1](given)
        for example in range(4):
            expected = by_jacobian(lambda y, dims=dims: y.mean(dims), [x[example]], given[example])
            assert_alike(found[example], expected[0])
    assert_refused((lambda: RULES["mean"](x, 0)[1](random(4, 5)), "model computes mean, over the examples"))


def test_a_product_is_halved_among_what_carries_relevance() -> None:
    a, b, given = random(3, 5) * 100, random(3, 5) * 100, random(3, 5).abs()
    carried = [x.clone().requires_grad_().clone() for x in (a, b)]
    inputs, back = RULES["mul"](*carried)
    assert inputs == carried
    expected = by_rows(torch.mul, [a, b], given)
    assert_alike(back(given), expected, dtype=torch.float32)
    b[0, 1] = 0
    [alone], back = RULES["mul"](b, carried[0])
    assert alone is carried[0]
    assert_alike(back(given)[0], given * (b != 0))


def attention_of(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = (query @ key.mT).masked_fill(~visible, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ value


@pytest.mark.parametrize("in_tiles", [False, True])
def test_attention(in_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_tiles:
        monkeypatch.setattr(rules, "blocks", lambda n, width: [slice(0, 3), slice(3, n)])
    q, k, v = random(2, 2, 4, 3), random(2, 2, 5, 3), random(2, 2, 5, 6)
    given = random(2, 2, 4, 6).abs()
    visible = torch.rand(2, 2, 4, 5) > 0.3
    visible[..., 0] = True
    visible[0, 0, 1] = False  # a row that sees nothing, whose relevance the others of its head get
    call = parse("gated_attention", q, k, v, attn_mask=visible, scale=1.0)[0]
    p = attention_of(q, k, torch.eye(5, dtype=torch.float64), visible)
    [values] = rules.attention_rule(call, False)[1](given)
    found = rules.attention_rule(call, True)[1](given)
    for at in [(b, h) for b in range(2) for h in range(2)]:
        [expected] = by_jacobian(lambda value, at=at: p[at] @ value, [v[at]], given[at])
        assert_alike(values[at], expected)

        def whole(*operands: Tensor, at: tuple[int, int] = at) -> Tensor:
            return attention_of(*operands, visible[at])

        assert_alike([x[at] for x in found], by_jacobian(whole, [q[at], k[at], v[at]], given[at]))


def test_attention_with_shared_features_and_a_cap() -> None:
    """Mixing and the cap belong to the scores; the content bias is an operand, as query and key are."""
    q, k, v = random(2, 4, 3), random(2, 5, 3), random(2, 2, 5, 6)
    mixing, content, given = random(2, 3), random(2, 2, 5), random(2, 2, 4, 6).abs()
    call = parse("collaborative_attention", q, k, v, mixing, content, scale=0.5, softcap=0.7)[0]
    inputs, back = rules.attention_rule(call, True)
    assert inputs[3] is call.content_bias
    found = back(given)
    for b, h in [(b, h) for b in range(2) for h in range(2)]:

        def whole(query: Tensor, key: Tensor, value: Tensor, content: Tensor, h: int = h) -> Tensor:
            scores = 0.5 * ((query * mixing[h]) @ key.mT + content)
            return (0.7 * (scores / 0.7).tanh()).softmax(-1) @ value

        operands = [q[b], k[b], v[b, h], content[b, h]]
        assert_alike([x[b, h] for x in found], by_jacobian(whole, operands, given[b, h]))


# ---------------------------------------------------------------------- a whole model
class Encoder(nn.Module):
    """Two of PyTorch's own layers around our attention, and scores of the mean token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True) for _ in range(2))
        for layer in self.layers:
            layer.self_attn = hk.nn.GatedMultiheadAttention(8, 4)
        self.scores = nn.Linear(8, 3)
        self.double()

    def states(self, x: Tensor, real: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~real)
        return x

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        if real is None:
            real = torch.ones(x.shape[:2], dtype=torch.bool)
            return self.scores(self.states(x, real).mean(1))
        weights = real[..., None].double()
        return self.scores((self.states(x, real) * weights).sum(1) / weights.sum(1))


def attention_backward(
    layer: hk.nn.GatedMultiheadAttention, x: Tensor, given: Tensor, full: bool
) -> tuple[Tensor, Tensor]:
    """What the input `[T, E]` of self-attention gets, and the relevance of each head."""

    def merged(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1).flatten(1)

    def split(x: Tensor) -> Tensor:
        return x.unflatten(1, (layer.num_heads, -1)).transpose(0, 1)[None]

    parts = layer.q_proj, layer.k_proj, layer.v_proj
    operands = [split(part(x)) for part in parts]
    call = parse("gated_attention", *operands, scale=layer.scale)[0]
    heads = hk.gated_attention(*operands, scale=layer.scale)
    [of_heads] = by_rows(layer.out_proj, [merged(heads)], given)
    found = rules.attention_rule(call, full)[1](split(of_heads))
    parts = parts if full else parts[2:]
    inputs = [by_rows(p, [x], merged(of_part))[0] for p, of_part in zip(parts, found, strict=True)]
    return sum(inputs), split(of_heads).sum((0, 2, 3))


def encoder_by_jacobian(model: Encoder, x: Tensor, full: bool) -> list[Tensor]:
    """The relevance of the heads of each layer for the largest score of one example `[T, E]`, normalised."""
    states = []
    for layer in model.layers:
        attended = x + layer.self_attn(x[None])[0][0]
        normed = layer.norm1(attended)
        hidden = layer.linear1(normed).relu()
        fed = normed + layer.linear2(hidden)
        states.append((layer, x, attended, normed, hidden, fed))
        x = layer.norm2(fed)
    scores = model.scores(x.mean(0))
    given = F.one_hot(scores.argmax(), 3).double()
    [given] = by_jacobian(model.scores, [x.mean(0)], given)
    [given] = by_jacobian(lambda y: y.mean(0), [x], given)
    found = []
    for layer, x, attended, normed, hidden, fed in reversed(states):
        [given] = by_rows(layer.norm2, [fed], given)
        beside, given = by_rows(torch.add, [normed, fed - normed], given)
        [given] = by_rows(layer.linear2, [hidden], given)
        [given] = by_rows(layer.linear1, [normed], given)  # the activation lets it through
        [given] = by_rows(layer.norm1, [attended], given + beside)
        beside, given = by_rows(torch.add, [x, attended - x], given)
        given, heads = attention_backward(layer.self_attn, x, given, full)
        given = given + beside
        found.append(heads / heads.sum())
    return found[::-1]


@pytest.mark.parametrize("attention", ["constant", "full"])
def test_a_model_layer_by_layer(attention: str) -> None:
    model = spread(Encoder())
    x = random(3, 5, 8)
    found = relevance(model, [x[:2], x[2:]], attention=attention)
    with torch.no_grad():
        each = [encoder_by_jacobian(model, example, attention == "full") for example in x]
    expected = [torch.stack(of_layer).mean(0) for of_layer in zip(*each, strict=True)]
    assert_alike(list(found.scores), expected)
    assert found.layers == ("layers.0.self_attn", "layers.1.self_attn")
    assert found.method == ("lrp" if attention == "constant" else "lrp, full attention")


# ---------------------------------------------------------------------- attention of every kind
def last(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, is_causal=True)[:, -1]


class Repeated(hk.nn.GatedMultiheadAttention):
    """Keys and values of grouped heads are repeated."""

    def operands(self, query: Tensor, source: tuple[Tensor, ...]) -> Any:
        found: Any = super().operands(query, source)
        group = found["query"].shape[1] // found["key"].shape[1]
        return found | {n: found[n].repeat_interleave(group, 1) for n in ("key", "value")}


SIZES = {"embed_dim": 8, "num_heads": 4, "dtype": torch.float64}
SHARED = {"shared_dim": 8, "qk_bias": True, "content_bias": False}
SAME = {
    "blocks of mixing": (
        lambda: hk.nn.GatedMultiheadAttention(**SIZES),
        lambda: hk.nn.CollaborativeMultiheadAttention(**SIZES, **SHARED),
    ),
    "grouped keys": (
        lambda: Repeated(**SIZES, num_key_heads=2),
        lambda: hk.nn.GatedMultiheadAttention(**SIZES, num_key_heads=2),
    ),
}


@pytest.mark.parametrize("attention", ["constant", "full"])
@pytest.mark.parametrize("name", SAME)
def test_modules_that_compute_the_same(name: str, attention: str) -> None:
    plain, other = (Layers(*(make() for _ in range(2))) for make in SAME[name])
    spread(plain)
    for made, module in zip(other.layers, plain.layers, strict=True):
        made.load_state_dict(made.state_dict() | module.state_dict())
    x = random(2, 5, 8)
    expected, found = (relevance(m, [x], last, attention=attention) for m in (plain, other))
    assert_alike(found.table(), expected.table())


@pytest.mark.parametrize("output_gate", ["head", "element"])
def test_an_output_gate_has_half_of_the_relevance(output_gate: str) -> None:
    """In the operator, or beside a head gate behind it, by which nothing may change."""
    options = {"output_gate": output_gate, "dtype": torch.float64}
    modules = [hk.nn.GatedMultiheadAttention(8, 4, **options) for _ in range(2)]
    model, x = spread(Layers(*modules)), random(2, 5, 8)
    found = relevance(model, [x], last).table()
    hk.heads.gate(model, lambda heads: hk.nn.FixedGate(torch.ones(heads, dtype=torch.float64)))
    assert_alike(relevance(model, [x], last).table(), found)
    assert_alike(found.sum(1), torch.ones(2, dtype=torch.float64))


# ---------------------------------------------------------------------- models of transformers
def token_two(model: Any, arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the model says of the third token, which is real in `batch`, and its absolute value as relevance."""
    values = model(**arguments)[0][:, 2]
    return values, values.abs()


FAMILIES = ("albert", "bert", "vit", "bart", "t5", "gpt2", "llama", "modernbert", "gemma3_text", "step3p7_text")


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    model = use(build(name))
    for attention in ("constant", "full"):
        found = relevance(model, [batch(model)], token_two, attention=attention)
        for scores in found.scores:
            assert scores.min() > 0
            assert scores.sum().item() == pytest.approx(1)


def test_logits_are_the_output_of_models_that_have_them() -> None:
    model = use(build("bert", model="BertForSequenceClassification"))
    found = relevance(model, [batch(model)])
    expected = relevance(model, [batch(model)], lambda model, arguments: model(**arguments).logits)
    assert_alike(found.table(), expected.table())


def test_t5_in_half_precision_clamps_its_hidden_states() -> None:
    model = use(build("t5")).half()
    found = relevance(model, [batch(model)], token_two).table()
    assert_alike(found.sum(1), torch.ones(len(found)).double(), dtype=torch.float16)


# ---------------------------------------------------------------------- padding, outputs
def test_examples_of_padding_alone_do_not_count() -> None:
    model, x = spread(Encoder()), random(2, 6, 8)
    real = REAL.clone()
    real[1] = False
    alone = relevance(model, [(x[:1], real[:1])]).table()
    assert_alike(relevance(model, [(x, real)]).table(), alone)


def test_positions_are_passes_of_their_own() -> None:
    model, x = spread(Encoder()), random(2, 6, 8)

    def scores(model: Encoder, batch: Tensor) -> Tensor:
        return model.scores(model.states(batch, REAL))

    found = relevance(model, [x], scores).table()
    each = []
    for b, t in REAL.nonzero().tolist():

        def one(model: Encoder, batch: Tensor, b: int = b, t: int = t) -> Any:
            values = scores(model, batch)[:, t]
            start = torch.zeros_like(values)
            start[b] = F.one_hot(values[b].argmax(), 3)
            return values, start

        each.append(relevance(model, [x], one).table())
    assert_alike(found, torch.stack(each).mean(0))


def test_what_does_not_lie_on_the_way_needs_no_rule() -> None:
    class Aside(Encoder):
        def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
            x = x.cumsum(1)  # below all heads
            found = super().forward(x, real)
            self.aside = found.softmax(-1).cumsum(-1)
            return found + torch.zeros_like(found) + found.argmax().double()

    model = spread(Aside())
    assert relevance(model, [random(2, 5, 8)]).table().isfinite().all()


# ---------------------------------------------------------------------- refusals
STOCK = nn.MultiheadAttention(3, 1, batch_first=True, dtype=torch.float64).eval()
REFUSED = {
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "matmul": lambda x: x @ x.mT,
    "mul_": lambda x: x.mul_(2),
    "__setitem__": lambda x: [x, x.__setitem__(0, 1.0)][0],
    "div": lambda x: x / x,
    "__rdiv__": lambda x: 1 / x,
    "linear": lambda x: F.linear(x, x),
    "multi_head_attention_forward": lambda x: STOCK(x[None], x[None], x[None])[0][0],
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(*[x[None]] * 3)[0],
    "layer_norm": lambda x: F.layer_norm(x, x.shape),
    "mean": lambda x: x.mean(0, keepdim=True).expand(2, 3),
}


@wraps(hk.gated_attention)
def in_parts(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """Attention to halves of the keys, merged."""
    halves = zip(key.chunk(2, 2), value.chunk(2, 2), strict=True)
    return hk.merge_attention(*zip(*(hk.gated_attention(query, *h, return_lse=True) for h in halves), strict=True))[0]


def test_unknown_functions_are_refused_by_name() -> None:
    parts = Layers(hk.nn.GatedMultiheadAttention(8, 4, dtype=torch.float64))
    parts.layers[0].operator = in_parts
    twice, nested = (Layers(hk.nn.GatedMultiheadAttention(8, 4, dtype=torch.float64)) for _ in "ab")
    inner = nested.inner = hk.nn.GatedMultiheadAttention(8, 4, dtype=torch.float64)
    for each, between in ((twice, lambda: None), (nested, lambda: inner(data[0]))):
        each.layers[0].operator = wraps(hk.gated_attention)(
            lambda *a, between=between, **k: [hk.gated_attention(*a, **k), between(), hk.gated_attention(*a, **k)][2]
        )
    model, data, mixtral = spread(Encoder()), [random(2, 5, 8)], use(build("mixtral"))
    assert_refused(
        *(
            ((model, data, lambda m, b, end=end: end(m(b))), f"model computes {name}, .* there are rules for linear")
            for name, end in REFUSED.items()
        ),
        ((mixtral, [batch(mixtral)], token_two), "model computes div_, "),
        ((parts, data, lambda m, b: m(b)[:, 0]), "layer 0 .* asks for the lse of its rows"),
        *(((each, data, lambda m, b: m(b)[:, 0]), "layer 0 .* calls an operator again") for each in (twice, nested)),
        of=relevance,
    )


def test_layers_after_one_that_calls_its_operator_twice() -> None:
    model = spread(Layers(*(hk.nn.GatedMultiheadAttention(8, 4, dtype=torch.float64) for _ in "ab")))
    of = partial(relevance, model, [random(2, 5, 8)], lambda m, x: m(x)[:, 0])
    expected = of(layers=[1]).table()
    model.layers[0].operator = wraps(hk.gated_attention)(lambda *a, **k: [hk.gated_attention(*a, **k) for _ in "ab"][1])
    assert_alike(of(layers=[1]).table(), expected)
    assert_refused(({"layers": [0]}, "layer 0 .* calls an operator again"), of=of)


def test_layers_after_merged_attention() -> None:
    """Their relevance does not go through its average."""
    model = nn.ModuleList([hk.nn.MergedAttention(8, 4), hk.nn.GatedMultiheadAttention(8, 4)]).double()
    of = partial(relevance, model, [random(2, 5, 8)], lambda m, x: m[1](m[0](x, x.flip(1))[0])[0][:, 0])
    assert_alike(of(layers=[1]).scores[0].sum(), torch.ones((), dtype=torch.float64))
    assert_refused(({"layers": [0]}, "layer 0 .* adds an average of rows to its heads"), of=of)


def test_bad_arguments() -> None:
    model = spread(Encoder())
    assert_refused(
        ({"output": "logits"}, TypeError, "output is a str; pass a function"),
        ({"attention": "values"}, "attention is 'values'; use one of 'constant'"),
        ({"output": lambda m, b: [m(b)]}, TypeError, "output is a list; pass output"),
        ({"output": lambda m, b: m(b).sum()}, r"output has shape \[\]"),
        ({"output": lambda m, b: m(b).long()}, TypeError, "output has dtype torch.int64"),
        ({"output": lambda m, b: m.scores(b[:, 0])}, "output depends on no head"),
        ({"output": lambda m, b: (m(b), torch.ones(2, 4))}, r"relevance .* has shape \[2, 4\]"),
        ({"output": lambda m, b: (m(b), -torch.ones(2, 3))}, "relevance .* negative or not finite"),
        ({"output": lambda m, b: (m(b), torch.ones(2, 3).long())}, TypeError, "relevance .* dtype torch.int64"),
        ({"output": lambda m, b: (m(b), torch.zeros(2, 3))}, "data has no example that counts"),
        of=partial(relevance, model, [random(2, 5, 8)]),
        unchanged=[model],
    )
