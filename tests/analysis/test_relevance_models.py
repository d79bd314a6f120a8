"""Layer-wise relevance propagation in models of transformers and in an encoder-decoder of our modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import heads_kernels as hk
from heads_kernels.analysis import relevance
from tests.analysis.jacobian_relevance import by_jacobian, by_rows
from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")
from tests.support.tiny_models import batch, build

use = hk.integrations.transformers.use
EXAMPLE = Path(__file__).parents[2] / "examples" / "translation"


def token_two(model: Any, arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the model says of the third token, which is real in `batch`, and its absolute value as relevance."""
    values = model(**arguments)[0][:, 2]
    return values, values.abs()


# ---------------------------------------------------------------------- GPT-2, layer by layer
def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[H, T, D]` or `[T, D]`."""
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def parts_and_heads(attention: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Query, key and value `[3, H, T, D]` of the input `[T, E]`, and what the output projection reads."""
    parts = attention.c_attn(x).view(len(x), 3, attention.num_heads, -1).permute(1, 2, 0, 3)
    return parts, causal(*parts).transpose(0, 1).flatten(1)


def causal_by_jacobian(attention: Any, x: Tensor, given: Tensor, full: bool) -> tuple[Tensor, Any]:
    """What the normed input `[T, E]` of a layer of GPT-2 gets, and the relevance of its heads."""
    parts, heads = parts_and_heads(attention, x)
    [of_heads] = by_rows(attention.c_proj, [heads], given)
    of_heads = of_heads.view(len(x), attention.num_heads, -1).transpose(0, 1)  # [H, T, D]
    found = torch.zeros_like(parts)
    for h in range(attention.num_heads):
        if full:
            found[:, h] = torch.stack(by_jacobian(causal, list(parts[:, h]), of_heads[h]))
        else:
            q, k, v = parts[:, h]
            found[2, h] = by_jacobian(lambda v, q=q, k=k: causal(q, k, v), [v], of_heads[h])[0]
    [of_input] = by_rows(attention.c_attn, [x], found.permute(2, 0, 1, 3).flatten(1))
    return of_input, of_heads.sum((1, 2))


def gpt2_by_jacobian(model: Any, ids: Tensor, step: int, full: bool) -> list[Tensor]:
    """The relevance of the heads of each layer for the word that comes after `ids[step]`, normalised."""
    body = model.transformer
    x = body.wte(ids) + body.wpe.weight[: len(ids)]
    states = []
    for block in body.h:
        attended = x + block.attn.c_proj(parts_and_heads(block.attn, block.ln_1(x))[1])
        hidden = block.mlp.act(block.mlp.c_fc(block.ln_2(attended)))
        states.append((x, attended, hidden))
        x = attended + block.mlp.c_proj(hidden)
    normed = body.ln_f(x)
    logits = model.lm_head(normed)
    given = torch.zeros_like(logits)
    given[step, logits[step].argmax()] = 1
    [given] = by_rows(model.lm_head, [normed], given)
    [given] = by_rows(body.ln_f, [x], given)
    found = []
    for block, (before, attended, hidden) in reversed(list(zip(body.h, states, strict=True))):
        beside, given = by_rows(torch.add, [attended, x - attended], given)
        [given] = by_rows(block.mlp.c_proj, [hidden], given)
        [given] = by_rows(block.mlp.c_fc, [block.ln_2(attended)], given)
        [given] = by_rows(block.ln_2, [attended], given)
        beside, given = by_rows(torch.add, [before, attended - before], given + beside)
        given, heads = causal_by_jacobian(block.attn, block.ln_1(before), given, full)
        [given] = by_rows(block.ln_1, [before], given)
        found.append(heads / heads.sum())
        given, x = given + beside, before
    return found[::-1]


@pytest.mark.parametrize("attention", ["constant", "full"])
def test_gpt2_layer_by_layer_and_step_by_step(attention: str) -> None:
    model = build("gpt2").double()
    ids = torch.tensor([5, 9, 3])
    with torch.no_grad():
        each = [gpt2_by_jacobian(model, ids, step, attention == "full") for step in range(3)]
    expected = torch.stack([torch.stack(of_step) for of_step in each]).mean(0)
    found = relevance(use(model), [{"input_ids": ids[None]}], attention=attention)
    assert_alike(found.table(), expected)
    assert found.kinds == ("decoder", "decoder")


# ---------------------------------------------------------------------- padding
POSITIONS = (
    "bert",
    "gpt2",
    "albert",
)  # of their tokens, counted from the first column if nobody gives them


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("distilbert", False),
        *((name, left) for name in (*POSITIONS, "llama") for left in (False, True)),
    ],
)
def test_padding_changes_nothing(name: str, left: bool) -> None:
    model = use(build(name))
    rows = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(3))

    def scores(model: Any, arguments: dict[str, Tensor]) -> Any:
        values = model(**arguments)[0]
        real = arguments["attention_mask"][..., None]
        return values, F.one_hot(values.argmax(-1), values.shape[-1]) * real.to(values.dtype)

    padded, real = rows.clone(), torch.ones_like(rows)
    padded[1, 4:] = real[1, 4:] = 0
    arguments = {"input_ids": padded, "attention_mask": real}
    if left:
        arguments = {key: torch.stack((x[0], x[1].roll(2))) for key, x in arguments.items()}
        if name in POSITIONS:
            arguments["position_ids"] = (arguments["attention_mask"].cumsum(1) - 1).clamp(min=0)
    whole = relevance(model, [arguments], scores).table()
    alone = [
        relevance(
            model, [{"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}], scores
        )
        for ids in (rows[0], rows[1, :4])
    ]
    expected = (6 * alone[0].table() + 4 * alone[1].table()) / 10
    assert_alike(whole, expected, dtype=torch.float32)
    if name in ("gpt2", "llama"):  # the same steps by default
        assert_alike(relevance(model, [arguments]).table(), whole)


def test_a_mask_that_differs_by_row_goes_by_sdpa() -> None:
    model, arguments = use(build("bert")), batch(build("bert"))
    arguments["attention_mask"][2] = 1
    expected = relevance(model, [arguments], token_two).table()
    real = arguments["attention_mask"]
    dense = (real[:, None, None, :] > 0).expand(-1, 1, 9, -1).clone()
    dense[:, :, 8, 8] = True  # a row that nothing rests on
    found = relevance(model, [arguments | {"attention_mask": dense}], token_two).table()
    assert_alike(found, expected, dtype=torch.float32)
    hk.heads.close(model, {0: [1]})
    found = relevance(model, [arguments | {"attention_mask": dense}], token_two).table()
    assert found[0, 1] == 0


# ---------------------------------------------------------------------- families
FAMILIES = (
    "albert", "bert", "distilbert", "electra", "modernbert", "roberta", "vit", "bart", "marian", "t5", "gemma3_text",
    "gpt2", "llama", "mistral", "qwen3", "starcoder2", "step3p7_text",
)  # fmt: skip


def hooks_of(model: Any) -> list[list[int]]:
    """The forward hooks of all modules; a model in use has some of its own."""
    return [list(module._forward_hooks) for module in model.modules()]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ["constant", "full"])
def test_families(name: str, attention: str) -> None:
    model = use(build(name))
    hooks = hooks_of(model)
    found = relevance(model, [batch(model)], token_two, attention=attention)
    for scores in found.scores:
        assert scores.min() > 0
        assert scores.sum().item() == pytest.approx(1)
    assert hooks_of(model) == hooks


@pytest.mark.parametrize(("name", "function"), [("mixtral", "div_")])
def test_families_that_are_refused(name: str, function: str) -> None:
    model = use(build(name))
    hooks = hooks_of(model)
    with pytest.raises(ValueError, match=f"model computes {function}, "):
        relevance(model, [batch(model)], token_two)
    assert hooks_of(model) == hooks


def test_a_stock_model_is_refused() -> None:
    model = build("bert", "sdpa")
    with pytest.raises(
        ValueError, match=r"call hk\.integrations\.transformers\.use\(model\) first"
    ):
        relevance(model, [batch(model)], token_two)


def test_bfloat16() -> None:
    model = use(build("bert"))
    expected = relevance(model, [batch(model)], token_two).table()
    found = relevance(model.bfloat16(), [batch(model)], token_two).table()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)


def test_pruned_and_closed() -> None:
    model = use(build("bert"))
    hk.heads.prune(model, {0: [0, 2], 1: [0, 1, 2, 3]})
    found = relevance(model, [batch(model)], token_two)
    assert [len(each) for each in found.scores] == [2, 0]
    hk.heads.close(model, {0: [1]})
    assert relevance(model, [batch(model)], token_two).scores[0].tolist() == pytest.approx([1, 0])


# ---------------------------------------------------------------------- an encoder-decoder of our modules
@pytest.fixture
def translator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLE)
    torch.manual_seed(0)
    yield importlib.import_module("transformer").Translator(20, 20, 9, width=16, layers=2).eval()
    for path in EXAMPLE.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_steps_of_an_encoder_decoder(translator: Any) -> None:
    source = torch.tensor([[5, 6, 7, 8, 2], [9, 4, 2, 0, 0]])
    target = torch.tensor([[1, 5, 6, 7], [1, 8, 0, 0]])
    found = relevance(translator, [(source, target)])
    assert found.kinds == ("encoder",) * 2 + ("decoder", "cross") * 2
    alone = [
        relevance(translator, [(source[:1], target[:1])]),
        relevance(translator, [(source[1:, :3], target[1:, :2])]),
    ]
    expected = (4 * alone[0].table() + 2 * alone[1].table()) / 6
    assert_alike(found.table(), expected, dtype=torch.float32)
    sums = found.table().sum(1)
    assert_alike(sums, torch.ones_like(sums), dtype=torch.float32)


def test_converted_heads_keep_their_relevance() -> None:
    model = use(build("gpt2"))
    expected = relevance(model, [batch(model)], token_two).table()
    hk.convert.collaborate(model, dim=32, progress=False)
    found = relevance(model, [batch(model)], token_two).table()
    assert_alike(found, expected, dtype=torch.float32)


def test_t5_in_half_precision_clamps_its_hidden_states() -> None:
    model = use(build("t5")).half()
    found = relevance(model, [batch(model)], token_two).table()
    torch.testing.assert_close(found.sum(1), torch.ones(len(found)).double(), rtol=0, atol=1e-2)
