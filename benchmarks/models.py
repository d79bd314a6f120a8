"""Whole transformers models on real text, stock SDPA against ours.

MiniLM with its pretrained weights, and BERT-base, a small Llama and a small T5 with random ones, read padded sentences:
as they come, next to others of their length (of four times as many, those in the middle), and without any padding. A
training step is forward, backward and AdamW, with the model's own dropout. Llama and T5 also generate tokens from these
sentences, which are padded on the left for Llama. Half of the heads are every second one of each layer, in Llama with
the key head that they share: closed by gates, or pruned from the weights. Stock T5 can't be pruned. Unpadded layers
compute real tokens alone. The hidden states or logits of ours are held to those of the stock model first. About 12
minutes on 2 cores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import heads_kernels as hk
from benchmarks import minilm
from benchmarks.measure import Found, Row
from benchmarks.settings import Settings
from heads_kernels.testing import time_in_turn

#: Of hidden states and logits near 1, after all layers in float32.
TOLERANCE = 1e-4

#: Ids of the tokenizer are taken modulo this by models with random weights: their output layer stays small.
VOCABULARY: Final = 4096

#: Tokens that are generated after the prompt.
GENERATED: Final = 16

#: Candidates with all heads.
WHOLE = ("stock SDPA", "ours", "ours, unpadded")
_PRUNED: Final = "half of the heads pruned"
_CLOSED: Final = "ours, half of the heads closed"

Model = Any


@dataclass(frozen=True)
class Batch:
    name: str
    ids: Tensor  # [B, T]
    real: Tensor  # bool [B, T]

    @classmethod
    def cut(cls, name: str, ids: Tensor, lengths: Tensor) -> Batch:
        """Sentences of these lengths, without columns of padding alone."""
        T = int(lengths.max())
        return cls(name, ids[:, :T], torch.arange(T) < lengths[:, None])

    @classmethod
    def of(cls, count: int, by_length: bool = False) -> Batch:
        """Sentences as they come; or, of four times as many, those of middle length."""
        ids, lengths = minilm.tokens(4 * count if by_length else count)
        if by_length:
            start = (len(lengths) - count) // 2
            chosen = lengths.argsort(stable=True)[start : start + count]
            ids, lengths = ids[chosen], lengths[chosen]
        return cls.cut("by length" if by_length else "as they come", ids, lengths)

    def whole(self) -> Batch:
        """Its sentences repeated to the length of the longest."""
        B, T = self.ids.shape
        places = torch.arange(T) % self.real.sum(1, keepdim=True)
        return Batch("no padding", self.ids.gather(1, places), torch.ones(B, T, dtype=torch.bool))

    def __str__(self) -> str:
        B, T = self.ids.shape
        return f"{self.name}: B{B} T{T}, {int(self.real.sum())} of {B * T} tokens real"

    def on_the_left(self) -> Batch:
        """The same sentences, with the padding before them."""
        T = self.ids.shape[1]
        places = (torch.arange(T) + self.real.sum(1, keepdim=True)) % T
        return Batch(self.name, self.ids.gather(1, places), self.real.gather(1, places))

    def inputs(self, model: Model) -> dict[str, Tensor]:
        return {"input_ids": self.ids % model.config.vocab_size, "attention_mask": self.real.long()}

    def output(self, model: Model) -> Tensor:
        """Hidden states or logits `[B, T, ...]`, padded rows 0; a decoder reads the same sentences as its encoder."""
        inputs = self.inputs(model)
        if model.config.is_encoder_decoder:
            inputs |= {f"decoder_{name}": tensor for name, tensor in inputs.items()}
        found = model(**inputs, use_cache=False)
        out = found.logits if "logits" in found else found.last_hidden_state
        return torch.where(self.real[..., None], out, 0.0)


def bert(**sizes: Any) -> Model:
    """An encoder of these sizes, by default BERT-base, random weights."""
    import transformers

    config = transformers.BertConfig(**sizes)
    return random_model(transformers.BertModel, config, add_pooling_layer=False)


def llama(layers: int = 6) -> Model:
    """A causal model with rotary positions and 8 heads on 4 key heads, random weights."""
    import transformers

    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        eos_token_id=None, pad_token_id=0)  # fmt: skip
    return random_model(transformers.LlamaForCausalLM, config)


def t5(layers: int = 6) -> Model:
    """T5-small with a small vocabulary, random weights."""
    import transformers

    config: Any = transformers.T5Config(vocab_size=VOCABULARY, num_layers=layers, eos_token_id=None, pad_token_id=0)
    config.decoder_start_token_id = 0
    return random_model(transformers.T5ForConditionalGeneration, config)


def random_model(kind: Any, config: Any, **options: Any) -> Model:
    """On SDPA, in evaluation mode; the same every time."""
    torch.manual_seed(0)
    model: Model = kind(config, **options)
    model.set_attn_implementation("sdpa")
    return model.eval()


def half(model: Model) -> dict[int, list[int]]:
    """Every second head of every layer, and of grouped heads every second group."""
    return {
        layer.index: [h for h in range(layer.num_heads) if h // (layer.num_heads // layer.num_key_heads) % 2]
        for layer in hk.heads.projected_layers(model)
    }


def candidates(stock: Model) -> dict[str, Model]:
    """The same weights with all heads and with half of them."""
    use = hk.integrations.transformers.use
    ours = use(copy.deepcopy(stock))
    unpadded = use(copy.deepcopy(stock), unpad=True)
    whole = dict(zip(WHOLE, (stock, ours, unpadded), strict=True))
    closed = copy.deepcopy(ours)
    hk.heads.close(closed, half(closed))
    pruned = {
        f"{name}, {_PRUNED}": copy.deepcopy(model)
        for name, model in whole.items()
        if not (model is stock and stock.config.model_type == "t5")
    }
    for model in pruned.values():
        hk.heads.prune(model, half(model))
    return {**whole, _CLOSED: closed, **pruned}


def differences(models: dict[str, Model], batch: Batch) -> Iterator[str]:
    """Where our outputs differ from the stock model's, with all heads and with half of them."""
    with torch.no_grad():
        out = {name: batch.output(model.eval()) for name, model in models.items()}
    for name in out:
        reduced = f"{WHOLE[0]}, {_PRUNED}" if f"{WHOLE[0]}, {_PRUNED}" in out else _CLOSED
        like = WHOLE[0] if name in WHOLE else reduced
        error = float((out[name] - out[like]).abs().max())
        if not error <= TOLERANCE:
            yield f"{name} differs from {like} by {error:.1e}, more than {TOLERANCE:.0e}"


