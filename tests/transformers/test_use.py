"""`use` and `release`: whole models, parts, copies; everything taken back, and what is refused."""

import copy
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.laguna import modeling_laguna
from transformers.models.mpt import modeling_mpt

from heads_kernels.integrations.transformers import release, use
from heads_kernels.integrations.transformers.replacement import Replacement
from tests.support.alike import assert_alike
from tests.support.model_state import structure
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, build, of_class, outputs, small, small_config, unpooled


def test_models_of_one_config_are_put_to_use_one_by_one() -> None:
    first = build("bert")
    second = transformers.BertModel(first.config).eval()
    use(first)
    assert second.config._attn_implementation == "eager"
    use(second)
    release(first)
    assert not torch.equal(outputs(second), outputs(second, head_mask=torch.zeros(4)))
    assert release(second).config._attn_implementation == "eager"


def test_a_layer_that_was_added_in_use_is_released() -> None:
    model = use(build("bert"))
    model.encoder.layer.append(type(model.encoder.layer[0])(model.config))
    assert release(use(model)).config._attn_implementation == "eager"


def test_attention_without_a_config_has_that_of_its_model_in_use() -> None:
    model = build("bert")
    expected = outputs(model)
    attention = model.encoder.layer[0].attention.self
    del attention.config
    assert_alike(outputs(use(model)), expected)
    release(model)
    assert not hasattr(attention, "config")


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("bert", "BertForMaskedLM"),
        ("afmoe", ""),
        ("albert", "AlbertForMaskedLM"),
        ("bart", "BartForConditionalGeneration"),
        ("bloom", ""),  # whose attention has no config of its own
    ],
)
def test_parts_and_wholes_are_released(name: str, task: str) -> None:
    """A part and then the whole, the part of a whole, and copies of either."""
    model = build(name, "eager" if name == "bloom" else "sdpa", model=task)
    closed = torch.zeros(model.config.num_attention_heads)
    stock, expected = structure(model), outputs(model)

    def assert_stock(released: Any) -> None:
        assert structure(released) == stock
        assert_alike(outputs(released), expected)

    use(model.base_model)
    use(model)
    copied, part = copy.deepcopy(model), copy.deepcopy(model.base_model)
    assert_stock(release(model))
    assert_refused((lambda: release(model.base_model), "is not in use"))
    assert not torch.equal(outputs(copied), outputs(copied, head_mask=closed))
    assert_stock(release(copied))
    setattr(model, model.base_model_prefix, release(part))
    assert_stock(model)
    use(model)
    release(model.base_model)
    assert_refused((lambda: outputs(model, head_mask=closed), "whose layers run the attention function .*, which ign"))
    assert_stock(release(model))


