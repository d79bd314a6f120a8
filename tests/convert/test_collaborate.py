"""Whole models converted: exact, within their budget, described truthfully, and left as they were on any error."""

import math
import re
import textwrap
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import heads_kernels as hk
from heads_kernels.call import active_widths
from heads_kernels.convert import Curves, collaborate, curves, plot
from heads_kernels.convert.budget import Sizes
from heads_kernels.convert.features import METHODS
from heads_kernels.heads import projected_layers
from heads_kernels.nn import CollaborativeMultiheadAttention, GatedMultiheadAttention
from tests.convert.converted_models import encoder
from tests.support.alike import assert_alike, rounding
from tests.support.model_state import state
from tests.support.nn_layers import B, E, H, Layers, S, spread
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, build, outputs


# ---------------------------------------------------------------------- what the model computes
@pytest.mark.parametrize(
    ("name", "method"), [("bert", "cp"), ("albert", "ragged"), ("gpt2", "cp"), ("t5", "ragged"), ("llama", "cp")]
)
def test_exact_from_the_rank_on(name: str, method: str) -> None:
    model = build(name, attention="sdpa")
    arguments = batch(model)
    expected = outputs(model)
    found = collaborate(model, 1000, method=method, calibration=[arguments])
    assert all(report.exact for report in found.reports)
    assert all(dim <= 32 for dim in found.dims)
    assert "exact" in str(found)
    assert_alike(outputs(model), expected, dtype=torch.float32)
    assert found.error < rounding(torch.float64)


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart"])
def test_calibration_brings_the_output_closer(name: str) -> None:
    expected, distances = outputs(build(name)), []
    for data in (None, [batch(build(name))]):
        model = build(name)
        collaborate(model, 12, calibration=data)
        distances.append(float((outputs(model) - expected).detach().norm()))
    assert 0 < distances[1] < 0.8 * distances[0]


@pytest.mark.parametrize(("pruned", "training"), [(False, True), (True, False)])
def test_modules_of_the_package(training: bool, pruned: bool) -> None:
    """Modes and gates stay, and layers without heads."""
    first = GatedMultiheadAttention(E, H, output_gate="head", bias=False)
    model, x = spread(Layers(first, GatedMultiheadAttention(E, H, num_key_heads=2))), torch.randn(B, S, E)
    layers = projected_layers(model)
    layers[1].module.head_gate = hk.nn.HardConcrete(H)
    if pruned:
        hk.heads.prune(model, {0: range(H), 1: [1]})
    gate = layers[1].module.head_gate
    expected = model.eval()(x)
    model.train(training)
    found = collaborate(model, 1000, calibration=[x, x + 1.0], length=4, progress=False)
    assert found.layers == tuple(layer.name for layer in layers[pruned:])
    assert all(report.exact for report in found.reports)
    assert all(module.training == training for module in model.modules())
    assert projected_layers(model)[1].module.head_gate is gate
    assert_alike(model.eval()(x), expected, dtype=torch.float32)


def test_a_model_that_holds_models_of_transformers() -> None:
    model = nn.ModuleDict({"one": build("bert"), "other": build("bert")})
    expected = outputs(model["one"])
    names = [layer.name for layer in projected_layers(model) if layer.name.startswith("one")]
    assert collaborate(model, 32, layers=names).layers == tuple(names)
    assert_alike(outputs(model["one"]), expected, dtype=torch.float32)
    assert model["other"].config._attn_implementation == "eager"
    assert len(model["one"].config.heads_kernels["converted"]) == 2


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_a_closed_head(method: str) -> None:
    """One flag of the operator says both: zeros of ragged mixing stay zeros, and so do gates of 0."""
    model = build("bert")
    collaborate(model, 8, method=method)
    mask = torch.ones(2, H).index_fill(1, torch.tensor([1]), 0.0).requires_grad_()
    outputs(model, head_mask=mask)[..., :3].sum().backward()
    assert bool(mask.grad[:, 0].all())
    assert bool(mask.grad[:, 1].any()) == (method == "cp")


def test_layers_by_index_and_name() -> None:
    for layers in ([2, 0], ["layers.2.self_attn", "layers.0.self_attn"]):
        model = encoder(3)
        found = collaborate(model, [10, 8], layers=layers)
        kinds = [type(layer.self_attn) for layer in model.layers]
        assert kinds[1] is GatedMultiheadAttention
        assert kinds[0] is kinds[2] is CollaborativeMultiheadAttention
        assert [model.layers[n].self_attn.shared_dim for n in (0, 2)] == [8, 10]
        assert found.layers == ("layers.2.self_attn", "layers.0.self_attn")
        assert found.dims == (10, 8)


