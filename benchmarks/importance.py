"""Which ways of scoring heads agree with leaving them out, on MiniLM and real text.

The loss has no labels: outputs are embeddings of sentences, the mean over their tokens. Every method reads the first
half of the sentences, and its order of heads is held to how far the embeddings of the other half move when a head is
left out (Spearman). The row "leave_one_out" is the ceiling: the same measurement on other sentences.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

import heads_kernels as hk
from benchmarks import minilm
from benchmarks.results import Found
from benchmarks.settings import Settings

Batch = dict[str, Tensor]
#: [CLS] and [SEP], which confidence leaves out.
SPECIAL = (101, 102)


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


def measure(settings: Settings) -> Iterator[Found]:
    """Each method's Spearman with leaving heads out on other sentences, in all layers and within each, and its time."""
    count = 8 if settings.form == "smoke" else 64
    model = hk.integrations.transformers.use(minilm.load())
    read, held_out = (minilm.batches(count, 16, slice(half, None, 2)) for half in (0, 1))

    def scored(data: list[Batch], **options: Any) -> hk.analysis.HeadScores:
        return hk.analysis.importance(model, data, **{"loss": embeddings, **options})

    H = sum(layer.num_heads for layer in hk.heads.attention_layers(model))
    found = Found("importance", f"Importance of MiniLM's {H} heads, {count} sentences in two halves", {
        "": "{method}",
        "Spearman": "{spearman:.2f}",
        "within layers": "{within_layers:.2f}",
        "seconds": "{seconds:.1f}",
    })  # fmt: skip
    found.notes.append(f"random orders: 0.00 +- {(H - 1) ** -0.5:.2f} in all layers")
    truth = scored(held_out, method="leave_one_out")
    for name, options in METHODS.items():
        start = time.perf_counter()
        scores = scored(read, **options)
        seconds = time.perf_counter() - start
        found.rows.append({"method": name, "spearman": scores.spearman(truth),
            "within_layers": within_layers(scores, truth), "seconds": seconds})  # fmt: skip
    yield found
