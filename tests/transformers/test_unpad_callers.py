"""`use(model, unpad=True)` under what runs models: adapters and the Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")

import tokenizers
import transformers

from heads_kernels.integrations.transformers import use
from tests.support.tiny_models import outputs, packed_layers, with_gradients
from tests.transformers.test_unpad import NO_DROPOUT, build

SENTENCES = ["w5 w9 w11 w8 w30", "w7 w6", "w12 w13 w14 w15 w16 w17 w18 w19", "w21 w5 w20"]


def tokenizer(side: str = "right") -> Any:
    """Words w4 to w39 are the tokens of these numbers."""
    names = {"pad": "[PAD]", "bos": "[BOS]", "eos": "[EOS]", "mask": "[M]"}
    special = {f"{name}_token": token for name, token in names.items()}
    vocabulary = {token: number for number, token in enumerate(special.values())}
    vocabulary |= {f"w{number}": number for number in range(4, 40)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, padding_side=side, model_max_length=32, **special
    )


# ---------------------------------------------------------------------- peft
TARGETS = {
    "bert": ["query", "value", "dense"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "t5": ["q", "v", "wo"],
}


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="a model with adapters")
    torch.manual_seed(6)
    config = peft.LoraConfig(
        r=4, target_modules=TARGETS[model.config.model_type], init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


@pytest.mark.check
@pytest.mark.parametrize("order", ["adapters first", "use first"])
@pytest.mark.parametrize("name", TARGETS)
def test_training_step_with_adapters(name: str, order: str) -> None:
    """Gradients of the adapters, which alone are trained; and what the model gives after a step."""
    stock = with_lora(build(name)).eval()
    if order == "use first":
        model = with_lora(use(build(name), unpad=True)).eval()
    else:
        model = with_lora(build(name)).eval()
        use(model.get_base_model(), unpad=True)
    expected = with_gradients(stock)
    assert sum("lora_" in part for part in expected) == len(expected) - 1
    assert_alike(with_gradients(model), expected)
    for each in (stock, model):
        torch.optim.SGD(each.parameters(), lr=1e-2).step()
    assert_alike(outputs(model), outputs(stock))
    assert all(packed_layers(model))


@pytest.mark.check
def test_merged_and_disabled_adapters() -> None:
    stock = with_lora(build("bert")).eval()
    model = copy.deepcopy(stock)
    use(model.get_base_model(), unpad=True)
    with stock.disable_adapter(), model.disable_adapter():
        assert_alike(outputs(model), outputs(stock))
    stock.merge_adapter()
    model.merge_adapter()
    assert_alike(outputs(model), outputs(stock))
    stock.unmerge_adapter()
    model.unmerge_adapter()
    whole = model.merge_and_unload()
    assert_alike(outputs(whole), outputs(stock))
    assert len(packed_layers(whole)) == 2
    assert all(packed_layers(whole))


# ---------------------------------------------------------------------- the Trainer
@pytest.mark.check
def test_trainer(tmp_path: Path) -> None:
    """Weights after steps on padded batches."""
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    tokens = tokenizer()
    rows = [
        {**tokens(sentence), "label": number % 2} for number, sentence in enumerate(SENTENCES * 2)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trained = []
    for unpad in (False, True):
        model = build("bert", model="BertForSequenceClassification", **NO_DROPOUT)
        if unpad:
            use(model, unpad=True)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=transformers.DataCollatorWithPadding(tokens),
        ).train()
        trained.append({n: p.detach() - before[n] for n, p in model.named_parameters()})
    assert any(change.any() for change in trained[0].values())
    assert_alike(trained[1], trained[0])
    assert all(packed_layers(model))
