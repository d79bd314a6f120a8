"""`python -m benchmarks.models`: whole transformers models on real text, stock SDPA against ours.

MiniLM with its pretrained weights, and BERT-base, a small Llama and a small T5 with random ones, read padded sentences:
as they come, next to others of their length (of four times as many, those in the middle), and without any padding. A
training step is forward, backward and AdamW, with the model's own dropout. Llama and T5 also generate tokens from these
sentences, which are padded on the left for Llama. Half of the heads are every second one of each layer, in Llama with
the key head that they share: closed by gates, or pruned from the weights. Stock T5 can't be pruned. Unpadded layers
compute real tokens alone. The hidden states or logits of ours are held to those of the stock model first. Goals of
unpadded MiniLM are checked at the end, on batches of about 50 % and of 100 % real tokens. About 12 minutes on 2 cores.

Exit status: 0; 1 if outputs differ; 2 if the models are not available; 130 where it was interrupted, with nothing
written.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table
from torch import Tensor

import heads_kernels as hk
from benchmarks import minilm
from benchmarks.report import make_console
from benchmarks.results import Outcome, kept_file, this_machine, write_whole
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
class Row:
    """One candidate in one use; `times_stock` is the stock model's time divided by its own."""

    model: str
    batch: str
    use: str
    candidate: str
    ms: float
    times_stock: float


@dataclass(frozen=True)
class Goal:
    """What `candidate` should be at least times as fast as the stock model."""

    model: str
    batch: str
    use: str
    candidate: str
    wanted: float

    def outcome(self, rows: Sequence[Row]) -> Outcome | None:
        """None where no row is of this goal."""
        for row in rows:
            batch = row.batch.split(":")[0]
            if (row.model, batch, row.use, row.candidate) == (
                self.model, self.batch, self.use, self.candidate):  # fmt: skip
                got, met = f"{row.times_stock:.2f}x", row.times_stock >= self.wanted
                words = f"{row.model}, {row.batch}, {row.use}, {row.candidate}"
                return Outcome(words, WHOLE[0], f"{self.wanted:.2f}x", got, met)
        return None


#: The sentences of MiniLM's batch as they come are padded by half.
GOALS: Final = (
    Goal("MiniLM", "as they come", "inference", WHOLE[2], 2.0),
    Goal("MiniLM", "as they come", "training step", WHOLE[2], 1.8),
    Goal("MiniLM", "no padding", "inference", WHOLE[2], 0.98),
    Goal("MiniLM", "no padding", "training step", WHOLE[2], 0.98),
)


@dataclass(frozen=True)
class Batch:
    name: str
    ids: Tensor  # [B, T]
    real: Tensor  # bool [B, T]

    @classmethod
    def of(cls, count: int) -> Batch:
        """Sentences as they come."""
        ids, lengths = minilm.tokens(count)
        return cls("as they come", ids, torch.arange(ids.shape[1]) < lengths[:, None])

    @classmethod
    def by_length(cls, count: int) -> Batch:
        """Sentences beside others of their length."""
        ids, lengths = minilm.tokens(4 * count)
        start = (len(lengths) - count) // 2
        chosen = lengths.argsort(stable=True)[start : start + count]
        ids, lengths = ids[chosen, : lengths[chosen].max()], lengths[chosen]
        return cls("by length", ids, torch.arange(ids.shape[1]) < lengths[:, None])

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


def bert_base() -> Model:
    """BERT-base as its configuration's defaults give it, random weights."""
    import transformers

    return _random(transformers.BertModel, transformers.BertConfig(), add_pooling_layer=False)


def llama(layers: int = 6) -> Model:
    """A causal model with rotary positions and 8 heads on 4 key heads, random weights."""
    import transformers

    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        eos_token_id=None, pad_token_id=0)  # fmt: skip
    return _random(transformers.LlamaForCausalLM, config)


def t5(layers: int = 6) -> Model:
    """T5-small with a small vocabulary, random weights."""
    import transformers

    config: Any = transformers.T5Config(vocab_size=VOCABULARY, num_layers=layers, eos_token_id=None,
        pad_token_id=0)  # fmt: skip
    config.decoder_start_token_id = 0
    return _random(transformers.T5ForConditionalGeneration, config)


def _random(kind: Any, config: Any, **options: Any) -> Model:
    torch.manual_seed(0)
    model: Model = kind(config, **options)
    model.set_attn_implementation("sdpa")
    return model.eval()