def test_encoder_is_released_from_a_model_in_use() -> None:
    model = use(build("bart"))
    release(model.encoder)
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert model.encoder.config._attn_implementation == "eager"
    assert_refused((lambda: outputs(model, head_mask=mask), r"is given to a BartModel, whose layers run .* 'eager'"))
    assert not torch.equal(outputs(model), outputs(model, decoder_head_mask=mask))


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("name", ["afmoe", "bert", "bloom", "mpnet", "t5"])
def test_replicas_compute_with_their_own_weights(name: str, unpad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `nn.DataParallel` makes one for each GPU, in every forward pass."""
    model = use(unpooled(build(name)), unpad=unpad)
    expected = outputs(model)
    replicating = importlib.import_module("torch.nn.parallel.replicate")
    copies_of = "_broadcast_coalesced_reshape"
    monkeypatch.setattr(
        replicating, copies_of, lambda tensors, devices, detach=False: [[t.clone() for t in tensors] for _ in devices]
    )
    replica = replicating.replicate(model, [0, 1])[1]
    for weight in model.parameters():
        weight.data.zero_()
    found = replica(**batch(model))[0]
    real = batch(model).get("decoder_attention_mask", batch(model)["attention_mask"]).bool()
    assert_alike(found[real], expected)


def test_a_forward_that_was_wrapped_and_put_back_is_released() -> None:
    model = use(build("bloom"))
    module: Any = next(each for each in model.modules() if isinstance(each, Replacement))
    module.forward, unwrapped = partial(module.forward), module.forward
    module.forward = unwrapped
    release(model)
    assert not isinstance(module, Replacement)
    assert "forward" not in vars(module)


@pytest.mark.parametrize("before", ["sdpa", "heads_kernels"])
def test_a_model_in_use_is_put_to_use_again(before: str) -> None:
    model = build("bert", before)
    use(model).set_attn_implementation("eager")
    use(model)
    assert model.config._attn_implementation == "heads_kernels"
    assert not torch.equal(outputs(model), outputs(model, head_mask=torch.zeros(4)))
    assert release(model).config._attn_implementation == before


TEXTS, IMAGES = (small_config(each) for each in (transformers.LlamaConfig, transformers.ViTConfig))
#: Models that compute with masks.
WITH_MASKS: list[tuple[str, dict[str, Any]]] = [
    ("BigBirdPegasusModel", {"attention_type": "original_full"}),
    ("GitModel", {"vision_config": IMAGES}),
    ("InformerModel", {"prediction_length": 4, "input_size": 1}),
    ("T5Gemma2Model", {"encoder": {"text_config": TEXTS, "vision_config": IMAGES}, "decoder": TEXTS}),
]
#: What is no model, or holds one, or is one that can't be served.
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: nn.Linear(2, 2), TypeError, r"model is a Linear; .*lists the tested families"),
    (lambda: torch.compile(build("bert")), TypeError, r"use\(model.get_submodule\('_orig_mod'\)\): it is"),
    (lambda: nn.DataParallel(build("bert")), TypeError, r"use\(model.get_submodule\('module'\)\): it is"),
    (lambda: nn.Sequential(nn.Sequential(build("bert")), build("vit")), TypeError, r"'0\.0'\)\) and .*'1'\)\): it is"),
    (lambda: of_class("RoFormerModel"), ValueError, "'roformer'.* computes its attention"),
    (lambda: of_class("DogeModel"), ValueError, "family 'doge'.*, makes masks of its own"),
    *(
        (partial(of_class, name, **changes), ValueError, rf"model is a {name} .*masks.* it cannot be used")
        for name, changes in WITH_MASKS
    ),
]


@pytest.mark.parametrize(("make", "kind", "refusal"), REFUSED)
def test_refused(make: Callable[[], Any], kind: type[Exception], refusal: str) -> None:
    model = make()
    assert_refused((partial(use, model), kind, refusal), unchanged=[model])


def test_arguments_that_are_refused() -> None:
    """Those of a call in the first pass."""
    model, in_use, reads_sinks = build("bert"), use(build("bert")), use(small("inkling2_text"))
    assert_refused(
        (lambda: release(model), r"model \(BertModel\) is not in use; call use"),
        (lambda: use(in_use, unpad=1), TypeError, "unpad is a int"),
        (lambda: outputs(reads_sinks), r"sinks is given to .* Inkling2\w*Attention and is not"),
        unchanged=[model, in_use],
    )


def test_an_argument_that_a_repeated_forward_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by name where stock computes attention itself; else the stock layer stays, and calls ours."""

    def with_argument(stock: Any) -> Any:
        signature = inspect.signature(stock.forward)
        new = inspect.Parameter("new", inspect.Parameter.KEYWORD_ONLY, default=None)
        *others, last = signature.parameters.values()
        forward = inspect.unwrap(stock.forward)
        monkeypatch.setattr(forward, "__signature__", signature.replace(parameters=[*others, new, last]), raising=False)
        monkeypatch.setattr(stock, "forward", forward)

    mpt, laguna = build("mpt", "eager"), build("laguna", "sdpa")
    expected = outputs(laguna)
    with_argument(modeling_mpt.MptAttention)
    with_argument(modeling_laguna.LagunaAttention)
    assert_refused((lambda: use(mpt), "new is an argument of '.*', a MptAttention, and is not"), unchanged=[mpt])
    use(laguna)
    assert not any(isinstance(each, Replacement) for each in laguna.modules())
    assert_alike(outputs(laguna), expected)
