"""Outputs of heads that are replaced or recorded while a model runs."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations, repeat
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.analysis import AttentionCall
from heads_kernels.heads.layouts import LAYOUTS
from tests.support.alike import assert_alike
from tests.support.nn_layers import HOUSE, House, model_and_run
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, build, outputs

#: Two stacks, a layer that runs twice, fused projections, grouped heads, relative biases, output gates.
FAMILIES = ["albert", "bart", "bert", "gpt2", "llama", "qwen3_next", "t5", "vit"]


def by_hand(layer: Any, head: int, new: Callable[[Tensor], Tensor]) -> Any:
    """A hook that replaces the features `[B, T, Dv]` of a head in the input of the output projection."""
    features = layer.output.features([head])

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = args[0].clone()
        given[..., features] = new(given[..., features])
        return (given, *args[1:])

    return layer.output.linear.register_forward_pre_hook(hook)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_a_hook_by_hand_gives(family: str) -> None:
    model = hk.integrations.transformers.use(build(family))
    whole = outputs(model)
    layers = hk.heads.projected_layers(model)
    with torch.no_grad(), hk.heads.outputs(model) as recorded:
        outputs(model)
    for number, layer in enumerate((layers[0], layers[-1])):
        head = layer.num_heads - 1 - number
        (*_, own) = recorded[layer.index]
        assert own.shape[2:] == (layer.num_heads, layer.value_dim)
        new = torch.randn_like(own[:, :, head])
        shape = (*new.shape[:-1], -1)
        hook = by_hand(layer, head, lambda given, new=new: new.reshape(given.shape))
        expected = outputs(model)
        hook.remove()
        with hk.heads.patch(model, {layer.name: {head: new.view(shape)}}):
            assert_alike(outputs(model), expected, dtype=torch.float32)
        assert (expected - whole).abs().max() > 0
        assert_alike(outputs(model), whole)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_zero_is_a_closed_head_of_a_pruned_model_too(family: str) -> None:
    """Of a layer that is named by index and by name."""
    model = hk.integrations.transformers.use(build(family))
    hk.heads.prune(model, {0: [1]})
    hk.heads.close(model, {0: [0, 1], 1: [2]})
    expected = outputs(model)
    hk.heads.reopen(model)
    name = hk.heads.attention_layers(model)[0].name
    with hk.heads.patch(model, {0: {0: "zero"}, name: {1: "zero"}, 1: {2: "zero"}}):
        assert_alike(outputs(model), expected, dtype=torch.float32)


@pytest.mark.parametrize(("name", "layer"), [("bert", 0), ("bart", "decoder.layers.1.encoder_attn")])
def test_the_mean_is_that_of_real_rows(name: str, layer: Any) -> None:
    """For encoder-decoder attention they are the decoder's rows."""
    model = hk.integrations.transformers.use(build(name))
    given = batch(model)
    real = given.get("decoder_attention_mask", given["attention_mask"]).bool()
    assert not real.all()
    with torch.no_grad(), hk.heads.outputs(model, [layer]) as recorded:
        model(**given)
    [[heads]] = recorded.values()
    mean = heads[:, :, 1][real].mean(0)
    with torch.no_grad():
        with hk.heads.patch(model, {layer: {1: mean}}):
            expected = model(**given).last_hidden_state
        with hk.heads.patch(model, {layer: {1: "mean"}}):
            found = model(**given).last_hidden_state
    assert_alike(found[real], expected[real], dtype=torch.float32)


@pytest.mark.parametrize("kind", ["slice", "row", "batch"])
def test_chosen_rows(kind: str) -> None:
    model, run = model_and_run()
    inside = torch.zeros(2, 5, dtype=torch.bool)
    inside[1 if kind == "batch" else slice(None), 1:3] = True
    rows = {"slice": slice(1, 3), "row": inside[0], "batch": inside}[kind]
    layer = hk.heads.projected_layers(model)[0]
    hook = by_hand(layer, 2, lambda own: own.masked_fill(inside[..., None], 0.0))
    expected = run()
    hook.remove()
    with hk.heads.patch(model, {0: {2: "zero"}}, rows):
        assert_alike(run(), expected, dtype=torch.float32)