# ---------------------------------------------------------------------- how many features
@pytest.mark.parametrize(("name", "method"), [("t5", "cp"), ("torch", "ragged")])
def test_the_average_is_kept(name: str, method: str) -> None:
    """As many parameters as so many features in every layer, in the modules themselves."""
    model = encoder() if name == "torch" else build(name)
    data = [torch.randn(B, S, E)] if name == "torch" else [batch(model)]
    whole = sum(p.numel() for p in model.parameters())
    found = collaborate(model, 17, method=method, calibration=data)
    width = E if name == "torch" else 32
    own = 0  # parameters of queries and keys
    for layer in projected_layers(model):
        content = getattr(layer.module, "content_proj", None)
        linears = [layer.query.linear, layer.key.linear, *([] if content is None else [content])]
        parameters = {each for linear in linears for each in linear.parameters()}
        own += sum(each.numel() for each in [*parameters, layer.module.mixing])
    assert own <= len(found.layers) * Sizes(width, width, 32, 4).parameters(17)
    assert own == sum(report.parameters for report in found.reports)
    assert found.parameters_before == whole
    assert found.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("method", "calibrated"), [("cp", True), ("ragged", False), ("ragged", True)])
def test_budget_of_error(method: str, calibrated: bool) -> None:
    model = build("bert")
    data = [batch(model)] if calibrated else None
    found = collaborate(model, error=0.2, method=method, calibration=data)
    squares = found.curves.squares
    cuts = sum(q * e**2 for q, e in zip(squares, found.errors, strict=True))
    assert found.error == pytest.approx(math.sqrt(cuts / sum(squares)))
    assert found.error <= 0.2
    assert method == "cp" or found.error > 0.17


def test_ragged_heads_get_groups() -> None:
    model = build("bert", hidden_size=64, num_attention_heads=4)
    found = collaborate(model, 32, method="ragged", calibration=[batch(model)])
    for layer, report in zip(projected_layers(model), found.reports, strict=True):
        mixing = layer.module.mixing
        assert layer.module.ragged
        assert bool(((mixing != 0).sum(0) == 1).all())
        assert all(count % 4 == 0 for count in report.features)
        assert report.executed_features == int(active_widths(mixing.detach()).sum())
        assert report.executed_features < 4 * report.dim


# ---------------------------------------------------------------------- what is reported
def test_the_report() -> None:
    model = build("bert")
    found = collaborate(model, [1000, 10], calibration=[batch(model)], length=50)  # the first has a rank of 32
    assert [report.exact for report in found.reports] == [True, False]
    assert found.flops == sum(report.flops for report in found.reports)
    assert {report.length for report in found.reports} == {50}
    assert found.dims == (32, 10)
    assert found.parameters < found.parameters_before
    lines = str(found).splitlines()
    assert len(lines) == 5
    assert [line.split()[0] for line in lines[1:3]] == list(found.layers)
    assert [line.split()[1] for line in lines[1:3]] == ["32", "10"]
    assert re.search(rf"\b{found.parameters_before:,} -> {found.parameters:,}$", lines[-1])
    ragged = collaborate(build("bert"), 4, method="ragged")
    assert math.inf in [report.break_even for report in ragged.reports]
    assert "always" in str(ragged)


def test_what_grouped_keys_had_is_counted() -> None:
    H, Hk, D = 8, 2, 4
    model = torch.nn.Sequential(GatedMultiheadAttention(32, H, num_key_heads=Hk))
    parts = [model[0].q_proj, model[0].k_proj]
    before = sum(each.numel() for part in parts for each in part.parameters())
    found = collaborate(model, 32)
    [report] = found.reports
    assert report.parameters_before == before == 32 * 32 + 32 * 8 + 32 + 8
    assert found.parameters > found.parameters_before
    T, sizes = report.length, Sizes(32, 32, H * D, H, Hk)  # test_budget.py has the formulas
    counts = sizes.flops(T), sizes.flops(T, 32, report.executed_features)
    assert (report.flops_before, report.flops, report.break_even) == (*counts, 0)
    found = collaborate(torch.nn.Sequential(GatedMultiheadAttention(32, H, num_key_heads=Hk)), 5)
    assert found.reports[0].break_even == round(32 * (32 + 8 - 2 * 5) / (8 * 5 - 32))


@pytest.mark.check
def test_the_plot() -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    model = build("bert")
    before: Curves = curves(model)
    figure = plot(before)
    assert len(figure.axes) == 2
    assert len(figure.axes[0].lines) == 2
    legend = figure.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == list(before.layers)
    found = collaborate(model, [32, 10])
    figure = plot(found)
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [float(dot.get_xdata()[0]) for dot in dots] == [32, 10]
    with pytest.raises(TypeError, match="shown is a list"):
        plot([1.0])