def half(model: Model) -> dict[int, list[int]]:
    """Every second head of every layer, and of grouped heads every second group."""
    return {
        layer.index: [
            h for h in range(layer.num_heads) if h // (layer.num_heads // layer.num_key_heads) % 2
        ]
        for layer in hk.heads.attention_layers(model)
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


def measure(
    name: str, models: dict[str, Model], batch: Batch, budget_s: float, least: int
) -> list[Row]:
    """All candidates in turn, in every use that the model has."""
    rows = []
    stock = models[WHOLE[0]]
    for use, prepare in USES.items():
        if use == "generation" and not stock.can_generate():
            continue
        given = prompts(stock, batch) if use == "generation" else batch
        calls = {candidate: prepare(model, given) for candidate, model in models.items()}
        times = time_in_turn(calls, budget_s=budget_s, least=least, warmup=1)
        ms = {candidate: timing.median * 1e3 for candidate, timing in times.items()}
        rows += [
            Row(name, str(batch), use, candidate, ms[candidate], ms[WHOLE[0]] / ms[candidate])
            for candidate in models
        ]
    return rows


def prompts(model: Model, batch: Batch) -> Batch:
    """What the model generates from: a decoder continues at the right end."""
    return batch if model.config.is_encoder_decoder else batch.on_the_left()


def table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    result = Table(title=f"{first.model}, {first.batch}", title_justify="left", box=None)
    by_use = {use: found for use in USES if (found := [row for row in rows if row.use == use])}
    result.add_column("")
    for use in by_use:
        result.add_column(f"{use} ms", justify="right")
        result.add_column("x stock", justify="right")
    for line in zip(*by_use.values(), strict=True):
        cells = [
            f"{number:.{digits}f}"
            for row in line
            for number, digits in ((row.ms, 1), (row.times_stock, 2))
        ]
        result.add_row(line[0].candidate, *cells)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--smoke", action="store_true",
        help="two layers of MiniLM, Llama and T5 on few sentences: do they run?")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here")
    parser.add_argument(
        "--keep", action="store_true", help="write a whole run beside the kept results"
    )
    options = parser.parse_args(arguments)
    if options.keep and options.smoke:
        parser.error("--keep is for whole runs; leave out --smoke")
    try:
        return _run(options)
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    console, machine, load_before = make_console(), this_machine(), os.getloadavg()[0]
    smoke: bool = options.smoke
    shortened = {"num_hidden_layers": 2} if smoke else {}
    layers, few = (2, 4) if smoke else (6, 8)
    jobs: list[tuple[str, Callable[[], Model], int]] = [
        ("MiniLM", lambda: minilm.load(attn_implementation="sdpa", **shortened), 4 if smoke else 32),
        *([] if smoke else [("BERT-base", bert_base, few)]),
        ("Llama-shaped", lambda: llama(layers), few),
        ("T5-small", lambda: t5(layers), few),
    ]  # fmt: skip
    rows: list[Row] = []
    for name, load, count in jobs:
        try:
            models = candidates(load())
            batches = [Batch.of(count), Batch.by_length(count), Batch.of(count).whole()]
        except minilm.Unavailable as error:
            console.print(f"no model: {error}")
            return 2
        for batch in batches[: 1 if smoke else 3]:
            whole = models[WHOLE[0]]
            read = (batch, prompts(whole, batch)) if whole.can_generate() else (batch,)
            failures = [failure for part in read for failure in differences(models, part)]
            for failure in failures:
                console.print(f"FAIL {name}, {batch}: {failure}")
            if failures:
                return 1
            found = measure(name, models, batch, *((0.1, 1) if smoke else (12.0, 5)))
            console.print(table(found))
            rows += found
    goals = [outcome for goal in GOALS if (outcome := goal.outcome(rows))]
    for outcome in () if smoke else goals:
        verdict = "met" if outcome.met else "short"
        console.print(f"{verdict}: {outcome.goal}: {outcome.got}, wanted {outcome.wanted}")
    numbers = {
        "machine": asdict(machine),
        "transformers": version("transformers"),
        "load": load_before,
        "rows": [asdict(row) for row in rows],
        "goals": [asdict(outcome) for outcome in goals],
    }
    kept = kept_file(machine).with_suffix(".models.json")
    for path in (options.json, kept if options.keep else None):
        if path:
            write_whole(path, json.dumps(numbers, indent=1) + "\n")
            console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
