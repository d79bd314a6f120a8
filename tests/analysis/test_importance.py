"""Importance of heads, against derivatives by explicit factors in stock models and against closed heads."""

import copy
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import Gates, Layers, layer_of
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, build

importance = hk.analysis.importance

#: Of the norms of stock models in float64.
NORMS = torch.float32
#: Families: padding, a causal model, position biases, an encoder-decoder, layers that run twice, grouped heads.
FAMILIES = ["bert", "gpt2", "t5", "albert", "llama"]


# ---------------------------------------------------------------------- derivatives by explicit factors
def examples_of(model: Any, arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the model says of real tokens, `[B, T, width]`, 0 elsewhere; and weights of them that differ everywhere."""
    values = model(**arguments)[0]
    real = arguments.get("decoder_attention_mask", arguments["attention_mask"])[:, : values.shape[1]]
    weights = torch.linspace(-1, 1, values[0].numel(), dtype=values.dtype).view(values[0].shape)
    return torch.where(real[..., None] != 0, values, 0), weights


def losses(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    """`[B]`, not linear."""
    values, weights = examples_of(model, arguments)
    return (values + weights).square().sum((1, 2)) / 10


def embeddings(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    """`[B, width]`."""
    return examples_of(model, arguments)[0].sum(1)


def derivatives(model: Any, arguments: dict[str, Tensor], objective: Callable[..., Tensor]) -> dict[str, Tensor]:
    """By factors of 1 before each output projection: `[B, H, T]`, runs one behind the other; padded rows 0."""
    layers = hk.heads.projected_layers(model)
    factors: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def multiply(layer: hk.heads.ProjectedLayer, x: Tensor) -> Tensor:
        heads = x.unflatten(2, (layer.num_heads, -1))
        ones = torch.ones_like(heads[..., 0]).transpose(1, 2).requires_grad_()
        factors[layer.name].append(ones)
        return (heads * ones.transpose(1, 2)[..., None]).flatten(2)

    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.output.linear.register_forward_pre_hook(lambda _, args, layer=layer: multiply(layer, args[0]))
            hooks.callback(hook.remove)
        value = objective(model, arguments).sum()
    found = {}
    for layer in layers:
        is_target = model.config.is_encoder_decoder and layer.kind != "encoder"
        real = arguments["decoder_attention_mask" if is_target else "attention_mask"].double()
        slopes = torch.autograd.grad(value, factors[layer.name], retain_graph=True)
        found[layer.name] = torch.cat([slope * real[:, None] for slope in slopes], 2)
    return found


def pair(family: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """A model in stock eager attention, the same one in use, both in float64, and a padded batch."""
    stock = build(family).double()
    arguments = batch(stock)
    return stock, hk.integrations.transformers.use(copy.deepcopy(stock)), arguments


def by_name(scores: hk.analysis.HeadScores) -> dict[str, Tensor]:
    return dict(zip(scores.layers, scores.scores, strict=True))


REDUCED = {
    "token": lambda terms: terms.abs().sum((0, 2)) / len(terms),
    "example": lambda terms: terms.sum(2).abs().mean(0),
    "batch": lambda terms: terms.sum((0, 2)).abs() / len(terms),
}


# ---------------------------------------------------------------------- transformers models
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_factors_in_stock_attention(family: str) -> None:
    stock, ours, arguments = pair(family)
    expected = derivatives(stock, arguments, losses)
    for reduce, reduced in REDUCED.items():
        found = importance(ours, [arguments], lambda *args: losses(*args).sum(), reduce=reduce)
        assert_alike(by_name(found), {n: reduced(terms) for n, terms in expected.items()}, dtype=NORMS)
        assert found.method == f"gradient by {reduce}"
    fisher = importance(ours, [arguments], losses, method="fisher")
    squares = {name: terms.sum(2).square().mean(0) for name, terms in expected.items()}
    assert_alike(by_name(fisher), squares, dtype=NORMS)


def test_signs_stand_for_labels() -> None:
    """The mean over signs z of (z^T de/dg)^2 is |de/dg|^2; one output alone needs no mean."""
    stock, ours, arguments = pair("bert")

    def narrow(model: Any, arguments: dict[str, Tensor]) -> Tensor:
        return embeddings(model, arguments)[:, :3]

    expected: dict[str, Tensor] = {}
    for column in range(3):
        terms = derivatives(stock, arguments, lambda *args, c=column: narrow(*args)[:, c])
        for name, each in terms.items():
            expected[name] = expected.get(name, 0) + each.sum(2).square().mean(0)
    many = [{name: each.repeat(400, 1) for name, each in arguments.items()}]
    found = importance(ours, many, narrow, method="fisher")
    for name, scores in by_name(found).items():  # 1200 draws of 3 signs: a tenth is 2 to 3 sigma
        assert (scores - expected[name]).abs().max() < 0.1 * max(1.0, expected[name].max())
    again = importance(ours, many, narrow, method="fisher")
    assert_alike(by_name(again), by_name(found))
    one, same = (
        importance(ours, [arguments], lambda *args, c=column: narrow(*args)[:, c], method="fisher")
        for column in (slice(1), 0)
    )
    assert_alike(by_name(one), by_name(same), dtype=NORMS)


@pytest.mark.parametrize("family", ["bert", "albert", "bart"])
def test_leaving_out_is_closing(family: str) -> None:
    _, ours, arguments = pair(family)
    found = importance(ours, [arguments], losses, method="leave_one_out")
    squares = importance(ours, [arguments], embeddings, method="leave_one_out")
    with torch.no_grad():
        whole = [objective(ours, arguments) for objective in (losses, embeddings)]
        for index, head in itertools.product(range(len(found.layers)), (0, 3)):
            hk.heads.close(ours, {index: [head]})
            change = losses(ours, arguments) - whole[0]
            moved = embeddings(ours, arguments) - whole[1]
            hk.heads.reopen(ours)
            assert_alike(found.scores[index][head], change.mean())
            assert_alike(squares.scores[index][head], moved.square().sum(1).mean())


def test_patching_is_the_slope_towards_the_clean_output() -> None:
    """Of the loss under `hk.heads.patch`."""
    model = Layers(*(hk.nn.GatedMultiheadAttention(16, 4) for _ in range(2))).double()
    clean, corrupted = torch.randn(2, 3, 5, 16, dtype=torch.float64)
    weights = torch.randn(5, 16, dtype=torch.float64)

    def loss(model: Any, x: Tensor) -> Tensor:
        return (model(x) * weights).sum((1, 2))

    found = importance(model, [(clean, corrupted)], loss, method="patching")
    recorded = []
    for x in (clean, corrupted):
        with torch.no_grad(), hk.heads.outputs(model) as heads:
            loss(model, x)
        recorded.append(heads)
    for layer in range(2):
        for head in range(4):
            target, own = (heads[layer][0][:, :, head] for heads in recorded)
            share = torch.zeros((), dtype=torch.float64, requires_grad=True)
            with hk.heads.patch(model, {layer: {head: own + share * (target - own)}}):
                loss(model, corrupted).mean().backward()
            assert_alike(found.scores[layer][head], share.grad)
    halves = [(clean[:1], corrupted[:1]), (clean[1:], corrupted[1:])]
    again = importance(model, halves, loss, method="patching")
    assert_alike(list(again.scores), list(found.scores))


def test_patching_takes_pairs_of_equal_sizes() -> None:
    model = Layers(hk.nn.GatedMultiheadAttention(16, 4))
    x = torch.randn(3, 5, 16)
    outputs, total = (lambda model, x: model(x)), (lambda model, x: model(x).sum())
    assert_refused(
        (([(x, x)], outputs), r"loss gave outputs .* no sign"),
        (([x], total), TypeError, "data has a Tensor for a batch"),
        (([(x, x[:, :4])], total), r"data gives layer 0 .* outputs \[3, 5, 4, 4\] for the clean batch"),
        of=partial(importance, model, method="patching"),
        unchanged=[model],
    )


class GatesByRow(Gates):
    def forward(self, B: int, T: int) -> Tensor:
        return (self.gates[:, None] * torch.linspace(0.5, 1.0, T).to(self.gates)).expand(B, -1, -1)


@pytest.mark.parametrize("kind", [Gates, GatesByRow])
def test_gates_stay_in_effect(kind: type[Gates]) -> None:
    """A factor on a gate has the gate's own derivative, times the gate; a head is left out of the others' gates."""
    gates = kind([0.0, 0.3, 0.7, 1.0]).double()
    layer = layer_of(dropout=0.5)
    layer.head_gate = gates
    model, x = Layers(layer), torch.randn(2, 7, 24, dtype=torch.float64)

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().sum((1, 2))

    slopes = [torch.autograd.grad(loss(model, one[None]).sum(), gates.gates)[0] for one in x]
    whole = loss(model, x).detach()
    for method, reduced in (("gradient", Tensor.abs), ("fisher", Tensor.square)):
        found = importance(model.train(), [x], loss, method=method).scores[0]
        assert_alike(found, reduced(torch.stack(slopes) * gates.export()).mean(0))
    left_out = importance(model, [x], loss, method="leave_one_out").scores[0]
    for head, gate in enumerate(gates.export().tolist()):
        with torch.no_grad():
            gates.gates[head] = 0.0
            assert_alike(left_out[head], (loss(model.eval(), x) - whole).mean())
            gates.gates[head] = gate
    assert layer.head_gate is gates


def test_passes_within_a_loss_that_it_does_not_depend_on() -> None:
    """Those of a call within another, and one without gradients."""
    read = partial(importance, Layers(layer_of()), [torch.randn(2, 7, 24, dtype=torch.float64)])
    alone = read(lambda model, x: model(x).square().sum())
    for other in (
        lambda _, x: read(lambda model, x: model(x).sum()).table(),
        torch.no_grad()(lambda model, x: model(x)),
    ):
        found = read(lambda model, x, other=other: model(x).square().sum() + 0 * other(model, x).sum())
        assert_alike(found.scores, alone.scores)


def test_bad_input_is_refused() -> None:
    _, ours, arguments = pair("bert")
    factor = torch.zeros((), dtype=torch.float64, requires_grad=True)  # not of the model
    assert_refused(
        ({"loss": 3}, TypeError, r"loss is a int; pass a function loss\(model, batch\)"),
        ({"method": "shapley"}, "method is 'shapley'; use one of 'gradient', 'fisher'"),
        ({"reduce": "mean"}, "reduce is 'mean'; use one of 'token', 'example', 'batch'"),
        ({"method": "fisher", "reduce": "token"}, "reduce .* 'fisher'; leave it"),
        ({"loss": lambda m, b: m(**b)}, TypeError, "loss gave a BaseModelOutput.*; return a scalar"),
        ({"loss": lambda m, b: m(**b)[0].argmax()}, TypeError, "loss gave a tensor of torch.int64"),
        ({"loss": lambda m, b: m(**b)[0].flatten(0, 1).sum(1)}, r"loss gave shape \[27\] .* of 3"),
        ({"loss": lambda m, b: losses(m, b) * torch.nan}, "loss gave NaN or infinity"),
        (
            {"loss": lambda m, b: (losses(m, b) - losses(m, b).detach()).sqrt()},
            "loss is not finite without a head of layer 0 .* or its gradient",
        ),
        ({"loss": lambda m, b: losses(m, b).detach()}, "loss does not depend on the heads"),
        (
            {"loss": lambda m, b: (1 + factor) * losses(m, b).detach()},
            "loss does not depend on the heads of the model; compute it from",
        ),
        (
            {"loss": lambda m, b: losses(m, b).sum() + m(b["input_ids"][:1])[0].sum()},
            r"loss runs layers on batches of \[1, 3\] examples",
        ),
        ({"loss": lambda m, b: torch.ones(())}, "loss ran no layer that has heads"),
        ({"loss": lambda m, b: m(**b)[0].sum() * 0, "method": "leave_one_out"}, "loss is the same w"),
        of=partial(importance, ours, [arguments], loss=losses),
        unchanged=[ours],
    )


@pytest.mark.parametrize("on_a_thread", [False, True])
def test_layers_that_run_again_in_the_backward_pass(on_a_thread: bool) -> None:
    """As GPUs do, the backward pass may run on another thread."""
    model = hk.integrations.transformers.use(build("llama"))
    arguments = {**batch(model), "use_cache": False}
    expected = importance(model, [arguments], losses, method="gradient").scores
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def backward(*arguments: Any, **options: Any) -> Any:
        return ThreadPoolExecutor(1).submit(torch_grad, *arguments, **options).result()

    torch_grad = torch.autograd.grad
    with mock.patch("torch.autograd.grad", backward if on_a_thread else torch_grad):
        found = importance(model, [arguments], losses, method="gradient")
    assert_alike(found.scores, expected)