def test_curves_leave_a_model_of_stock_attention() -> None:
    model = build("bert")
    before = state(model)
    curves(model, [batch(model)])
    assert state(model) == before


# ---------------------------------------------------------------------- what is warned of
@pytest.mark.filterwarnings("error::UserWarning")
def test_more_flops_at_the_length() -> None:
    """From about the break-even length on; a warning that is an error changes nothing."""
    border = round(Sizes(E, E, E, H).break_even(12))
    collaborate(encoder(), [12, 12], length=border // 2, progress=False)
    message = (
        rf"At T = {2 * border} 2 of 2 converted layers have more FLOPs than before .* "
        rf"fewer below about T = {border}\. For longer inputs use .*method='ragged'"
    )
    with pytest.warns(UserWarning, match=message) as reported:
        collaborate(encoder(), [12, 12], length=2 * border, progress=False)
    assert reported[0].filename == __file__
    with pytest.warns(UserWarning, match="more FLOPs") as reported:
        collaborate(encoder(), [22, 22], method="ragged", length=10000, progress=False)
    assert "method=" not in str(reported[0].message)
    model = encoder()
    before = state(model)
    with pytest.raises(UserWarning, match="more FLOPs"):
        collaborate(model, 20, length=1000, progress=False)
    assert state(model) == before


# ---------------------------------------------------------------------- bad input
def test_bad_arguments() -> None:
    model = encoder()
    assert_refused(
        ({}, ValueError, "dim is None and error is None; pass one"),
        ({"dim": 8, "error": 0.1}, ValueError, "dim is 8 and error is 0.1; pass one"),
        ({"dim": 0}, ValueError, "dim is 0"),
        ({"dim": 8.0}, TypeError, "dim is a float"),
        ({"dim": [8, 0]}, ValueError, r"dim\[1\] is 0"),
        ({"dim": [8]}, ValueError, "dim has 1 numbers; pass one for each of 2 layers"),
        ({"error": math.nan}, ValueError, "error is nan"),
        ({"dim": 8, "method": "svd"}, ValueError, "method is 'svd'; use one of 'cp', 'ragged'"),
        ({"dim": 8, "length": 0}, ValueError, "length is 0"),
        ({"dim": 8, "layers": ["no"]}, ValueError, "layers names layer 'no'; this model has layers 0 to 1"),
        ({"dim": 8, "layers": []}, ValueError, "layers is empty"),
        ({"dim": 8, "layers": "layers.0"}, TypeError, "layers .*pass a list"),
        ({"dim": 8, "layers": [0, "layers.0.self_attn"]}, ValueError, "layers .*twice"),
        ({"dim": 8, "calibration": 5}, TypeError, "calibration is a int"),
        of=partial(collaborate, model),
        unchanged=[model],
    )


def test_bad_models() -> None:
    attention, rotary = GatedMultiheadAttention(E, H), build("qwen3")
    converted = encoder()
    collaborate(converted, 8)

    class Own(GatedMultiheadAttention):
        pass

    assert_refused(
        ((nn.Linear(3, 3), 8), ValueError, ".*no attention layer"),
        ((attention, 8), ValueError, r".*pass a module that holds it.*nn\.Sequential\(model\)"),
        ((rotary, 8), ValueError, ".*has rotary positions"),
        ((converted, 8), ValueError, ".*is collaborative already"),
        ((nn.Sequential(Own(E, H)), 8), TypeError, ".*is a Own; what its class adds would be lost"),
        (([attention], 8), TypeError, "model is a list"),
        of=collaborate,
        unchanged=[attention, rotary, converted],
    )


def test_heads_of_anything() -> None:
    """The example in the docstring of the package, and what it computes."""
    text = hk.convert.__doc__ or ""
    example = textwrap.dedent(text[text.index("    heads = ") :])
    H, D, D_in, Ds = 4, 6, E, 24
    W_Q, W_K = (torch.randn(H * D, D_in) for _ in "QK")
    b_Q, x = torch.randn(H * D), torch.randn(3, 9, D_in)
    names = {"hk": hk, "H": H, "D": D, "D_in": D_in, "Ds": Ds, "W_Q": W_Q, "W_K": W_K, "b_Q": b_Q}
    exec(example, names | {"x": x}, found := dict[str, Any]())
    layer = found["layer"]
    query, key = ((x @ w.T).unflatten(2, (H, D)).transpose(1, 2) for w in (W_Q, W_K))
    query = query + b_Q.view(H, 1, D)
    value = layer.v_proj(x).unflatten(2, (H, D)).transpose(1, 2)
    attended = (query @ key.mT * D**-0.5).softmax(-1) @ value
    expected = layer.out_proj(attended.transpose(1, 2).flatten(2))
    assert_alike(layer(x)[0], expected, dtype=torch.float32)
