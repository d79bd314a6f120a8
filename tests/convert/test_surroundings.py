"""What stands around converted layers: encoders of PyTorch, caches, grouped keys, files, modules with a state."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import heads_kernels as hk
from heads_kernels.convert import Moments, calibrate, collaborate, curves, plot, solve_budget
from heads_kernels.heads import attention_layers
from heads_kernels.nn import CollaborativeMultiheadAttention, GatedMultiheadAttention
from tests.convert.model_state import assert_moments, by_hand, state
from tests.convert.random_heads import random_heads
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, B, E, H, S, spread


def tiny(name: str, **changes: Any) -> Any:
    pytest.importorskip("transformers", reason="a model of transformers")
    from tests.support.tiny_models import build

    return build(name, **changes)


def encoder(layers: int = 3) -> nn.TransformerEncoder:
    made = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    model = spread(nn.TransformerEncoder(made, layers, enable_nested_tensor=False)).eval()
    return hk.nn.replace_attention_(model)


# ---------------------------------------------------------------------- PyTorch's encoders and decoders
@torch.no_grad()
def test_part_of_an_encoder_and_padding() -> None:
    model, x = encoder(), torch.randn(B, S, E)
    arguments = {"src": x, "src_key_padding_mask": PADDED}
    expected = model(**arguments)
    before = state(model)
    moments = calibrate(model, [arguments], [1])
    assert state(model) == before
    collaborate(model, {1: E}, calibration=moments)
    found = model(**arguments)
    assert_alike(found[~PADDED], expected[~PADDED], dtype=torch.float32)


def test_layers_keep_their_numbers() -> None:
    model = encoder()
    with torch.no_grad():
        model.layers[2].self_attn.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layer 2 .*query holds NaN .*leave the layer out"):
        collaborate(model, 8, layers=[2])


@pytest.mark.parametrize("prunes", [False, True])
def test_a_file_of_a_converted_encoder(prunes: bool, tmp_path: Path) -> None:
    model, x = encoder(), torch.randn(B, S, E)
    collaborate(model, {0: 8, 2: 10})
    if prunes:
        hk.heads.prune(model, {0: [1]})
    path = tmp_path / "model.safetensors"
    hk.heads.save(model, path)
    loaded = encoder()
    hk.heads.load(loaded, path)
    assert type(loaded.layers[1].self_attn) is hk.nn.GatedMultiheadAttention
    with torch.no_grad():
        assert_alike(loaded(x, src_key_padding_mask=PADDED), model(x, src_key_padding_mask=PADDED))
    other = encoder(2)
    before = state(other)
    with pytest.raises(ValueError, match=r"layer 'layers\.2\.self_attn' of the file"):
        hk.heads.load(other, path)
    assert state(other) == before


# ---------------------------------------------------------------------- transformers
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("name", "model"), [("gpt2", "GPT2LMHeadModel"), ("t5", "T5ForConditionalGeneration")]
)
def test_generation_with_caches(name: str, model: str, beams: int) -> None:
    model = tiny(name, model=model)
    arguments = {
        "input_ids": torch.randint(3, 40, (2, 6)), "max_new_tokens": 5, "min_new_tokens": 5,
        "do_sample": False, "num_beams": beams,
    }  # fmt: skip
    arguments["attention_mask"] = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    expected = model.generate(**arguments)
    collaborate(model, 1000)
    for cache in ("dynamic", "static", None):
        options = {"cache_implementation": cache} if cache else {"use_cache": False}
        assert torch.equal(model.generate(**arguments, **options), expected)


def filled(model: Any, cache: str) -> Any:
    """A cache of 40 tokens."""
    import transformers

    past = transformers.DynamicCache()
    if cache == "static":
        past = transformers.StaticCache(config=model.config, max_cache_len=60)
    with torch.no_grad():
        model(torch.randint(3, 40, (2, 40)), past_key_values=past)
    return past


class Copies(TorchDispatchMode):
    """Shapes that operations write as a copy, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in (
            "clone",
            "copy_",
            "cat",
            "_to_copy",
            "repeat",
            "index_select",
            "constant_pad_nd",
        ):
            self.found.append((name, tuple(out.shape)))
        return out


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_step_copies_no_cache(cache: str, converted: bool) -> None:
    """But what transformers itself concatenates: keys and values of a dynamic cache."""
    model = tiny("gpt2", model="GPT2LMHeadModel")
    hk.integrations.transformers.use(model)
    if converted:
        collaborate(model, 16)
    past = filled(model, cache)
    with torch.no_grad(), Copies() as copies:
        model(torch.randint(3, 40, (2, 1)), past_key_values=past)
    large = [name for name, shape in copies.found if len(shape) > 2 and {41, 60} & set(shape)]
    layers = model.config.num_hidden_layers
    assert large == (["cat"] * 2 * layers if cache == "dynamic" else [])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_of_shared_keys_is_copied(cache: str) -> None:
    model = tiny("gpt2", model="GPT2LMHeadModel")
    collaborate(model, 16)
    past = filled(model, cache)
    token = torch.randint(3, 40, (2, 1))
    with torch.no_grad():
        copies = copy.deepcopy(past), pickle.loads(pickle.dumps(past))
        expected, *found = (model(token, past_key_values=each).logits for each in (past, *copies))
    for each in found:
        assert torch.equal(each, expected)