def test_gradients_pass_through_replacements() -> None:
    model, run = model_and_run()
    new = torch.randn(4, requires_grad=True)
    layer = hk.heads.projected_layers(model)[0]
    with hk.heads.outputs(model) as recorded, hk.heads.patch(model, {0: {1: new, 3: "mean"}}):
        run().square().sum().backward()
    assert recorded[0][0].shape == (2, 5, 4, 4)
    assert new.grad.abs().min() > 0
    rows = layer.value.linear.weight.grad.view(4, 4, 16).abs().amax((1, 2))
    assert rows[1] == 0  # its values reach nothing
    assert (rows[[0, 2, 3]] > 0).all()


def test_blocks_are_nested_and_end() -> None:
    model, run = model_and_run()
    whole = run()
    ones = torch.ones(4)
    with hk.heads.patch(model, {0: {1: ones}}):
        outer = run()
        with hk.heads.patch(model, {0: {1: "zero", 2: ones}}):
            inner = run()
        assert_alike(run(), outer)
    with hk.heads.patch(model, {0: {1: "zero", 2: ones}}):
        assert_alike(run(), inner)
    assert min((a - b).abs().max() for a, b in combinations((whole, outer, inner), 2)) > 1e-3
    with pytest.raises(ZeroDivisionError), hk.heads.patch(model, {0: {1: ones}}):
        raise ZeroDivisionError
    assert_alike(run(), whole)
    assert all(module.__dict__.get("observer") is None for module in model.modules())


def test_blocks_may_end_in_any_order_and_on_any_thread() -> None:
    """As generators that were begun in them."""
    model, run = model_and_run()
    whole, none = run(), (None, None, None)
    first, second = (hk.heads.patch(model, {0: {head: "zero"}}) for head in (1, 2))
    first.__enter__()
    second.__enter__()
    run()
    ThreadPoolExecutor(1).submit(first.__exit__, *none).result()
    found = run()
    second.__exit__(*none)
    assert_alike(run(), whole)
    with hk.heads.patch(model, {0: {2: "zero"}}):
        assert_alike(run(), found)
    assert (found - whole).abs().max() > 1e-3


def test_a_block_acts_on_its_own_thread() -> None:
    model, run = model_and_run()

    def patched(heads: Any, barrier: threading.Barrier) -> Tensor:
        with hk.heads.patch(model, heads):
            barrier.wait()
            found = run()
            barrier.wait()
        return found

    heads = ({}, {0: {0: "zero"}}, {1: {1: "zero"}})
    expected = [patched(each, threading.Barrier(1)) for each in heads]
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(patched, heads, repeat(threading.Barrier(3, timeout=60)))
    assert_alike([*found], expected)
    assert min((a - b).abs().max() for a, b in combinations(expected, 2)) > 1e-3


class Own(House):
    """Between the call of its observer and the change, `meanwhile` runs.

    If it is `silent`, it does not call its observer; if it is `deaf`, it changes nothing.
    """

    observer, meanwhile, silent, deaf = None, None, False, False

    def forward(self, x: Tensor) -> Tensor:
        operands, observer = self.operands(x), None if self.silent else self.observer
        change = observer and observer(AttentionCall.of(hk.gated_attention, *operands))
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        heads = hk.gated_attention(*operands).transpose(1, 2)
        return heads if change is None or self.deaf else change(heads)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("heads_kernels.heads.layouts.LAYOUTS", dict(LAYOUTS))
    hk.heads.register_layout("Own", HOUSE)
    return nn.Sequential(Own())


def test_a_pass_of_another_thread_between_a_call_and_its_change(own: Any) -> None:
    x, ended = torch.randn(2, 5, 32), []
    whole = own(x)
    with hk.heads.patch(own, {0: {0: "zero"}}):
        own[0].meanwhile = lambda: ended.append(ThreadPoolExecutor(1).submit(own, x).result())
        patched = own(x)
    assert_alike(ended[0], whole)
    assert_alike(patched[:, :, 1:], whole[:, :, 1:])
    assert not patched[:, :, 0].any()


