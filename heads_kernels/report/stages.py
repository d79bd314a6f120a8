"""The measurements of a report: each a function that returns plain data, with the rows of its CSV file."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import isnan
from typing import Any, Final

import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.report.inputs import Batch, Inputs, batch_of
from heads_kernels.report.results import Found

#: The number of most frequent words that do not count as rare, as in Voita et al. 2019.
COMMON: Final = 500
#: Steps of the pruning curve, and random orders to compare with, without and with --fast.
STEPS: Final = {False: 10, True: 5}
ORDERS: Final = {False: 3, True: 1}
#: What --fast does without.
LEFT_OUT: Final = (
    "heads are not left out one at a time, and the pruning curve has 5 steps and 1 random order "
    "instead of 10 and 3"
)


@dataclass(frozen=True)
class Stage:
    """A measurement.

    Attributes:
        compute: returns values that JSON can hold, with the rows of the CSV file under "table".
        passes: about how many times each batch goes through the model.
    """

    compute: Callable[[Inputs], Found]
    passes: Callable[[Inputs], int]


# ---------------------------------------------------------------------- model and text
def model(inputs: Inputs) -> Found:
    """The model's layers and the size of the text."""
    config = inputs.model.config
    table = [
        {
            "layer": layer.index,
            "name": layer.name,
            "kind": layer.kind,
            "heads": layer.num_heads,
            "key_heads": layer.num_key_heads,
            "head_dim": layer.head_dim,
            "value_dim": layer.value_dim,
        }
        for layer in inputs.layers
    ]
    return {
        "table": table,
        "name": inputs.name,
        "family": config.model_type,
        "parameters": sum(weight.numel() for weight in inputs.model.parameters()),
        "lines": len(inputs.ids),
        "tokens": sum(map(len, inputs.ids)),
        "version": hk.__version__,
    }


# ---------------------------------------------------------------------- what heads attend to
def statistics(inputs: Inputs) -> Found:
    """`hk.analysis.statistics`, with the first token, separators and punctuation as sets."""
    found = hk.analysis.statistics(
        inputs.model,
        inputs.batches,
        exclude_keys=_special(inputs),
        token_sets={
            "first": _first,
            "separator": _ids(inputs, "sep", "eos"),
            "punctuation": _marks(inputs),
        },
    )
    return {"table": _rows(inputs, found.measures)}


def _first(batch: Batch) -> Tensor:
    """The first token of each line: [CLS], <s>, or a word."""
    return torch.zeros_like(batch["input_ids"], dtype=torch.bool).index_fill(
        1, torch.tensor([0]), 1
    )


def _special(inputs: Inputs) -> list[int]:
    """[CLS], [SEP], <s>, </s>: special tokens."""
    return _ids(inputs, "cls", "bos", "sep", "eos")


def _ids(inputs: Inputs, *names: str) -> list[int]:
    ids = [getattr(inputs.tokenizer, f"{name}_token_id") for name in names]
    return sorted({token for token in ids if token is not None})


def _marks(inputs: Inputs) -> list[int]:
    """Tokens of the text that are punctuation alone."""
    there = sorted({token for line in inputs.ids for token in line})
    return [
        token
        for token, word in zip(there, inputs.words(there), strict=True)
        if all(unicodedata.category(letter).startswith("P") for letter in word)
    ]


def roles(inputs: Inputs) -> Found:
    """`hk.analysis.roles`: heads that attend to one offset or to the rarest word, counted in the text itself.

    With few rare words chance alone finds the rarest: the role is left out if fewer than half of the words are rare.
    """
    special = _special(inputs)
    counts = Counter(token for line in inputs.ids for token in line if token not in special)
    enough = len(counts) >= 2 * COMMON
    found = hk.analysis.roles(
        inputs.model,
        inputs.batches,
        special=special,
        counts=counts if enough else None,
        common=COMMON,
    )
    named = {
        (role.layer, role.head): role.what for role in (*found.rare_word(), *found.positional())
    }
    rare = found.rare_words
    columns = {"offset_share": found.offset_share}
    table = _rows(inputs, columns | ({"rarest": rare.rarest} if rare else {}))
    for row in table:
        row["offset"] = int(found.offset[row["layer"]][row["head"]])
        row["role"] = named.get((row["name"], row["head"]), "")
    return {
        "table": table,
        "rarest_by_chance": rare and rare.chance[0],
        "common_words": COMMON,
        "different_words": len(counts),
    }


