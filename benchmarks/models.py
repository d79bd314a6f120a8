"""`python -m benchmarks.models`: whole transformers models on real text, stock SDPA against ours.

MiniLM with its pretrained weights and BERT-base with random ones read padded sentences: as they come, next to others of
their length (of four times as many, those in the middle), and without any padding. A training step is forward,
backward and AdamW, with the model's own dropout. Half of the heads are every second one of each layer: closed by gates,
or pruned from the weights. Unpadded layers compute real tokens alone. What ours computes is held to the stock model
first.

Exit status: 0; 1 if outputs differ; 2 if the models are not available.
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
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import heads_kernels as hk
from benchmarks import minilm
from benchmarks.report import make_console
from benchmarks.results import kept_file, this_machine, write_whole
from heads_kernels.testing import time_in_turn

#: Of hidden states that LayerNorm holds near 1, after all layers in float32.
TOLERANCE = 1e-4

#: Candidates with all heads.
WHOLE = ("stock SDPA", "ours", "ours, unpadded")

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

    def hidden(self, model: Model) -> Tensor:
        """`[B, T, width]`, padded rows 0."""
        out = model(input_ids=self.ids, attention_mask=self.real.long()).last_hidden_state
        return torch.where(self.real[..., None], out, 0.0)


def bert_base() -> Model:
    """BERT-base as its configuration's defaults give it, random weights."""
    import transformers

    torch.manual_seed(0)
    model: Model = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)
    model.set_attn_implementation("sdpa")
    return model.eval()


def half(model: Model) -> dict[int, list[int]]:
    """Every second head of every layer."""
    return {
        layer.index: list(range(1, layer.num_heads, 2))
        for layer in hk.heads.attention_layers(model)
    }


def candidates(stock: Model) -> dict[str, Model]:
    """The same weights with all heads and with half of them."""
    use = hk.integrations.transformers.use
    ours = use(copy.deepcopy(stock))
    unpadded = use(copy.deepcopy(stock), unpad=True)
    closed = copy.deepcopy(ours)
    pruned = {
        name: copy.deepcopy(m) for name, m in zip(WHOLE, (stock, ours, unpadded), strict=True)
    }
    hk.heads.close(closed, half(closed))
    for model in pruned.values():
        hk.heads.prune(model, half(model))
    return {
        **dict(zip(WHOLE, (stock, ours, unpadded), strict=True)),
        "ours, half of the heads closed": closed,
        **{f"{name}, half of the heads pruned": model for name, model in pruned.items()},
    }


def differences(models: dict[str, Model], batch: Batch) -> Iterator[str]:
    """Where our outputs differ from the stock model's, with all heads and with half of them."""
    with torch.no_grad():
        out = {name: batch.hidden(model) for name, model in models.items()}
    for name in out:
        like = WHOLE[0] if name in WHOLE else f"{WHOLE[0]}, half of the heads pruned"
        error = float((out[name] - out[like]).abs().max())
        if not error <= TOLERANCE:
            yield f"{name} differs from {like} by {error:.1e}, more than {TOLERANCE:.0e}"


def inference(model: Model, batch: Batch) -> Callable[[], object]:
    """The hidden states of a batch."""
    model.eval()

    @torch.inference_mode()
    def call() -> Tensor:
        return batch.hidden(model)

    return call


def training(model: Model, batch: Batch) -> Callable[[], object]:
    """A step of AdamW; its rate is 0, so that weights stay what they are."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def call() -> None:
        optimizer.zero_grad()
        loss: Any = batch.hidden(model).square().mean()
        loss.backward()
        optimizer.step()

    return call


def measure(
    name: str, models: dict[str, Model], batch: Batch, budget_s: float, least: int
) -> list[Row]:
    """All candidates in turn, for inference and for training."""
    rows = []
    for use, prepare in (("inference", inference), ("training step", training)):
        calls = {candidate: prepare(model, batch) for candidate, model in models.items()}
        times = time_in_turn(calls, budget_s=budget_s, least=least, warmup=1)
        ms = {candidate: timing.median * 1e3 for candidate, timing in times.items()}
        stock = ms["stock SDPA"]
        rows += [
            Row(name, str(batch), use, candidate, ms[candidate], stock / ms[candidate])
            for candidate in models
        ]
    return rows


def table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    result = Table(title=f"{first.model}, {first.batch}", title_justify="left", box=None)
    for head in ("", "inference ms", "x stock", "training step ms", "x stock"):
        result.add_column(head, justify="right" if head else "left")
    by_use = {
        use: [row for row in rows if row.use == use] for use in ("inference", "training step")
    }
    for pair in zip(*by_use.values(), strict=True):
        cells = [
            f"{number:.{digits}f}"
            for row in pair
            for number, digits in ((row.ms, 1), (row.times_stock, 2))
        ]
        result.add_row(pair[0].candidate, *cells)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--smoke", action="store_true", help="two layers of MiniLM on few sentences: does it run?"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here")
    parser.add_argument(
        "--keep", action="store_true", help="write a whole run beside the kept results"
    )
    options = parser.parse_args(arguments)
    if options.keep and options.smoke:
        parser.error("--keep is for whole runs; leave out --smoke")
    console, load_before = make_console(), os.getloadavg()[0]
    shortened = {"num_hidden_layers": 2} if options.smoke else {}
    try:
        jobs: list[tuple[str, Callable[[], Model], int]] = [
            ("MiniLM", lambda: minilm.load(attn_implementation="sdpa", **shortened),
             4 if options.smoke else 32)
        ]  # fmt: skip
        if not options.smoke:
            jobs.append(("BERT-base", bert_base, 8))
        batches = [
            [Batch.of(n), Batch.by_length(n), Batch.of(n).whole()][: 1 if options.smoke else 3]
            for _, _, n in jobs
        ]
    except minilm.Unavailable as error:
        console.print(f"no model: {error}")
        return 2
    rows: list[Row] = []
    for (name, load, _), read in zip(jobs, batches, strict=True):
        models = candidates(load())
        for batch in read:
            failures = list(differences(models, batch))
            for failure in failures:
                console.print(f"FAIL {name}, {batch}: {failure}")
            if failures:
                return 1
            found = measure(name, models, batch, *((0.1, 1) if options.smoke else (60.0, 9)))
            console.print(table(found))
            rows += found
    machine = this_machine()
    numbers = {
        "machine": asdict(machine),
        "transformers": version("transformers"),
        "load": load_before,
        "rows": [asdict(row) for row in rows],
    }
    kept = kept_file(machine).with_suffix(".models.json")
    for path in (options.json, kept if options.keep else None):
        if path:
            write_whole(path, json.dumps(numbers, indent=1) + "\n")
            console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