def test_a_cache_of_separate_keys_is_refused() -> None:
    model = tiny("gpt2", model="GPT2LMHeadModel")
    past = filled(model, "dynamic")
    collaborate(model, 16)
    with pytest.raises(ValueError, match=r"cache has keys of 4 heads in layer 0; .*an empty"):
        model(torch.randint(3, 40, (2, 1)), past_key_values=past)


def test_configs_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are."""
    record, calls = sys.modules["heads_kernels.heads.saving"], []
    own_configs = record.own_configs
    monkeypatch.setattr(record, "own_configs", lambda model: (calls.append(1), own_configs(model)))
    model = tiny("bert")
    collaborate(model, 8)
    assert len(calls) == 1
    assert len(model.config.heads_kernels["converted"]) == 2


def test_a_whole_file_in_a_converted_model(tmp_path: Path) -> None:
    model = tiny("bert")
    hk.heads.save(model, tmp_path / "model.safetensors")
    collaborate(model, 8)
    with pytest.raises(ValueError, match="before pruning and conversion"):
        hk.heads.load(model, tmp_path / "model.safetensors")


@pytest.mark.parametrize("method", ["cp", "ragged"])
def test_gradients_of_a_closed_head(method: str) -> None:
    """One flag of the operator says both: zeros of ragged mixing stay zeros, and so do gates of 0."""
    model = tiny("bert")
    collaborate(model, 8, method=method)
    mask = torch.ones(2, H).index_fill(1, torch.tensor([1]), 0.0).requires_grad_()
    ids = torch.randint(3, 40, (2, 6))
    model(ids, head_mask=mask).last_hidden_state[..., :3].sum().backward()
    assert bool(mask.grad[:, 0].all())
    assert bool(mask.grad[:, 1].any()) == (method == "cp")


# ---------------------------------------------------------------------- grouped keys
def test_what_grouped_keys_had_is_counted() -> None:
    model = nn.Sequential(GatedMultiheadAttention(32, 8, num_key_heads=2))
    own = model[0]
    parts = [own.q_proj, own.k_proj]
    before = sum(each.numel() for part in parts for each in part.parameters())
    found = collaborate(model, 32)
    [report] = found.reports
    assert report.parameters_before == before == 32 * 32 + 32 * 8 + 32 + 8
    assert found.parameters > found.parameters_before
    T, D = report.length, 4
    # projections of queries, keys and values, scores, weighted values, output
    rows = 2 * T * 32 * (8 * D + 2 * D + 2 * D + 32)
    assert report.flops_before == rows + 2 * 2 * T * T * 8 * D
    # One key of 32 features and content biases in the place of 2 keys of 4; values are grouped as before.
    F = report.executed_features
    rows += 2 * T * 32 * (32 - 2 * D + 8)
    assert report.flops == rows + T * F + T * T * 8 + 2 * T * T * (F + 8 * D)
    assert report.break_even == 0
    found = collaborate(nn.Sequential(GatedMultiheadAttention(32, 8, num_key_heads=2)), 5)
    assert found.reports[0].break_even == round(32 * (32 + 8 - 2 * 5) / (8 * 5 - 32))


# ---------------------------------------------------------------------- a state of the model's own
class Counting(nn.Module):
    """It counts its calls, as models with running statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.seen = encoder(2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if not hasattr(self, "first"):
            self.register_buffer("first", x.mean())
        return self.encoder(x)


def test_what_the_forward_keeps_stays() -> None:
    model = Counting()
    calibrate(model, [torch.randn(B, S, E)] * 3)
    assert model.seen == 3
    assert model.first is not None
    curves(model, [torch.randn(B, S, E)])
    assert model.seen == 4
    assert not any(each.layout.shared for each in hk.heads.attention_layers(model))
    collaborate(model, 8, calibration=[torch.randn(B, S, E)] * 2)
    assert model.seen == 6


def test_all_is_taken_back_on_an_error() -> None:
    model = Counting()
    before = state(model)

    def batches() -> Iterator[Tensor]:
        yield torch.randn(B, S, E)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        calibrate(model, batches())
    assert state(model) == before
    assert model.seen == 0


@pytest.mark.parametrize("name", ["Conversion", "_parameters", "record_in_config"])
def test_nothing_is_changed_by_an_error_at_the_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder()
    before = state(model)
    module, calls = sys.modules["heads_kernels.convert.collaborate"], []
    stock = getattr(module, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if name != "_parameters" or len(calls) == 2:
            raise KeyboardInterrupt
        return stock(*arguments, **options)

    monkeypatch.setattr(module, name, failing)
    with pytest.raises(KeyboardInterrupt):
        collaborate(model, 8)
    assert state(model) == before


def test_inputs_are_let_go() -> None:
    """At the end of a pass no layer but the last has its inputs in memory."""
    import weakref

    model, alive = encoder(), []
    model.layers[0].register_forward_pre_hook(lambda module, x: alive.append(weakref.ref(x[0])))
    left = []
    model.layers[2].register_forward_hook(lambda *seen: left.append(alive[-1]() is not None))

    def batches() -> Iterator[tuple[Tensor]]:
        yield (torch.randn(B, S, E).add_(1),)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.model.layers:
                x = layer(x * 1.0)
            return x

    calibrate(Scaled(), batches())
    assert left == [False]


# ---------------------------------------------------------------------- nothing to share
def test_layers_without_a_second_feature() -> None:
    heads = random_heads(D=1, H=1)
    assert solve_budget([heads], params=1000) == [1]
    model = encoder()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.zero_()
            layer.self_attn.k_proj.weight.zero_()
    expected = model(x := torch.randn(B, S, E))
    for method in ("cp", "ragged"):
        found = collaborate(copied := _copy(model), 8, method=method)
        assert found.dims == (1, 1, 1)
        assert_alike(copied(x), expected, dtype=torch.float32)


def _copy(model: nn.Module) -> nn.Module:
    from copy import deepcopy

    return deepcopy(model)


def test_keys_that_never_vary() -> None:
    model = encoder()
    before = state(model)
    for attempt in (
        lambda x: collaborate(model, 8, calibration=[x]),
        lambda x: calibrate(model, [x]),
    ):
        with pytest.raises(ValueError, match=r"calibration has keys of layer 0 .* never vary"):
            attempt(torch.randn(B, 1, E))
    assert state(model) == before


def test_modules_of_the_package_are_made_as_before() -> None:
    model, x = encoder(1), torch.randn(B, S, E)
    (moments,) = calibrate(model, [{"src": x, "src_key_padding_mask": PADDED}]).values()
    assert isinstance(moments, Moments)
    assert_moments(moments, by_hand([(x, x, ~PADDED, ~PADDED, False)]))
    collaborate(model, 8)
    assert isinstance(attention_layers(model)[0].module, CollaborativeMultiheadAttention)


@pytest.mark.check
@pytest.mark.parametrize(
    ("path", "said"), [("none/p.png", "its folder does not exist"), ("p", r"end it with \.png")]
)
def test_paths_of_pictures(path: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    found = curves(encoder())
    with pytest.raises(ValueError, match=f"path is .*{said}"):
        plot(found, tmp_path / path)
    assert not list(tmp_path.iterdir())
