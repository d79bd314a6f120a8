"""`python -m benchmarks.importance`: which ways of scoring heads agree with leaving them out, on MiniLM and real text.

The loss has no labels: outputs are embeddings of sentences, the mean over their tokens. Every method reads the first
half of the sentences, and its order of heads is held to how far the embeddings of the other half move when a head is
left out (Spearman). The row "leave_one_out" is the ceiling: the same measurement on other sentences.

Exit status: 0; 2 where the model cannot be had.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

import heads_kernels as hk
from benchmarks import minilm
from benchmarks.report import make_console
from benchmarks.results import this_machine, write_whole

Batch = dict[str, Tensor]
#: [CLS] and [SEP], which confidence leaves out.
SPECIAL = (101, 102)


@dataclass(frozen=True)
class Row:
    """A method: its Spearman with leaving heads out on other sentences, in all layers and within each, and its time."""

    method: str
    spearman: float
    within_layers: float
    seconds: float


def embeddings(model: Any, batch: Batch) -> Tensor:
    """`[B, width]`: the mean of the hidden states of real tokens."""
    real = batch["attention_mask"][..., None]
    hidden: Tensor = model(**batch).last_hidden_state
    return (hidden * real).sum(1) / real.sum(1)


def relevant_embeddings(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Embeddings, each number with as much relevance as it is large."""
    found = embeddings(model, batch)
    return found, found.abs()


METHODS: dict[str, dict[str, Any]] = {
    "leave_one_out": {"method": "leave_one_out"},
    "fisher": {"method": "fisher"},
    "gradient, by example": {"reduce": "example"},
    "gradient, by token": {"reduce": "token"},
    "gradient, by batch": {"reduce": "batch"},
    "gradient, by example, l2 per layer": {"reduce": "example", "normalise": "l2"},
    "gradient, by token, l2 per layer": {"reduce": "token", "normalise": "l2"},
    "confidence": {"method": "confidence", "exclude_keys": SPECIAL},
    "lrp": {"method": "lrp", "loss": relevant_embeddings},
}


def within_layers(scores: hk.analysis.HeadScores, truth: hk.analysis.HeadScores) -> float:
    """The mean over layers of the Spearman of their heads."""
    each = [
        _of_layer(scores, index).spearman(_of_layer(truth, index))
        for index in range(len(scores.layers))
    ]
    return sum(each) / len(each)


def _of_layer(scores: hk.analysis.HeadScores, index: int) -> hk.analysis.HeadScores:
    parts = (scores.layers, scores.kinds, scores.scores)
    layers, kinds, values = (part[index : index + 1] for part in parts)
    return hk.analysis.HeadScores(layers, kinds, values, scores.method)  # type: ignore[arg-type]


def measure(model: Any, read: list[Batch], held_out: list[Batch]) -> list[Row]:
    def scored(data: list[Batch], **options: Any) -> hk.analysis.HeadScores:
        return hk.analysis.importance(model, data, **{"loss": embeddings, **options})

    truth = scored(held_out, method="leave_one_out")
    rows = []
    for name, options in METHODS.items():
        start = time.perf_counter()
        scores = scored(read, **options)
        seconds = time.perf_counter() - start
        rows.append(Row(name, scores.spearman(truth), within_layers(scores, truth), seconds))
    return rows


def table(rows: Sequence[Row], title: str) -> Table:
    result = Table(title=title, title_justify="left", box=None)
    for head in ("", "Spearman", "within layers", "seconds"):
        result.add_column(head, justify="right" if head else "left")
    for row in rows:
        numbers = (f"{row.spearman:.2f}", f"{row.within_layers:.2f}", f"{row.seconds:.1f}")
        result.add_row(row.method, *numbers)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.importance", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--sentences", type=int, default=64, help="in both halves (64)")
    parser.add_argument("--batch", type=int, default=16, help="sentences in a batch (16)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="write all numbers here")
    options = parser.parse_args(arguments)
    console = make_console()
    try:
        model = hk.integrations.transformers.use(minilm.load())
        read, held_out = (
            minilm.batches(options.sentences, options.batch, slice(half, None, 2))
            for half in (0, 1)
        )
    except minilm.Unavailable as error:
        console.print(f"no model: {error}")
        return 2
    rows = measure(model, read, held_out)
    H = sum(layer.num_heads for layer in hk.heads.attention_layers(model))
    title = f"MiniLM, {H} heads, {options.sentences} sentences in two halves;\n"
    console.print(table(rows, f"{title}random orders: 0.00 +- {(H - 1) ** -0.5:.2f} in all layers"))
    if options.out:
        numbers = {"machine": asdict(this_machine()), "rows": [asdict(row) for row in rows]}
        write_whole(options.out, json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