def inference(model: Model, batch: Batch) -> Callable[[], object]:
    """The hidden states or logits of a batch."""
    model.eval()

    @torch.inference_mode()
    def call() -> Tensor:
        return batch.output(model)

    return call


def training(model: Model, batch: Batch) -> Callable[[], object]:
    """A step of AdamW; its rate is 0, so that weights stay what they are."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def call() -> None:
        optimizer.zero_grad()
        loss: Any = batch.output(model).square().mean()
        loss.backward()
        optimizer.step()

    return call


def generation(model: Model, batch: Batch) -> Callable[[], object]:
    """`GENERATED` tokens after every sentence, or by the decoder of its encoder's."""
    model.eval()
    inputs = batch.inputs(model)
    length = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED}

    def call() -> Tensor:
        tokens: Tensor = model.generate(**inputs, **length, do_sample=False, use_cache=True)
        return tokens

    return call


#: Uses of a model, and what prepares a call.
USES: Final = {"inference": inference, "training step": training, "generation": generation}


def measure(settings: Settings) -> Iterator[Found]:
    """Every model on every batch; smoke: two layers of MiniLM, Llama and T5 on few sentences."""
    smoke = settings.form == "smoke"
    shortened = {"num_hidden_layers": 2} if smoke else {}
    layers, few = (2, 4) if smoke else (6, 8)
    jobs: list[tuple[str, Callable[[], Model], int]] = [
        ("MiniLM", lambda: minilm.load(attn_implementation="sdpa", **shortened), 4 if smoke else 32),
        *([] if smoke else [("BERT-base", bert, few)]),
        ("Llama-shaped", lambda: llama(layers), few),
        ("T5-small", lambda: t5(layers), few),
    ]
    for name, load, count in jobs:
        models = candidates(load())
        whole = models[WHOLE[0]]
        batches = [Batch.of(count), Batch.of(count, by_length=True), Batch.of(count).whole()]
        for batch in batches[: 1 if smoke else 3]:
            found = Found("models", f"{name}, {batch}", {
                "": "{candidate}", "use": "{use}", "ms": "{ms:.1f}", "x stock": "{times_stock:.2f}"
            })  # fmt: skip
            read = (batch, prompts(whole, batch)) if whole.can_generate() else (batch,)
            found.failures += [f"{name}, {batch}: {text}" for part in read for text in differences(models, part)]
            if not found.failures:
                found.rows = rows(name, models, batch, *((0.1, 1) if smoke else (12.0, 5)))
            yield found


def timed(calls: dict[str, Callable[[], object]], budget_s: float, least: int) -> list[Row]:
    """All candidates in turn; `times_stock` is the stock model's time divided by theirs."""
    times = time_in_turn(calls, budget_s=budget_s, least=least, warmup=1)
    ms = {candidate: timing.median * 1e3 for candidate, timing in times.items()}
    return [
        {"candidate": candidate, "ms": ms[candidate], "times_stock": ms[WHOLE[0]] / ms[candidate]}
        for candidate in calls
    ]


def rows(name: str, models: dict[str, Model], batch: Batch, budget_s: float, least: int) -> list[Row]:
    """All candidates in every use that the model has."""
    found = []
    stock = models[WHOLE[0]]
    for use, prepare in USES.items():
        if use == "generation" and not stock.can_generate():
            continue
        given = prompts(stock, batch) if use == "generation" else batch
        calls = {candidate: prepare(model, given) for candidate, model in models.items()}
        found += [{"model": name, "batch": str(batch), "use": use, **row} for row in timed(calls, budget_s, least)]
    return sorted(found, key=lambda row: [*models].index(row["candidate"]))


def prompts(model: Model, batch: Batch) -> Batch:
    """What the model generates from: a decoder continues at the right end."""
    return batch if model.config.is_encoder_decoder else batch.on_the_left()
