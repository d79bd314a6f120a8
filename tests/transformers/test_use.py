"""`use` and `release`: whole models, parts, copies; everything taken back, and what is refused."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import types
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")

import transformers
from transformers.models.laguna import modeling_laguna
from transformers.models.mpt import modeling_mpt

import heads_kernels as hk
from heads_kernels.integrations.transformers import models, release, use
from tests.support.tiny_models import TINY, batch, build, outputs, small, unpooled


def test_release_takes_everything_back() -> None:
    model = build("qwen3_next")
    model.config._attn_implementation = "sdpa"
    modules = {name: (type(m), set(vars(m))) for name, m in model.named_modules()}
    use(model)
    assert any(type(m) is not modules[name][0] for name, m in model.named_modules())
    release(model)
    assert {name: (type(m), set(vars(m))) for name, m in model.named_modules()} == modules
    assert model.config._attn_implementation == "sdpa"


def test_every_part_of_a_composite_model_is_in_use() -> None:
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        *(build(name).config for name in ("vit", "bert"))
    )
    model = transformers.VisionTextDualEncoderModel(config)
    parts = (model, model.text_model, model.vision_model)
    names = [part.config._attn_implementation for part in parts]
    use(model)
    assert [part.config._attn_implementation for part in parts] == ["heads_kernels"] * 3
    release(model)
    assert [part.config._attn_implementation for part in parts] == names


def test_models_of_one_config_are_put_to_use_one_by_one() -> None:
    first = build("bert")
    second = transformers.BertModel(first.config).eval()
    use(first)
    assert second.config._attn_implementation == "eager"
    use(second)
    release(first)
    assert not torch.equal(outputs(second), outputs(second, head_mask=torch.zeros(4)))
    assert release(second).config._attn_implementation == "eager"


def state(model: Any) -> dict[str, Any]:
    """What `use` changes of the modules of a model."""
    return {
        name: (type(m), set(vars(m)), m.config._attn_implementation if "config" in vars(m) else "")
        for name, m in model.named_modules()
    }


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("bert", "BertForMaskedLM"),
        ("afmoe", ""),
        ("albert", "AlbertForMaskedLM"),
        ("bart", "BartForConditionalGeneration"),
    ],
)
def test_parts_and_wholes_are_released(name: str, task: str) -> None:
    """A part and then the whole, the part of a whole, and copies of either."""
    model = build(name, "sdpa", model=task)
    closed = torch.zeros(model.config.num_attention_heads)
    stock, expected = state(model), outputs(model)

    def assert_stock(released: Any) -> None:
        assert state(released) == stock
        assert_alike(outputs(released), expected)

    use(model.base_model)
    use(model)
    copied, part = copy.deepcopy(model), copy.deepcopy(model.base_model)
    assert_stock(release(model))
    with pytest.raises(ValueError, match="is not in use"):
        release(model.base_model)
    assert not torch.equal(outputs(copied), outputs(copied, head_mask=closed))
    assert_stock(release(copied))
    setattr(model, model.base_model_prefix, release(part))
    assert_stock(model)
    use(model)
    release(model.base_model)
    assert_stock(release(model))


def test_encoder_is_released_from_a_model_in_use() -> None:
    model = use(build("bart"))
    release(model.encoder)
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert model.encoder.config._attn_implementation == "eager"
    with pytest.raises(
        ValueError, match=r"head_mask is given to a BartModel, whose layers run .* 'eager'"
    ):
        outputs(model, head_mask=mask)
    assert not torch.equal(outputs(model), outputs(model, decoder_head_mask=mask))


def test_release_keeps_no_gates_that_stock_attention_ignores() -> None:
    model = build("bert")
    expected = outputs(model)
    use(model)
    hk.heads.close(model, {0: [0]})
    refusal = (
        r"model has gates on the heads of 'encoder\.layer\.0\..*; call hk\.heads\.reopen, ungate"
    )
    with pytest.raises(ValueError, match=refusal):
        release(model)
    hk.heads.reopen(model)
    assert_alike(outputs(release(model)), expected)


def test_release_keeps_pruned_layers_with_position_biases() -> None:
    model = use(build("t5"))
    hk.heads.prune(model, {0: [0]})
    with pytest.raises(ValueError, match=r"fewer heads in 'encoder.* than the position bias"):
        release(model)


def test_albert_in_use_is_pickled() -> None:
    model = use(build("albert"))
    mask = torch.rand(2, 4)
    loaded = pickle.loads(pickle.dumps(model))
    assert_alike(outputs(loaded, head_mask=mask), outputs(model, head_mask=mask))
    assert type(release(loaded).encoder).__name__ == "AlbertTransformer"


def test_release_of_a_model_that_was_made_with_the_name() -> None:
    """Its implementation was the package's before; head masks still reach its layers."""
    model = release(use(build("bert", "heads_kernels")))
    assert model.config._attn_implementation == "heads_kernels"
    assert not torch.equal(outputs(model), outputs(model, head_mask=torch.zeros(4)))


