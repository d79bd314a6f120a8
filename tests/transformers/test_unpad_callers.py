"""`use(model, unpad=True)` under what runs models: adapters, pipelines, sentence embeddings, the Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


# ---------------------------------------------------------------------- pipelines
#: Tasks, families and classes; the side of the padding, arguments, and what a row of the result is read as.
PIPELINES: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("feature-extraction", "bert", "BertModel", "right", {}),
    ("text-classification", "bert", "BertForSequenceClassification", "right", {"top_k": None}),
    ("text-classification", "llama", "LlamaForSequenceClassification", "right", {"top_k": None}),
    ("fill-mask", "bert", "BertForMaskedLM", "right", {"top_k": 40}),
    ("text-generation", "gpt2", "GPT2LMHeadModel", "left", {"max_new_tokens": 6, "do_sample": False}),
]  # fmt: skip


def read(task: str, rows: Any, sentence: str) -> Any:
    if task == "feature-extraction":
        return torch.tensor(rows)[0, : len(sentence.split())]
    if task == "text-generation":
        return torch.tensor([int(word[1:]) for word in rows[0]["generated_text"].split()])
    scores = {str(row.get("label", row.get("token"))): torch.tensor(row["score"]) for row in rows}
    return dict(sorted(scores.items()))


@pytest.mark.parametrize(("task", "name", "kind", "side", "options"), PIPELINES)
def test_pipelines(task: str, name: str, kind: str, side: str, options: dict[str, Any]) -> None:
    """They read the first token, the last one that is no padding, one in the middle, or all real ones."""
    found = []
    asked = [each.replace(each.split()[1], "[M]") for each in SENTENCES]
    for unpad in (False, True):
        model = build(name, model=kind)
        pipeline = transformers.pipeline(task, model=model, tokenizer=tokenizer(side), device="cpu")
        if unpad:
            use(pipeline.model, unpad=True)
        sentences = asked if task == "fill-mask" else SENTENCES
        results = pipeline(sentences, batch_size=4, **options)
        found.append([read(task, *each) for each in zip(results, SENTENCES, strict=True)])
    assert_alike(found[1], found[0])
    assert all(packed_layers(pipeline.model))


# ---------------------------------------------------------------------- sentence embeddings
class Embedder(nn.Module):
    """A model, the mean over real tokens and a norm, as sentence-transformers has them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert"])
def test_mean_pooling(name: str) -> None:
    """Embeddings of a padded batch, and gradients of a contrastive loss on them."""
    found = []
    for unpad in (False, True):
        embedder = Embedder(build(name))
        if unpad:
            use(embedder.model, unpad=True)
        tokens = tokenizer()(SENTENCES, padding=True, return_tensors="pt")
        embeddings = embedder(tokens["input_ids"], tokens["attention_mask"])
        scores = embeddings @ embeddings.T.roll(1, 0) * 5
        nn.functional.cross_entropy(scores, torch.arange(len(scores))).backward()
        gradients = {n: p.grad for n, p in embedder.named_parameters() if p.grad is not None}
        found.append({"embeddings": embeddings.detach(), **gradients})
    assert_alike(found[1], found[0])
    assert all(packed_layers(embedder))


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