# ---------------------------------------------------------------------- how alike they are
def distance(inputs: Inputs) -> Found:
    """`hk.analysis.distance`: all pairs, means by head, and all heads in two dimensions."""
    found = hk.analysis.distance(inputs.model, inputs.batches)
    places, points = _places(inputs, found.layers), _rounded(found.embedding())
    table = []
    for row, (run, head) in enumerate(found.heads):
        own = found.block(run)
        table.append(
            {
                "layer": places[run],
                "head": head,
                "name": found.layers[run],
                "to_own_layer": float(own[head].sum() / max(len(own) - 1, 1)),
                "to_all": float(found.matrix[row].sum() / max(len(found.matrix) - 1, 1)),
                "x": points[row][0],
                "y": points[row][1] if len(points) > 1 else 0.0,
            }
        )
    return {"table": table, "matrix": _rounded(found.matrix)}


# ---------------------------------------------------------------------- which heads matter
def importance(inputs: Inputs) -> Found:
    """Importance without labels, from the change of the lines' embeddings. With --fast no head is left out."""
    scores = {
        "fisher": _fisher(inputs),
        "confidence": hk.analysis.importance(
            inputs.model, inputs.batches, method="confidence", exclude_keys=_special(inputs)
        ),
    }
    if inputs.fast:
        return {"table": _rows(inputs, scores), "fast": True}
    left_out = hk.analysis.importance(
        inputs.model, inputs.batches, embeddings, method="leave_one_out"
    )
    ranks = {name: each.spearman(left_out) for name, each in scores.items()}
    agreement = {name: None if isnan(rank) else rank for name, rank in ranks.items()}
    table = _rows(inputs, {"leave_one_out": left_out, **scores})
    return {"table": table, "spearman_with_leave_one_out": agreement}


@lru_cache(maxsize=1)
def _fisher(inputs: Inputs) -> hk.analysis.HeadScores:
    return hk.analysis.importance(inputs.model, inputs.batches, embeddings, method="fisher")


def embeddings(model: Any, batch: Batch) -> Tensor:
    """`[B, width]`: the mean of the last hidden states of the tokens, normalised to length 1."""
    hidden = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    mean = torch.where(real.bool(), hidden, 0).sum(1) / real.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


# ---------------------------------------------------------------------- how many can be closed
@torch.no_grad()
def pruning(inputs: Inputs) -> Found:
    """The cosine of the lines' embeddings with those of the whole model, as heads are closed in several orders.

    "order" is the (layer, head) of all heads, the least important first.
    """
    least_first = _fisher(inputs).ranked()
    orders = {"importance": least_first, "reversed": least_first[::-1]}
    for seed in range(ORDERS[inputs.fast]):
        chosen = torch.randperm(inputs.heads, generator=torch.Generator().manual_seed(seed))
        orders[f"random {seed + 1}"] = [least_first[index] for index in chosen.tolist()]
    whole = torch.cat([embeddings(inputs.model, batch) for batch in inputs.batches])

    @cache
    def cosine(closed: frozenset[tuple[str, int]]) -> float:
        heads: dict[str, list[int]] = {}
        for layer, head in closed:
            heads.setdefault(layer, []).append(head)
        hk.heads.close(inputs.model, heads)
        try:
            found = torch.cat([embeddings(inputs.model, batch) for batch in inputs.batches])
        finally:
            hk.heads.reopen(inputs.model)
        return float((found * whole).sum(1).mean())

    table = []
    steps = STEPS[inputs.fast]
    for step in range(steps + 1):
        count = round(step / steps * inputs.heads)
        row = {name: cosine(frozenset(order[:count])) for name, order in orders.items()}
        table.append({"closed_share": step / steps, "closed": count, **row})
    index = {layer.name: layer.index for layer in inputs.layers}
    order = [[index[layer], head] for layer, head in least_first]
    return {"table": table, "order": order, **({"fast": True} if inputs.fast else {})}


def _passes_of_pruning(inputs: Inputs) -> int:
    """Fisher information and the whole model (3), no head closed, the steps of each order, all heads closed."""
    return 4 + (STEPS[inputs.fast] - 1) * (2 + ORDERS[inputs.fast]) + 1


