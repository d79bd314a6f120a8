"""Importance of heads, against derivatives by explicit factors in stock models and by heads cut out of the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.analysis.importance_formulas import (
    REDUCED,
    by_name,
    derivatives,
    embeddings,
    losses,
    pair,
    sums,
)
from tests.support.alike import assert_alike
from tests.support.tiny_models import batch, build

use = hk.integrations.transformers.use
importance = hk.analysis.importance

LOSSLESS = ("gradient", "fisher", "leave_one_out")
#: Of the norms of stock models in float64.
NORMS = torch.float32
#: Families: padding, a causal model, position biases, an encoder-decoder, layers that run twice, grouped heads.
FAMILIES = ["bert", "distilbert", "gpt2", "t5", "bart", "albert", "llama"]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_factors_in_stock_attention(family: str) -> None:
    stock, ours, arguments = pair(family)
    expected = derivatives(stock, arguments, losses)
    for reduce, reduced in REDUCED.items():
        found = importance(ours, [arguments], sums, reduce=reduce)
        assert_alike(
            by_name(found), {n: reduced(terms) for n, terms in expected.items()}, dtype=NORMS
        )
        assert found.method == f"gradient by {reduce}"
    fisher = importance(ours, [arguments], losses, method="fisher")
    squares = {name: terms.sum(2).square().mean(0) for name, terms in expected.items()}
    assert_alike(by_name(fisher), squares, dtype=NORMS)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_float32_is_as_near_as_its_rounding(family: str) -> None:
    stock, ours, arguments = pair(family)
    expected = {
        name: t.sum(2).abs().mean(0) for name, t in derivatives(stock, arguments, losses).items()
    }
    assert_alike(
        by_name(importance(ours.float(), [arguments], losses)), expected, dtype=torch.float32
    )


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
    for name, scores in by_name(
        found
    ).items():  # 1200 draws of three signs: a tenth is 2 to 3 sigma
        assert (scores - expected[name]).abs().max() < 0.1 * max(1.0, expected[name].max())
    again = importance(ours, many, narrow, method="fisher")
    assert_alike(by_name(again), by_name(found))
    one, same = (
        importance(ours, [arguments], lambda *args, c=column: narrow(*args)[:, c], method="fisher")
        for column in (slice(1), 0)
    )
    assert_alike(by_name(one), by_name(same), dtype=NORMS)


@pytest.mark.parametrize("family", FAMILIES)
def test_leaving_out_is_cutting_columns_of_the_output_projection(family: str) -> None:
    stock, ours, arguments = pair(family)
    found = importance(ours, [arguments], losses, method="leave_one_out")
    squares = importance(ours, [arguments], embeddings, method="leave_one_out")
    with torch.no_grad():
        whole = [objective(stock, arguments) for objective in (losses, embeddings)]
        for index, layer in enumerate(hk.heads.attention_layers(stock)):
            linear = layer.output.linear
            for head in (0, layer.num_heads - 1):
                before = linear.weight.clone()
                columns = linear.weight if type(linear).__name__ == "Conv1D" else linear.weight.T
                columns[layer.output.features([head])] = 0
                change = losses(stock, arguments) - whole[0]
                moved = embeddings(stock, arguments) - whole[1]
                linear.weight.copy_(before)
                assert_alike(found.scores[index][head], change.mean(), dtype=NORMS)
                assert_alike(squares.scores[index][head], moved.square().sum(1).mean(), dtype=NORMS)


# ---------------------------------------------------------------------- confidence
def test_confidence_is_the_mean_of_the_largest_probability_of_real_rows() -> None:
    stock, ours, arguments = pair("bert")
    maps = stock(**arguments, output_attentions=True).attentions
    real = arguments["attention_mask"].bool()
    special = arguments["input_ids"] > 30
    for excluded, keys in (
        (None, torch.zeros_like(special)),
        (list(range(31, 40)), special),
        (lambda batch: batch["input_ids"] > 30, special),
        (lambda batch: {"encoder": batch["input_ids"] > 30}, special),
        (lambda batch: {"cross": batch["input_ids"] > 30}, torch.zeros_like(special)),
    ):
        found = importance(ours, [arguments], method="confidence", exclude_keys=excluded)
        for scores, probabilities in zip(found.scores, maps, strict=True):
            best = probabilities.masked_fill(keys[:, None, None], 0).amax(-1)
            assert_alike(scores, best.transpose(1, 2)[real].mean(0), dtype=NORMS)


def test_token_ids_are_looked_up_in_what_each_kind_of_layer_reads() -> None:
    stock, ours, arguments = pair("bart")
    special = {name: arguments[name] > 30 for name in ("input_ids", "decoder_input_ids")}
    by_function = importance(
        ours,
        [arguments],
        method="confidence",
        exclude_keys=lambda batch: {
            "encoder": special["input_ids"],
            "cross": special["input_ids"],
            "decoder": special["decoder_input_ids"],
        },
    )
    by_ids = importance(ours, [arguments], method="confidence", exclude_keys=range(31, 40))
    assert_alike(by_name(by_ids), by_name(by_function))
    maps = stock(**arguments, output_attentions=True).cross_attentions
    rows = arguments["decoder_attention_mask"].bool()
    best = maps[0].masked_fill(special["input_ids"][:, None, None], 0).amax(-1)
    [first] = [name for name in by_ids.layers if name.endswith("0.encoder_attn")]
    assert_alike(by_name(by_ids)[first], best.transpose(1, 2)[rows].mean(0), dtype=NORMS)
    without = {name: arguments[name] for name in ("input_ids", "attention_mask")}
    with pytest.raises(ValueError, match=r"exclude_keys .*'decoder_input_ids'"):
        importance(ours, [without], method="confidence", exclude_keys=[1])
    with pytest.raises(TypeError, match=r"exclude_keys is \['\[SEP\]'\]; pass token ids"):
        importance(ours, [arguments], method="confidence", exclude_keys=["[SEP]"])


# ---------------------------------------------------------------------- what must not matter
def scores_of(model: Any, data: list[Any]) -> dict[str, dict[str, Tensor]]:
    found = {
        f"{method} {objective.__name__}": by_name(importance(model, data, objective, method=method))
        for method in LOSSLESS
        for objective in (sums, losses, embeddings)
    }
    found["token"] = by_name(importance(model, data, losses, reduce="token"))
    found["confidence"] = by_name(importance(model, data, method="confidence"))
    return found


def test_batches_may_be_cut_anywhere() -> None:
    _, ours, arguments = pair("bert")
    whole = scores_of(ours, [arguments])
    ones = [{name: each[i : i + 1] for name, each in arguments.items()} for i in range(3)]
    cut = [{name: each[s] for name, each in arguments.items()} for s in (slice(0, 2), slice(2, 3))]
    assert_alike(scores_of(ours, ones), whole)
    assert_alike(scores_of(ours, cut), whole)
    by_batch = importance(ours, [arguments], losses, reduce="batch")
    assert by_batch.spearman(importance(ours, ones, losses, reduce="batch")) < 1
    assert_alike(
        by_name(importance(ours, iter(ones), losses, reduce="batch")), whole["gradient losses"]
    )


def test_padding_on_either_side_or_none_gives_the_same() -> None:
    ours = use(build("bert").double())
    ids = torch.randint(3, 40, (2, 5))

    def padded(left: int, right: int) -> dict[str, Tensor]:
        def pad(rows: Tensor, value: int) -> Tensor:
            return nn.functional.pad(rows, (left, right), value=value)

        places = pad(torch.arange(5).expand(2, 5), 7)
        return {
            "input_ids": pad(ids, 33),
            "attention_mask": pad(torch.ones_like(ids), 0),
            "position_ids": places,
        }

    def objective(model: Any, arguments: dict[str, Tensor]) -> Tensor:
        hidden = model(**arguments).last_hidden_state[arguments["attention_mask"].bool()]
        return hidden.view(2, 5, -1)[:, :, :3].square().sum((1, 2))

    def all_rows(model: Any, arguments: dict[str, Tensor]) -> Tensor:
        """Reads padded rows too, those of a layer in the middle by what they do to later ones."""
        return model(**arguments).last_hidden_state.square().sum()

    expected = None
    for sides in ((0, 0), (3, 0), (0, 4), (2, 1)):
        data = [padded(*sides)]
        found = {
            method: by_name(importance(ours, data, objective, method=method))
            for method in (*LOSSLESS, "confidence")
        }
        found["token"] = by_name(importance(ours, data, objective, reduce="token"))
        last = importance(ours, data, all_rows, reduce="token").scores[-1]
        found["last layer"] = {"": last}
        expected = expected or found
        assert_alike(found, expected)


# ---------------------------------------------------------------------- pruned and closed
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_heads_that_are_left_score_as_beside_closed_ones(family: str) -> None:
    _, ours, arguments = pair(family)
    first, second, *_ = hk.heads.attention_layers(ours)
    gone = {first.name: [0, 2], second.name: [0, 1, 2, 3]}
    pruned = copy.deepcopy(ours)
    hk.heads.prune(pruned, gone)
    hk.heads.close(ours, gone)
    for method in (*LOSSLESS, "confidence"):
        closed = by_name(importance(ours, [arguments], losses, method=method))
        left = by_name(importance(pruned, [arguments], losses, method=method))
        if method != "confidence":
            assert (closed[first.name][[0, 2]] == 0).all()
            assert (closed[second.name] == 0).all()
        closed[first.name] = closed[first.name][[1, 3]]
        assert left.pop(second.name).shape == (0,)
        del closed[second.name]
        assert_alike(left, closed, dtype=NORMS)


def test_a_model_without_any_head_is_refused() -> None:
    _, ours, arguments = pair("bert")
    hk.heads.prune(ours, {0: range(4), 1: range(4)})
    for method in (*LOSSLESS, "confidence"):
        with pytest.raises(ValueError, match="model has no heads left in its 2 attention layer"):
            importance(ours, [arguments], losses, method=method)


def test_layers_that_no_pass_reaches_score_nothing() -> None:
    _, ours, arguments = pair("bart")

    def of_memory(model: Any, arguments: dict[str, Tensor]) -> Tensor:
        inputs = {name: arguments[name] for name in ("input_ids", "attention_mask")}
        return model.get_encoder()(**inputs).last_hidden_state.square().sum((1, 2))

    for method in (*LOSSLESS, "confidence"):
        found = importance(ours, [arguments], of_memory, method=method)
        for kind, scores in zip(found.kinds, found.scores, strict=True):
            assert bool(scores.any()) == (kind == "encoder")


# ---------------------------------------------------------------------- afterwards
def test_relevance_is_a_method() -> None:
    model, data = use(build("bert")), [batch(build("bert"))]

    def hidden(model: Any, arguments: Any) -> Tensor:
        values: Tensor = model(**arguments).pooler_output
        return values

    found = importance(model, data, hidden, method="lrp")
    expected = hk.analysis.relevance(model, data, hidden)
    assert found.method == expected.method == "lrp"
    assert_alike(found.scores, expected.scores)


@pytest.mark.parametrize("method", [*LOSSLESS, "confidence"])
@pytest.mark.parametrize("stops", [None, ZeroDivisionError, KeyboardInterrupt])
def test_everything_is_put_back(method: Any, stops: type[BaseException] | None) -> None:
    _, ours, arguments = pair("bert")
    ours.train()
    ours.encoder.layer[1].eval()
    ours.embeddings.requires_grad_(False)
    hk.heads.close(ours, {0: [1]})
    gate = ours.encoder.layer[0].attention.self.head_gate
    modes = [module.training for module in ours.modules()]
    asks = [parameter.requires_grad for parameter in ours.parameters()]
    passes = []

    def objective(model: Any, arguments: dict[str, Tensor]) -> Tensor:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert not model.training
        assert not model.encoder.layer[0].training
        value = losses(model, arguments)
        passes.append(1)
        if stops is not None and len(passes) == 2:
            raise stops
        return value

    if stops is None:
        importance(ours, [arguments] * 2, objective, method=method)
    else:
        with pytest.raises(stops):
            importance(ours, [arguments] * 2, objective, method=method)
    assert [module.training for module in ours.modules()] == modes
    assert [parameter.requires_grad for parameter in ours.parameters()] == asks
    assert all(parameter.grad is None for parameter in ours.parameters())
    assert ours.encoder.layer[0].attention.self.head_gate is gate
    assert not gate._forward_hooks
    assert hk.heads.attention_layers(ours)[1].gate is None
    with hk.analysis.observe(ours, print):  # nothing observes it any more
        pass


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_gradients_are_there_where_the_caller_wants_none(around: Any) -> None:
    _, ours, arguments = pair("bert")
    expected = by_name(importance(ours, [arguments], losses))
    with around():
        assert_alike(by_name(importance(ours, [arguments], losses)), expected)


@pytest.mark.check
@pytest.mark.parametrize("method", ["gradient", "leave_one_out"])
def test_a_bar_is_shown(
    method: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal alone."""
    pytest.importorskip("rich", reason="the bar is drawn by rich")
    _, ours, arguments = pair("bert")
    importance(ours, [arguments], losses, method=method, progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    importance(ours, [arguments], losses, method=method)
    assert capsys.readouterr() == ("", "")
    importance(ours, [arguments], losses, method=method, progress=True)
    assert "importance" in capsys.readouterr().err


# ---------------------------------------------------------------------- bad input
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no loss": ({"loss": None}, r"loss is None, but 'gradient' needs one"),
    "no function": ({"loss": 3}, r"loss is a int; pass a function loss\(model, batch\)"),
    "method": ({"method": "shapley"}, r"method is 'shapley'; use one of 'gradient', 'fisher'"),
    "reduce": ({"reduce": "mean"}, r"reduce is 'mean'; use one of 'token', 'example', 'batch'"),
    "normalise": ({"normalise": "l1"}, r"normalise is 'l1'; use one of None, 'l2'"),
    "reduce elsewhere": ({"method": "fisher", "reduce": "token"}, r"reduce .* 'fisher'; leave it"),
    "keys elsewhere": ({"exclude_keys": [1]}, r"exclude_keys is given, but .* 'gradient'"),
    "a tensor": ({"data": torch.ones(2, 3)}, r"data is a Tensor; pass an iterable of batches"),
    "a batch": ({"data": {"input_ids": 1}}, r"data is a dict; .* \[batch\] for a single one"),
    "empty": ({"data": []}, r"data has no batches"),
    "used up": ({"data": iter(())}, r"data has no batches"),
    "output": ({"loss": lambda m, b: m(**b)}, r"loss gave a BaseModelOutput.*; return a scalar"),
    "integers": ({"loss": lambda m, b: m(**b)[0].argmax()}, r"loss gave a tensor of torch.int64"),
    "tokens": (
        {"loss": lambda m, b: m(**b)[0].flatten(0, 1).sum(1)},
        r"loss gave shape \[27\] for a batch of 3; return a scalar that is the sum",
    ),
    "nan": ({"loss": lambda m, b: losses(m, b) * torch.nan}, r"loss gave NaN or infinity"),
    "nan later": (
        {"loss": lambda m, b: (losses(m, b) - losses(m, b).detach()).sqrt()},
        r"loss is not finite without a head of layer 0 .* or its gradient",
    ),
    "detached": (
        {"loss": lambda m, b: losses(m, b).detach()},
        r"loss does not depend on the heads",
    ),
    "of weights": (
        {"loss": lambda m, b: (m(**b)[0] * 0 + torch.ones(1, requires_grad=True)).detach().sum()},
        r"loss does not depend on the heads of the model",
    ),
    "of others": (
        {"loss": lambda m, b: torch.ones(1, requires_grad=True).sum() + m(**b)[0].sum().detach()},
        r"loss does not depend on the heads of the model; compute it from the model's output",
    ),
    "sizes": (
        {"loss": lambda m, b: losses(m, b).sum() + m(b["input_ids"][:1])[0].sum()},
        r"loss runs layers on batches of \[1, 3\] examples",
    ),
    "not run": ({"loss": lambda m, b: torch.ones(())}, r"loss ran no layer that has heads"),
    "the same": (
        {"loss": lambda m, b: m(**b)[0].sum() * 0, "method": "leave_one_out"},
        r"loss is the same whichever head is left out",
    ),
    "ids": (
        {"method": "confidence", "exclude_keys": 3},
        r"exclude_keys is a int; pass a list of token ids or a function",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    changes, message = BAD[name]
    _, ours, arguments = pair("bert")
    call = {"data": [arguments], "loss": losses} | changes
    with pytest.raises((TypeError, ValueError), match=message):
        importance(ours, call.pop("data"), call.pop("loss"), **call)


def test_a_model_that_is_not_in_use_is_refused() -> None:
    stock, _, arguments = pair("bert")
    for method in (*LOSSLESS, "confidence"):
        with pytest.raises(ValueError, match=r"attention function 'eager' .*use\(model\) first"):
            importance(stock, [arguments], losses, method=method)
    with pytest.raises(ValueError, match=r"model has no attention layer"):
        importance(nn.Linear(2, 2), [torch.ones(1, 2)], losses)
