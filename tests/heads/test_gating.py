"""Gates on the heads of models: attached, taken off, closed for a while; schedules that end with so many open heads."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import model_and_run
from tests.support.refusals import assert_refused
from tests.support.tiny_models import build, outputs


def bert() -> tuple[Any, Callable[[], Tensor]]:
    model = hk.integrations.transformers.use(build("bert"))
    return model, lambda: outputs(model)


def test_close_adds_heads_and_reopen_takes_them_back() -> None:
    """What closed heads compute is in tests/nn/test_modules.py and tests/transformers/test_families.py."""
    model, run = model_and_run()
    whole, names = run(), model.state_dict().keys()
    hk.heads.close(model, {0: [1], "layers.1": [3]})
    hk.heads.close(model, {1: [0]})
    assert hk.heads.closed(model) == {"layers.0": [1], "layers.1": [0, 3]}
    assert (run() - whole).abs().max() > 1e-3
    assert model.state_dict().keys() == names  # nothing to save
    hk.heads.reopen(model)
    assert hk.heads.closed(model) == {}
    assert_alike(run(), whole)


# ---------------------------------------------------------------------- learned gates
@pytest.mark.parametrize("model_of", [model_and_run, bert])
def test_gate_and_ungate(model_of: Callable[[], Any]) -> None:
    model, run = model_of()
    whole = run()
    before = {name for name, _ in model.named_parameters()}
    hk.heads.gate(model, hk.nn.HardConcrete)
    layers = hk.heads.attention_layers(model)
    after = {name for name, _ in model.named_parameters()}
    assert after - before == {f"{layer.name}.head_gate.log_alpha" for layer in layers}
    model.train()
    run().square().mean().backward()
    for layer in layers:
        assert layer.module.head_gate.num_heads == layer.num_heads
        assert layer.module.head_gate.log_alpha.grad is not None
    model.eval()
    hk.heads.reopen(model)  # which removes only what `close` made
    assert hk.heads.closed(model) == {layer.name: [] for layer in layers}
    hk.heads.ungate(model)
    assert {name for name, _ in model.named_parameters()} == before
    assert_alike(run(), whole)


def test_gate_takes_the_layers_that_are_asked_for() -> None:
    model, _ = bert()
    name = "encoder.layer.1.attention.self"
    hk.heads.gate(model, hk.nn.HardConcrete, layers=[name])
    assert list(hk.heads.closed(model)) == [name]
    model.get_submodule(name).head_gate.log_alpha.data[2] = -9.0
    assert hk.heads.closed(model) == {name: [2]}


def test_gates_take_the_mode_of_their_layer_and_leave_out_empty_ones() -> None:
    model, run = model_and_run()
    hk.heads.prune(model, {1: range(4)})
    hk.heads.gate(model.train(), hk.nn.HardConcrete)
    assert model.layers[0].head_gate.training
    assert model.layers[1].head_gate is None
    run()


# ---------------------------------------------------------------------- bad input
def test_bad_input() -> None:
    close, gate, learned = hk.heads.close, hk.heads.gate, hk.nn.HardConcrete
    stock, plain, gated = build("bert", "sdpa"), model_and_run()[0], model_and_run()[0]
    gate(gated, learned, layers=[1])
    gate(gated, lambda H: hk.nn.FixedGate(torch.full((H,), 0.5)), layers=[0])
    one = learned(4)
    use = r"runs the attention function 'sdpa' in layer 0.*transformers\.use\(model\) first"
    assert_refused(
        (lambda: close(stock, {0: [1]}), use),
        (lambda: gate(stock, learned), use),
        (lambda: close(plain, {0: [0], 2: [0]}), "names layer 2; this model has layers 0 to 1: 'layers.0'"),
        (lambda: close(plain, {0: [0], "layers.1": [4]}), "has head 4; it has heads 0 to 3, 4 in all"),
        (lambda: gate(plain, learned, [0, "x"]), "layers names layer 'x'"),
        (lambda: gate(plain, learned, 0), TypeError, "pass a list of layers"),
        (lambda: gate(plain, learned, "layers.0"), TypeError, "pass a list of layers"),
        *((lambda make=make: gate(plain, make), TypeError, r"make is a \w+; pass hk.nn") for make in (one, 4, None)),
        (lambda: gate(plain, nn.Linear), TypeError, "make is the class Linear; pass hk.nn"),
        (lambda: gate(plain, lambda H: nn.Linear(H, H)), TypeError, "make returned a Linear"),
        (lambda: gate(plain, lambda H: learned(H - 1)), "make returned 3 gates for layer 0"),
        (lambda: gate(plain, lambda _: one), "returned the same gate for layer 1 .* as for layer 0"),
        (lambda: close(gated, {1: [0]}), "layer 1 .*has a HardConcrete that close would overwrite"),
        (lambda: close(gated, {0: [0]}), "layer 0 .*has a FixedGate that close would overwrite"),
        (lambda: gate(gated, learned), "layer 0 .*has a FixedGate already.*ungate"),
        unchanged=[stock, plain, gated],
    )


def test_inference_mode_leaves_models_that_train() -> None:
    model, run = model_and_run()
    with torch.inference_mode():
        hk.heads.close(model, {0: [0], 1: [1]})
        hk.heads.prune(model, {0: [0]})
        hk.heads.gate(model, hk.nn.HardConcrete, layers=[0])
    hk.heads.close(model, {1: [2]})
    model.train()
    run().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ---------------------------------------------------------------------- schedules
LAYERS, HEADS = 3, 4


class Planted(nn.Module):
    """Closing head h of layer l costs `values[l, h]`: what is best to keep is known."""

    def __init__(self, log_alpha: float = 2.0) -> None:
        super().__init__()
        self.gates = nn.ModuleList(hk.nn.HardConcrete(HEADS, log_alpha=log_alpha) for _ in range(LAYERS))
        values = 0.01 * 1.5 ** torch.arange(LAYERS * HEADS)  # 0.01 to 0.86
        order = torch.randperm(LAYERS * HEADS, generator=torch.Generator().manual_seed(3))
        self.register_buffer("values", values[order].view(LAYERS, HEADS))
        self.weight = nn.Parameter(torch.ones(()))  # what trains on when the gates are settled

    def loss(self) -> Tensor:
        gates = torch.stack([gate(1, 1) for gate in self.gates])
        return (self.values * (1 - gates)).sum() + self.weight.square()

    def exported(self) -> Tensor:
        return torch.stack([gate.export() for gate in self.gates])


def train(model: Planted, schedule: hk.heads.GateSchedule, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        (model.loss() + schedule.penalty()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@pytest.mark.parametrize("k", [0, 1, 6])
def test_ends_with_exactly_k_heads_those_of_most_value(k: int) -> None:
    model = Planted()
    schedule = hk.heads.GateSchedule(model, open_heads=k, steps=300)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, schedule, optimizer, 300)
    assert abs(hk.nn.expected_open(model).item() - k) < 2.5  # before anything is forced
    schedule.finish()
    is_open = model.exported() == 1
    assert int(is_open.sum()) == k
    assert int((model.exported() == 0).sum()) == LAYERS * HEADS - k
    best = model.values.flatten().sort(descending=True).values
    assert (model.values[is_open] >= best[: k + 1].min()).all()  # noise may swap neighbours

    train(model, schedule, optimizer, 20)  # the optimiser's momentum moves nothing any more
    assert torch.equal(model.exported() == 1, is_open)


def test_finish_ranks_by_log_alpha() -> None:
    def finished(**options: Any) -> list[list[float]]:
        model = Planted()
        with torch.no_grad():
            for index, gate in enumerate(model.gates):
                gate.log_alpha.copy_(torch.tensor([0.0, 3.0, 1.0, 2.0]) - 10 * index)
        hk.heads.GateSchedule(model, steps=1, **options).finish()
        return model.exported().tolist()

    nothing, second = [0, 0, 0, 0], [0, 1, 0, 0]
    assert finished(open_heads=3) == [[0, 1, 1, 1], nothing, nothing]
    assert finished(open_heads=5) == [[1, 1, 1, 1], second, nothing]
    equal = Planted()  # taken in order
    hk.heads.GateSchedule(equal, open_heads=5, steps=1).finish()
    assert equal.exported().tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], nothing]


def test_penalty_and_multipliers_are_the_augmented_lagrangian() -> None:
    model = Planted(log_alpha=0.0)
    schedule = hk.heads.GateSchedule(model, open_heads=2, steps=10, warmup=0.4, rate=0.5)
    n, lambda_1, lambda_2 = hk.nn.expected_open(model).item(), 0.0, 0.0
    for target in (12.0, 9.5, 7.0, 4.5, 2.0, 2.0, 2.0):
        assert schedule.target.item() == pytest.approx(target)
        excess = n - target
        expected = lambda_1 * excess + lambda_2 * excess**2
        assert schedule.penalty().item() == pytest.approx(expected, rel=1e-5)
        schedule.step()
        lambda_1 += 0.5 * excess / 12
        lambda_2 += 0.5 * (excess / 12) ** 2
    assert schedule.lambda_1.item() == pytest.approx(lambda_1, rel=1e-5)
    assert schedule.lambda_2.item() == pytest.approx(lambda_2, rel=1e-5)

    schedule.penalty().backward()
    slope = lambda_1 + 2 * lambda_2 * (n - 2)
    p = n / 12
    expected_slope = torch.full((HEADS,), slope * p * (1 - p))
    assert_alike(model.gates[0].log_alpha.grad, expected_slope)


def test_resuming_goes_on_to_the_bit() -> None:
    def trained(model: Planted, schedule: hk.heads.GateSchedule, seed: int) -> None:
        torch.manual_seed(seed)
        train(model, schedule, torch.optim.SGD(model.parameters(), lr=0.5), 30)

    model, again = Planted(), Planted()
    schedule, resumed = (hk.heads.GateSchedule(each, open_heads=4, steps=60) for each in (model, again))
    trained(model, schedule, seed=0)
    saved = schedule.state_dict()
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    trained(model, schedule, seed=1)
    trained(again, resumed, seed=1)
    assert torch.equal(schedule.lambda_1, resumed.lambda_1)
    assert torch.equal(schedule.lambda_2, resumed.lambda_2)
    assert torch.equal(model.gates[0].log_alpha, again.gates[0].log_alpha)
    assert saved["_extra_state"] == 30  # a snapshot
    assert not torch.equal(saved["lambda_1"], schedule.lambda_1)


class ByKind(nn.Module):
    """Attention of two kinds: two layers that see both sides, one that is causal."""

    def __init__(self, gated: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(hk.nn.GatedMultiheadAttention(8, 4) for _ in range(3))
        self.layers[2].is_causal = True
        for layer in self.layers:
            layer.head_gate = hk.nn.HardConcrete(4) if gated else None


def test_counts_by_kind() -> None:
    def settled(open_heads: Mapping[str, int]) -> list[int]:
        model = ByKind()
        schedule = hk.heads.GateSchedule(model, open_heads=open_heads, steps=4)
        assert schedule.lambda_1.shape == (len(open_heads),)
        for _ in range(4):
            schedule.penalty().backward()
            schedule.step()
        schedule.finish()
        return [int((layer.head_gate.export() == 1).sum()) for layer in model.layers]

    assert settled({"encoder": 5, "decoder": 1}) == [4, 1, 1]
    assert settled({"decoder": 3}) == [0, 0, 3]  # the encoder's gates stay as they were, 0.957
    model = ByKind()
    schedule = hk.heads.GateSchedule(model, open_heads={"decoder": 1}, steps=2, warmup=0)
    assert schedule.target.item() == 1  # without a warm-up at once
    schedule.step()
    schedule.penalty().backward()
    assert [layer.head_gate.log_alpha.grad is None for layer in model.layers] == [True, True, False]


def test_a_gate_that_layers_share_counts_once() -> None:
    model = ByKind()
    model.layers[1].head_gate = model.layers[0].head_gate
    hk.heads.GateSchedule(model, open_heads={"encoder": 2}, steps=1).finish()
    assert model.layers[0].head_gate.export().tolist() == [1, 1, 0, 0]

    model.layers[2].head_gate = model.layers[0].head_gate  # of another kind: it would be settled twice
    words = r"open_heads counts kinds, but layer 0 .* and layer 2 .*'encoder' and 'decoder', share a gate"
    assert_refused(({"open_heads": {"encoder": 2}}, words), of=partial(hk.heads.GateSchedule, model, steps=1))
    model.cross_attn = hk.nn.GatedMultiheadAttention(8, 4)
    model.cross_attn.head_gate = hk.nn.HardConcrete(4)
    hk.heads.GateSchedule(model, open_heads={"cross": 1}, steps=1)  # the others are not changed
    hk.heads.GateSchedule(model, open_heads=2, steps=1).finish()
    assert model.layers[2].head_gate.export().tolist() == [1, 1, 0, 0]


def test_bad_schedules() -> None:
    schedule_of = partial(hk.heads.GateSchedule, steps=10)
    assert_refused(
        ({"steps": 0}, "steps is 0; pass an int of at least 1"),
        ({"warmup": 1.5}, r"warmup is 1\.5; pass a share of the steps"),
        ({"rate": 0}, "rate is 0; pass a float above 0"),
        ({"open_heads": 13}, "open_heads is 13; pass an int from 0 to 12"),
        ({"open_heads": 6.0}, r"open_heads is 6\.0"),
        ({"open_heads": {"cross": 1}}, r"open_heads is \{'cross': 1\}; the kinds .* 'encoder'\]"),
        ({"open_heads": {"decoder": 5}}, "open_heads is 5; pass an int from 0 to 4"),
        of=partial(schedule_of, ByKind(), open_heads=4),
    )
    assert_refused(
        ({"open_heads": 3}, "model is a ByKind without HardConcrete"),
        ({"open_heads": {"encoder": 3}}, r"open_heads .* are \[\]"),
        of=partial(schedule_of, ByKind(gated=False)),
    )
    schedule, two = schedule_of(ByKind(), open_heads=3), schedule_of(ByKind(), open_heads={"encoder": 1, "decoder": 1})
    with pytest.raises(RuntimeError, match="size mismatch for lambda_1"):
        schedule.load_state_dict(two.state_dict())
