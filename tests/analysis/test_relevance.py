"""Layer-wise relevance propagation against Jacobians: every rule, whole models, padding, pruned heads, refusals."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.analysis.jacobian_relevance import Encoder, by_jacobian, by_rows, encoder_by_jacobian
from tests.support.alike import assert_alike
from tests.support.nn_layers import Layers, spread
from tests.support.tiny_models import batch, build

use = hk.integrations.transformers.use
REAL = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


def random(*sizes: int, positive: bool = False) -> Tensor:
    made = torch.randn(*sizes, dtype=torch.float64)
    return made.abs() if positive else made


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# ---------------------------------------------------------------------- rules
WEIGHT, GAIN, BIAS = torch.randn(7, 5).double(), torch.randn(5).double(), torch.randn(7).double()
#: A function of rows of 5 features, and its rule; `y` are its outputs.
ROWS: dict[str, tuple[Callable[..., Tensor], Callable[..., Any]]] = {
    "linear": (lambda x: F.linear(x, WEIGHT, BIAS), lambda x, y: rules.linear(x, WEIGHT, BIAS)),
    "without a bias": (lambda x: F.linear(x, WEIGHT), lambda x, y: rules.linear(x, WEIGHT)),
    "matrix product": (lambda x: x @ WEIGHT.T, lambda x, y: RULES["matmul"](x, WEIGHT.T)),
    "Conv1D": (
        lambda x: F.linear(x, WEIGHT, BIAS),
        lambda x, y: RULES["addmm"](BIAS, x, WEIGHT.T),
    ),
    "layer norm": (
        lambda x: F.layer_norm(x, [5], GAIN, BIAS[:5], 0.1),
        lambda x, y: RULES["layer_norm"](x, [5], GAIN, BIAS[:5], 0.1),
    ),
    "plain layer norm": (
        lambda x: F.layer_norm(x, [5], None, None, 0.1),
        lambda x, y: RULES["layer_norm"](x, [5], eps=0.1),
    ),
    "RMS norm": (
        lambda x: F.rms_norm(x, [5], GAIN, 0.1),
        lambda x, y: rules.rms_norm(x, y, 0.1),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_functions_of_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of several rows, of some outputs of a row, and of one output."""
    function, rule = ROWS[name]
    x = random(2, 3, 5)
    y = function(x)
    given = random(*y.shape, positive=True)
    given[0, 1], given[..., 2] = 0, 0  # a row and an output without relevance
    [expected] = by_rows(function, [x], given)
    for elements in (1 << 18, 40, 1):
        monkeypatch.setitem(rules.TILES, "cpu", elements)
        _, back = rule(x, y)
        [found] = back(given)
        assert_alike(found, expected)
        assert_alike(found.sum(-1), given.sum(-1))
        assert not found[0, 1].any()


def test_sum_of_tensors() -> None:
    """A term that broadcasts gets what its copies get."""
    x, y, given = random(2, 3, 5), random(3, 5), random(2, 3, 5, positive=True)
    for name, function in (("add", torch.add), ("sub", torch.sub)):
        _, back = RULES[name](x, y)
        expected = by_rows(function, [x, y.expand(2, 3, 5)], given)
        assert_alike(back(given), [expected[0], expected[1].sum(0)])


@pytest.mark.parametrize("dims", [(0,), (0, 1)])
def test_mean_within_examples(dims: tuple[int, ...]) -> None:
    """Over tokens, and over all that an example has."""
    x = random(2, 4, 5)
    given = random(*x.mean([1 + dim for dim in dims]).shape, positive=True)
    _, back = RULES["mean"](x, [1 + dim for dim in dims])
    [found] = back(given)
    for example in range(2):
        expected = by_jacobian(lambda y: y.mean(dims), [x[example]], given[example])
        assert_alike(found[example], expected[0])


def test_a_product_is_halved_among_what_carries_relevance() -> None:
    a, b, given = random(3, 5) * 100, random(3, 5) * 100, random(3, 5, positive=True)
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
    given = random(2, 2, 4, 6, positive=True)
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


FAMILIES = (
    "albert", "bert", "vit", "bart", "t5", "gpt2", "llama", "modernbert", "gemma3_text", "step3p7_text"
)  # fmt: skip


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


def test_a_family_that_is_refused() -> None:
    model = use(build("mixtral"))
    with pytest.raises(ValueError, match="model computes div_, "):
        relevance(model, [batch(model)], token_two)


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
        for layer in model.layers:
            batch = layer(batch, src_key_padding_mask=~REAL)
        return model.scores(batch)

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
class Ends(Encoder):
    """An encoder with something more at its end."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return self.end(super().forward(x, real))


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


def test_unknown_functions_are_refused_by_name() -> None:
    for name, end in REFUSED.items():
        words = f"^model computes {name}, .* there are rules for linear"
        with pytest.raises(ValueError, match=words):
            relevance(spread(Ends(end)), [random(2, 5, 8)])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"output": "logits"}, "output is a str; pass a function"),
    ({"attention": "values"}, "attention is 'values'; use one of 'constant'"),
    ({"output": lambda m, b: [m(b)]}, "output is a list; pass output"),
    ({"output": lambda m, b: m(b).sum()}, r"output has shape \[\]"),
    ({"output": lambda m, b: m(b).long()}, "output has dtype torch.int64"),
    ({"output": lambda m, b: m.scores(b[:, 0])}, "output depends on no head"),
    ({"output": lambda m, b: (m(b), torch.ones(2, 4))}, r"relevance .* has shape \[2, 4\]"),
    ({"output": lambda m, b: (m(b), -torch.ones(2, 3))}, "relevance .* negative or not finite"),
    ({"output": lambda m, b: (m(b), torch.ones(2, 3).long())}, "relevance .* dtype torch.int64"),
    ({"output": lambda m, b: (m(b), torch.zeros(2, 3))}, "data has no example that counts"),
]


def test_bad_arguments() -> None:
    model = spread(Encoder())
    for options, words in BAD:
        with pytest.raises((TypeError, ValueError), match=f"^{words}"):
            relevance(model, [random(2, 5, 8)], **options)