def test_a_block_of_another_thread_that_begins_within_a_pass(own: Any) -> None:
    x, block = torch.randn(2, 5, 32), hk.analysis.observe(own, lambda *_: None)
    whole = own(x)
    own[0].register_forward_hook(lambda *_: None)
    own[0].meanwhile = lambda: ThreadPoolExecutor(1).submit(block.__enter__).result()
    assert_alike(own(x), whole)
    block.__exit__(None, None, None)


def test_a_block_that_ends_while_another_begins(own: Any) -> None:
    """As when the garbage collector ends a generator that was given up."""
    model, ended = nn.Sequential(own[0], Own()), []
    given_up, block = (hk.analysis.observe(model, print, [layer]) for layer in (0, 1))
    given_up.__enter__()
    register = model[1].register_forward_hook

    def ending(hook: Any) -> Any:
        ended.append(given_up.__exit__(None, None, None))
        return register(hook)

    model[1].register_forward_hook = ending
    thread = threading.Thread(target=block.__enter__, daemon=True)
    thread.start()
    thread.join(60)
    assert ended
    assert not thread.is_alive()
    block.__exit__(None, None, None)
    assert all(module.observer is None for module in model)


def test_a_pass_after_one_that_failed(own: Any) -> None:
    x = torch.randn(2, 5, 32)
    with hk.analysis.observe(own, lambda *_: None):
        own[0].meanwhile = mock.Mock(side_effect=KeyError)
        with pytest.raises(KeyError), hk.heads.patch(own, {0: {0: "zero"}}):
            own(x)
        own(x)


def patched(model: Any, run: Callable[[], Any], heads: Any, rows: Any = None) -> None:
    with hk.heads.patch(model, heads, rows):
        run()


def test_what_is_refused(own: Any) -> None:
    model, run = model_and_run()
    x, zero = torch.randn(2, 5, 16), {0: "zero"}
    assert_refused(
        (({0: {4: "zero"}},), "heads of layer 0 .* has head 4; it has heads 0 to 3"),
        (({2: zero},), "heads names layer 2"),
        (({0: {0: "median"}},), TypeError, r"heads\[0\]\[0\] is 'median'"),
        (({0: {0: 1.0}},), TypeError, r"heads\[0\]\[0\] is 1.0"),
        (({0: {0: torch.ones(4).int()}},), TypeError, r"heads\[0\]\[0\] is a tensor of torch.int32"),
        (({0: [0]},), TypeError, r"heads\[0\] is a list"),
        (([0],), TypeError, "heads is a list"),
        (({0: {0: torch.ones(5)}},), r".*head 0 is replaced by a tensor of shape \[5\]"),
        (({0: zero}, [0, 1]), TypeError, "rows is a list"),
        (({0: zero}, slice(None, None, -1)), TypeError, r"rows is slice\(None, None, -1\); pass a slice of ints"),
        (({0: {0: [0.0] * 16}},), TypeError, r"heads\[0\]\[0\] is a list"),
        (({0: zero}, torch.ones(4, dtype=torch.bool)), r"rows has shape \[4\]"),
        of=partial(patched, model, run),
        unchanged=[model],
    )
    stock, silent, own[0].deaf = build("bert"), nn.Sequential(Own()), True
    silent[0].silent = True
    assert_refused(
        ((model, lambda: model.layers[0](x), {0: zero, 1: zero}), r".*layer 1 \('layers.1'\) did not run in the block"),
        ((own, lambda: own(x.repeat(1, 1, 2)), {0: zero}), ".*is a Own, which does not change the outputs"),
        ((silent, lambda: silent(x.repeat(1, 1, 2)), {0: zero}), r"layer 0 \('0'\) is a Own, which does not call"),
        ((stock, lambda: outputs(stock), {0: zero}), r".*call .*use\(model\) first"),
        of=patched,
        unchanged=[model, stock],
    )


def test_checkpointed_activations_are_refused() -> None:
    model, heads = hk.integrations.transformers.use(build("bert")).train(), {0: {0: "zero"}}
    model.gradient_checkpointing_enable()
    assert_refused(
        (hk.heads.patch(model, heads).__enter__, "checkpoints activations"),
        (hk.heads.outputs(model).__enter__, "checkpoints activations"),
        unchanged=[model],
    )
    patched(model.eval(), lambda: outputs(model), heads)