def test_a_model_in_use_is_put_to_use_again() -> None:
    model = build("bert")
    before = model.config._attn_implementation
    use(model).set_attn_implementation("eager")
    use(model)
    assert model.config._attn_implementation == "heads_kernels"
    model(**batch(model), head_mask=torch.ones(4))
    assert release(model).config._attn_implementation == before


STEPS = ("own_configs", "replace_classes", "watch", "pad_layers", "unpad_layers")


def structure(model: Any) -> list[Any]:
    """Everything of a model except the values of its weights: hooks, configs, classes and attributes, as they are."""
    found: list[Any] = []
    for module in model.modules():
        inside = {k: list(v.items()) for k, v in vars(module).items() if isinstance(v, dict)}
        configs = [v for v in vars(module).values() if hasattr(v, "_attn_implementation")]
        names = [each._attn_implementation for each in configs]
        found.append((type(module), dict(vars(module)), inside, names))
    return found


@pytest.mark.parametrize("when", ["before", "in the middle of"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("was_in_use", [False, True])
def test_an_error_leaves_the_model_as_it_was(
    step: str, when: str, was_in_use: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = unpooled(build("mpnet"))
    if was_in_use:
        use(model, unpad=True)
    before = structure(model)
    run = getattr(models, step)

    def failing(argument: Any, *layers: Any) -> None:
        if when == "in the middle of" and layers:
            run(argument, dict(list(layers[0].items())[:1]))
        elif when == "in the middle of":
            run(model.encoder)
        raise KeyboardInterrupt

    for name in STEPS:  # other steps are as they were for the next call
        monkeypatch.setattr(models, name, failing if name == step else getattr(models, name))
    with pytest.raises(KeyboardInterrupt):
        use(model, unpad=True)
    assert structure(model) == before
    if was_in_use and step in ("own_configs", "pad_layers"):
        with pytest.raises(KeyboardInterrupt):
            release(model)
        assert structure(model) == before
    monkeypatch.undo()
    found = outputs(use(model, unpad=True))
    assert_alike(found, outputs(unpooled(build("mpnet"))))


def test_models_that_compute_with_masks_are_refused_before_their_first_pass() -> None:
    small_git = {"vision_config": TINY["vit"].arguments}
    kinds = {
        "BigBirdPegasusModel": TINY["bart"].arguments | {"attention_type": "original_full"},
        "GitModel": TINY["bert"].arguments | small_git,
        "InformerModel": TINY["bart"].arguments | {"prediction_length": 4, "input_size": 1},
        "T5Gemma2Model": {
            "encoder": {
                "text_config": TINY["llama"].arguments | {"num_hidden_layers": 2},
                "vision_config": TINY["vit"].arguments,
            },
            "decoder": TINY["llama"].arguments | {"num_hidden_layers": 2},
        },
    }
    for name, arguments in kinds.items():
        model_class = getattr(transformers, name)
        model = model_class(model_class.config_class(**arguments))
        before = structure(model)
        with pytest.raises(ValueError, match=rf"model is a {name} .*masks.* it cannot be used"):
            use(model)
        assert structure(model) == before
    sparse = small("deepseek_v32")
    with pytest.raises(ValueError, match="DeepseekV32Attention, chooses keys by index"):
        use(sparse)


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"model is a Linear; .*tested families: albert, bart"):
        use(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model is a str; load it first: .*from_pretrained"):
        use("bert")
    with pytest.raises(
        TypeError, match=r"model is a TransformerEncoderLayer; .*replace_attention_"
    ):
        use(nn.TransformerEncoderLayer(8, 2))
    model = build("bert")
    with pytest.raises(ValueError, match=r"model \(BertModel\) is not in use; call use"):
        release(model)
    with pytest.raises(TypeError, match="unpad is a int"):
        use(use(model), unpad=1)  # type: ignore[arg-type]


class Wrapper(nn.Module):
    """As PEFT and sentence-transformers hold a model."""

    def __init__(self, **models: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(models)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (torch.compile, "_orig_mod"),
        (nn.DataParallel, "module"),
        (lambda model: Wrapper(auto_model=model), "parts.auto_model"),
    ],
)
def test_models_in_something_else_are_named(wrap: Any, path: str) -> None:
    holder = wrap(build("bert", model="BertForMaskedLM"))
    call = f"use(model.get_submodule({path!r})), a BertForMaskedLM"
    with pytest.raises(TypeError, match=rf"pass the model that it holds, {re.escape(call)}: it is"):
        use(holder)
    use(holder.get_submodule(path))


def test_every_model_in_something_else_is_named() -> None:
    holder = Wrapper(query=build("bert"), image=build("vit"))
    with pytest.raises(
        TypeError, match=r"'parts.query'\)\), a BertModel and .*, a ViTModel: it is"
    ):
        use(holder)


def test_model_of_a_pipeline_is_named() -> None:
    pipeline = types.SimpleNamespace(model=build("bert"))
    with pytest.raises(TypeError, match="pass its model, a BertModel, which is changed in place"):
        use(pipeline)


def test_unsupported_families_are_named() -> None:
    plain = TINY["bert"].arguments
    roformer = transformers.RoFormerModel(transformers.RoFormerConfig(**plain))
    with pytest.raises(ValueError, match=r"'roformer'\), which computes its attention itself"):
        use(roformer)
    doge = transformers.DogeModel(transformers.DogeConfig(**TINY["llama"].arguments))
    with pytest.raises(ValueError, match=r"family 'doge'\), which handles masks"):
        use(doge)
    inkling = small("inkling2_text")
    with pytest.raises(
        ValueError, match=r"Inkling2TextModel .*plain attention \(attention sinks by"
    ):
        use(inkling)
    inkling.set_attn_implementation("heads_kernels")
    with pytest.raises(
        ValueError, match=r"sinks is given by Inkling2\w+Attention .* use attn_impl"
    ):
        inkling(torch.ones(1, 3, dtype=torch.long))


def test_an_argument_that_a_repeated_forward_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by name where stock computes attention itself; else the stock layer stays, and calls ours."""

    def with_argument(stock: Any) -> Any:
        signature = inspect.signature(stock.forward)
        new = inspect.Parameter("new", inspect.Parameter.KEYWORD_ONLY, default=None)
        *others, last = signature.parameters.values()
        forward = inspect.unwrap(stock.forward)
        monkeypatch.setattr(
            forward,
            "__signature__",
            signature.replace(parameters=[*others, new, last]),
            raising=False,
        )
        monkeypatch.setattr(stock, "forward", forward)

    mpt, laguna = build("mpt", "eager"), build("laguna", "sdpa")
    expected = outputs(laguna)
    with_argument(modeling_mpt.MptAttention)
    with_argument(modeling_laguna.LagunaAttention)
    with pytest.raises(ValueError, match=r"new is an argument of '.*', a MptAttention, and is not"):
        use(mpt)
    assert mpt.config._attn_implementation == "eager"
    use(laguna)
    assert not any(type(each).__name__.startswith("Fused") for each in laguna.modules())
    assert_alike(outputs(laguna), expected)