# ---------------------------------------------------------------------- how many dimensions they use
def energy(inputs: Inputs) -> Found:
    """The energy captured by the first dimensions of W_Q, W_K and their product, stacked and per head."""
    layers, skipped = [], []
    for layer in inputs.layers:
        try:
            found = hk.convert.curves(inputs.model, layers=[layer.index], progress=False)
        except (TypeError, ValueError) as error:
            skipped.append({"layer": layer.index, "reason": str(error)})
            continue
        [held] = found.energy
        if held is None:
            skipped.append({"layer": layer.index, "reason": f"{layer} has rotary positions"})
            continue
        curves = {
            "stacked_query": held.stacked_query,
            "stacked_key": held.stacked_key,
            "stacked_product": held.stacked_product,
            "single_query": held.query.mean(0),
            "single_key": held.key.mean(0),
            "single_product": held.product.mean(0),
            "weight_error": found.errors[0],
        }
        plain = {name: _rounded(curve) for name, curve in curves.items()}
        layers.append({"layer": layer.index, **plain})
    table = [
        {
            "layer": layer["layer"],
            "curve": name,
            "dimensions": len(curve),
            **{
                f"dimensions_for_{share}_percent": _enough(curve, share / 100)
                for share in (50, 90, 99)
            },
        }
        for layer in layers
        for name, curve in layer.items()
        if name not in ("layer", "weight_error")
    ]
    return {"table": table, "layers": layers, "skipped": skipped}


def _enough(curve: list[float], share: float) -> int:
    """How many dimensions capture this share."""
    return next(count for count, held in enumerate(curve, 1) if held >= share - 1e-6)


# ---------------------------------------------------------------------- one sentence
def maps(inputs: Inputs) -> Found:
    """The attention maps of a sentence: `tokens` and `attention` as BertViz takes them, and their `layers`."""
    found = hk.analysis.maps(inputs.model, batch_of([inputs.sentence]))
    words = inputs.words(inputs.sentence)
    shown = hk.analysis.bertviz(found, words)
    places = _places(inputs, [each.layer for each in found])
    table = [
        row
        for layer, each in zip(places, found, strict=True)
        for head, rows in zip(each.heads, each.maps, strict=True)
        for row in _most_attended(layer, head, rows, words)
    ]
    return {
        "table": table,
        "layers": [
            {"layer": layer, "heads": len(each.heads)}
            for layer, each in zip(places, found, strict=True)
        ],
        "tokens": words,
        "attention": [_rounded(layer) for layer in shown["attention"]],
    }


def _most_attended(
    layer: int, head: int, rows: Tensor, words: list[str]
) -> Iterator[dict[str, Any]]:
    """What each token attends to most."""
    best = rows.max(-1)
    chosen = zip(words, best.indices.tolist(), _rounded(best.values), strict=True)
    for place, (word, key, probability) in enumerate(chosen):
        yield {
            "layer": layer,
            "head": head,
            "place": place,
            "token": word,
            "key_place": key,
            "key_token": words[key],
            "probability": probability,
        }


# ---------------------------------------------------------------------- plain data
def _rows(inputs: Inputs, columns: dict[str, hk.analysis.HeadScores]) -> list[dict[str, Any]]:
    """A row for each head."""
    return [
        {
            "layer": layer.index,
            "head": head,
            "name": layer.name,
            **{name: float(scores.scores[layer.index][head]) for name, scores in columns.items()},
        }
        for layer in inputs.layers
        for head in range(layer.num_heads)
    ]


def _places(inputs: Inputs, names: Sequence[str]) -> list[int]:
    """The indices of these layers; where one layer runs several times in a pass (ALBERT), those of the runs."""
    if len(set(names)) < len(names):
        return list(range(len(names)))
    index = {layer.name: layer.index for layer in inputs.layers}
    return [index[name] for name in names]


def _rounded(values: Tensor) -> Any:
    """To six decimals, which halves the files."""
    return values.double().round(decimals=6).tolist()


#: In the order in which they are computed.
STAGES: Final[dict[str, Stage]] = {
    "model": Stage(model, lambda inputs: 0),
    "statistics": Stage(statistics, lambda inputs: 1),
    "roles": Stage(roles, lambda inputs: 1),
    "distance": Stage(distance, lambda inputs: 1),
    "importance": Stage(importance, lambda inputs: 4 if inputs.fast else inputs.heads + 5),
    "pruning": Stage(pruning, _passes_of_pruning),
    "energy": Stage(energy, lambda inputs: 0),
    "maps": Stage(maps, lambda inputs: 0),
}
