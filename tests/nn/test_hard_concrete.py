"""Hard Concrete gates against the tables and formulas of the papers, written out here once more, and in a model."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused

#: Where half of the samples are open.
HALF = -0.33 * math.log(11)


def gates_at(*log_alpha: float, **options: Any) -> hk.nn.HardConcrete:
    """Gates with these `log_alpha`, in float64."""
    gate = hk.nn.HardConcrete(len(log_alpha), **options).double()
    with torch.no_grad():
        gate.log_alpha.copy_(torch.tensor(log_alpha, dtype=torch.float64))
    return gate


# ---------------------------------------------------------------------- the papers
@pytest.mark.parametrize(
    ("log_alpha", "zero", "one", "mean"),
    [
        (-3.0, 0.901, None, 0.0),
        (-2.398, 0.833, None, 0.0),
        (-1.0, 0.552, None, 0.223),
        (0.0, 0.312, 0.312, 0.5),
        (1.0, None, 0.552, 0.777),
        (2.0, None, 0.770, 0.957),
        (5.0, None, 0.985, 1.0),
    ],
)
def test_table_of_the_default_constants(log_alpha: float, zero: float | None, one: float | None, mean: float) -> None:
    gate = gates_at(log_alpha)
    found = 1 - gate.probability_open(), gate.probability_one(), gate.export()
    for value, expected in zip(found, (zero, one, mean), strict=True):
        assert expected is None or round(value.item(), 3) == expected
    if abs(log_alpha) > math.log(11):  # clamped, not merely rounded
        assert gate.export().item() == (log_alpha > 0)


def test_defaults_and_initial_values() -> None:
    gate = hk.nn.HardConcrete(8)
    assert (gate.temperature, gate.stretch) == (0.33, (-0.1, 1.1))
    assert gate.log_alpha.tolist() == [2.0] * 8
    assert gate.closed_grad is False
    assert hk.nn.HardConcrete(8, straight_through=True).closed_grad is True
    assert hk.nn.HardConcrete.louizos(8).temperature == 2 / 3
    many = hk.nn.HardConcrete(4096, log_alpha="voita").log_alpha
    assert many.abs().max() <= math.sqrt(3 / 4096)
    assert many.std().item() == pytest.approx(math.sqrt(1 / 4096), rel=0.05)
    with torch.device("meta"):
        assert hk.nn.HardConcrete(8, log_alpha="voita").log_alpha.is_meta
        assert not hk.nn.HardConcrete(8, device="cpu").log_alpha.is_meta


# ---------------------------------------------------------------------- sampling
def test_samples_agree_with_the_closed_form() -> None:
    """40,000 draws a head: an estimated probability is within 4.5 standard deviations."""
    draws = 40_000
    gate = gates_at(-3, -1, 0, 1, 2, 5, temperature=2 / 3, per_sample=True)
    sample = gate(draws, 1)
    assert sample.shape == (draws, 6)
    for value, expected in ((0, gate.probability_zero()), (1, gate.probability_one())):
        seen = sample == value
        deviation = (expected * (1 - expected) / draws).sqrt()
        assert ((seen.double().mean(0) - expected).abs() < 4.5 * deviation).all()
    count = (sample != 0).sum(1).double().mean()
    assert abs(count - gate.penalty().detach()) < 4.5 * (6 * 0.25 / draws) ** 0.5


def test_a_sample_is_the_formula_of_its_noise() -> None:
    """Louizos et al. 2018, eq. 10 and 11."""
    gate = gates_at(-1.0, 0.0, 2.0)
    torch.manual_seed(3)
    u = 1e-6 + (1 - 2e-6) * torch.rand(3, dtype=torch.float64)
    torch.manual_seed(3)
    logits = (torch.log(u) - torch.log(1 - u) + gate.log_alpha) / 0.33
    stretched = 1 / (1 + torch.exp(-logits)) * 1.2 - 0.1
    assert_alike(gate(7, 1), stretched.clamp(0, 1))


def test_noise() -> None:
    """Shared by the batch or per sample; of a seed, wherever the model is; in float32 at least."""
    half = hk.nn.HardConcrete(8).bfloat16()
    assert {each.dtype for each in (half(2, 1), half.export(), half.penalty())} == {torch.float32}
    gate = hk.nn.HardConcrete(16, log_alpha=HALF)
    torch.manual_seed(1)
    first, second = gate(2, 1), gate(2, 1)
    assert first.shape == (16,)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    with torch.device("meta"):  # stands for a GPU: no value could come from it
        assert torch.equal(gate(2, 1), first)
    rows = hk.nn.HardConcrete(8, per_sample=True, log_alpha=HALF)
    assert rows(50, 1).unique(dim=0).shape[0] > 1
    assert rows.eval()(5, 1).shape == (8,)


@pytest.mark.gpu
@pytest.mark.parametrize("per_sample", [False, True])
def test_a_gpu_draws_the_gates_of_the_cpu(per_sample: bool) -> None:
    gate = hk.nn.HardConcrete(64, log_alpha=HALF, per_sample=per_sample)
    torch.manual_seed(1)
    expected = gate(3, 1)
    torch.manual_seed(1)
    found = gate.cuda()(3, 1)
    assert found.is_cuda
    assert torch.equal(found.cpu() == 0, expected == 0)
    assert_alike(found.cpu(), expected)


# ---------------------------------------------------------------------- gradients
@pytest.mark.parametrize("what", ["sample", "probability_one", "penalty"])
def test_gradients(what: str) -> None:
    """Of a sample, which has none at the clamps, and of the closed forms."""
    gate = gates_at(-3.0, -1.0, 0.0, 0.5, 1.0, 2.0, per_sample=True)

    def of(log_alpha: Tensor) -> Tensor:
        torch.manual_seed(5)
        held = copy.deepcopy(gate)
        del held.log_alpha
        held.log_alpha = log_alpha
        return held(40, 1) if what == "sample" else getattr(held, what)()

    assert torch.autograd.gradcheck(of, (gate.log_alpha.detach().requires_grad_(),))


def test_no_slope_beyond_eps() -> None:
    far = gates_at(-20.0, 0.0, 20.0)
    (slope,) = torch.autograd.grad(far.penalty(), far.log_alpha)
    assert (slope == 0).tolist() == [True, False, True]
    assert far.probability_open()[[0, 2]].tolist() == [1e-6, 1 - 1e-6]


def test_l2_penalty_is_an_expectation() -> None:
    gate = gates_at(-1.0, 0.5, 4.0)
    values = torch.randn(3, 4, 2, dtype=torch.float64)
    expected = (gate.probability_open() * values.square().sum((1, 2))).sum() / 2
    assert_alike(gate.l2_penalty(values), expected)


def test_straight_through() -> None:
    """Gates are 0 or 1; their gradient is that of the same draw without it."""
    plain = gates_at(-0.5, 0.2, 0.5, per_sample=True)
    through = gates_at(-0.5, 0.2, 0.5, per_sample=True, straight_through=True)
    samples, slopes = [], []
    for gate in (plain, through):
        torch.manual_seed(2)
        samples.append(gate(60, 1))
        weights = torch.linspace(1, 2, 180, dtype=torch.float64).view(60, 3)
        slopes += torch.autograd.grad((samples[-1] * weights).sum(), gate.log_alpha)
    assert torch.equal(samples[1], (samples[0] > 0.5).double())
    assert torch.equal(slopes[0], slopes[1])
    closed_with_slope = (samples[1] == 0) & (samples[0] > 0)
    assert closed_with_slope.any()  # why closed_grad is True
    assert through.eval()(1, 1).tolist() == [0, 1, 1]


# ---------------------------------------------------------------------- inference
def test_rules_of_evaluation() -> None:
    log_alpha = (-3.0, -1.0, 0.0, 1e-3, 1.0, 3.0)
    mean, binary = gates_at(*log_alpha).eval(), gates_at(*log_alpha, evaluate="binary").eval()
    expected = [min(1, max(0, 1.2 / (1 + math.exp(-a)) - 0.1)) for a in log_alpha]
    assert_alike(mean.export(), torch.tensor(expected, dtype=torch.float64))
    assert binary.export().tolist() == [0, 0, 0, 1, 1, 1]
    for gate, open_heads in ((mean, 5), (binary, 3)):
        assert torch.equal(gate(4, 1), gate.export())
        assert not gate.export().requires_grad
        assert gate.sparsity.item() == pytest.approx(open_heads / 6)
    skewed = gates_at(*torch.linspace(-4, 4, 81).tolist(), stretch=(-0.4, 1.05), evaluate="binary")
    assert torch.equal(skewed.export() == 1, skewed.probability_one() > skewed.probability_zero())


def test_keep_takes_heads_in_order() -> None:
    gate = gates_at(3.0, 4.0, 5.0, 6.0)
    gate.keep([3, 1])
    assert gate.num_heads == 2
    assert gate.log_alpha.tolist() == [6.0, 4.0]
    assert isinstance(gate.log_alpha, nn.Parameter)
    assert list(gate.state_dict()) == ["log_alpha"]
    gate.keep([])
    assert gate(3, 1).shape == gate.export().shape == (0,)
    assert gate.penalty() == 0


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "stretch": (-0.01, 1.3)}])
def test_settle_fixes_every_sample_and_both_rules(options: dict[str, Any]) -> None:
    gate = hk.nn.HardConcrete(4, per_sample=True, **options)
    gate.penalty().backward()
    is_open = torch.tensor([True, False, False, True])
    gate.settle(is_open)
    assert gate.log_alpha.grad is None
    assert not gate.log_alpha.requires_grad
    expected = is_open.float()
    assert torch.equal(gate(20_000, 1), expected.expand(20_000, 4))
    for evaluate in ("mean", "binary"):
        gate.evaluate = evaluate
        assert torch.equal(gate.eval()(1, 1), expected)


# ---------------------------------------------------------------------- in a model
@pytest.mark.parametrize("per_sample", [pytest.param(False, marks=pytest.mark.check), True])
def test_compiled_and_checkpointed(per_sample: bool) -> None:
    """They draw the same gates, and sampled closed heads have the gradients of the full backward pass."""
    layer, x = hk.nn.GatedMultiheadAttention(32, 4), torch.randn(3, 5, 32, requires_grad=True)
    gate = layer.head_gate = hk.nn.HardConcrete(4, log_alpha=HALF, per_sample=per_sample)

    def results(run: Any) -> list[Tensor]:
        """Output and gradients of all weights, the L0 penalty included."""
        torch.manual_seed(4)
        layer.zero_grad()
        out = run(x)[0]
        loss = out.square().mean() + hk.nn.l0_penalty(layer)
        torch.rand(7)  # something else draws before the backward pass
        loss.backward()
        return [out.detach(), *(p.grad.clone() for p in layer.parameters())]

    expected = results(layer)
    gate.closed_grad = True
    assert_alike(results(layer), expected)
    gate.closed_grad = False
    for reentrant in (False, True):
        again = results(lambda x, r=reentrant: checkpoint(layer, x, use_reentrant=r))
        assert_alike(again, expected)
    layer.train(per_sample)  # in training per sample, in evaluation shared
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_alike(results(compiled), results(layer))


def test_penalty_of_a_model() -> None:
    """A gate that several layers share counts once."""
    model = nn.ModuleList(hk.nn.HardConcrete(4) for _ in range(3))
    model.append(model[0])
    one = 4 / (1 + math.exp(-(2 + 0.33 * math.log(11))))
    assert hk.nn.l0_penalty(model).item() == pytest.approx(3 * one)
    assert hk.nn.l0_penalty(model, reduce="mean_layers").item() == pytest.approx(one)
    assert hk.nn.expected_open(model).item() == pytest.approx(3 * one)
    assert not hk.nn.expected_open(model).requires_grad
    hk.nn.l0_penalty(model).backward()
    assert all((gate.log_alpha.grad > 0).all() for gate in model)


def test_bad_input() -> None:
    assert_refused(
        ({"num_heads": 0}, "num_heads is 0; pass an int of at least 1"),
        ({"num_heads": 8.0}, TypeError, "num_heads is a float"),
        *(({"temperature": each}, f"temperature is {each}") for each in (0, math.nan)),
        *(({"stretch": each}, "stretch is") for each in ((0.0, 1.1), (-0.1, 1.0), 0.1)),
        ({"evaluate": "median"}, "evaluate is 'median'; use one of 'mean', 'binary'"),
        ({"log_alpha": "glorot"}, "log_alpha is 'glorot'; pass a finite float or 'voita'"),
        ({"log_alpha": math.inf}, "log_alpha is inf"),
        *(({name: 1}, TypeError, f"{name} is a int") for name in ("per_sample", "straight_through")),
        of=partial(hk.nn.HardConcrete, num_heads=8),
    )
    gate, linear = gates_at(0.0, 1.0, 2.0), nn.Linear(2, 2)
    without = r"model is a Linear without HardConcrete.*heads\.gate"
    assert_refused(
        (lambda: gate.l2_penalty(torch.ones(2, 4)), r"values has shape \[2, 4\]; pass \[3, \.\.\.\]"),
        (lambda: gate.settle(torch.ones(4, dtype=torch.bool)), r"is_open .*bool tensor \[3\]"),
        (lambda: hk.nn.l0_penalty(linear), without),
        (lambda: hk.nn.expected_open(linear), without),
        (lambda: hk.nn.l0_penalty(gate, reduce="mean"), "reduce is 'mean'; use one of 'sum', 'mean_layers'"),
        unchanged=[gate],
    )
