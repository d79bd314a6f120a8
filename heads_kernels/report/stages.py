"""The readings of a report: each a function that gives plain data, with a row for each line of its CSV file."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.report.folder import Found
from heads_kernels.report.reading import Batch, Reading, batch_of

#: Of all heads, how many are closed at each point of the pruning curve.
SHARES: Final = tuple(step / 10 for step in range(11))
#: Random orders of heads that the curve is held against.
ORDERS: Final = 3
#: So many most frequent words are not rare: the number of Voita et al. 2019.
COMMON: Final = 500


@dataclass(frozen=True)
class Stage:
    """A reading.

    Attributes:
        compute: what it finds: values that JSON can hold, rows of the CSV file under "table".
        passes: how many times each batch goes through the model, about.
    """

    compute: Callable[[Reading], Found]
    passes: Callable[[Reading], int]


# ---------------------------------------------------------------------- what is read
def model(reading: Reading) -> Found:
    """Its layers, and how much text."""
    config = reading.model.config
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
        for layer in reading.layers
    ]
    return {
        "table": table,
        "name": reading.name,
        "family": config.model_type,
        "parameters": sum(weight.numel() for weight in reading.model.parameters()),
        "lines": len(reading.ids),
        "tokens": sum(map(len, reading.ids)),
        "version": hk.__version__,
    }


# ---------------------------------------------------------------------- what heads look at
def statistics(reading: Reading) -> Found:
    """`hk.analysis.statistics`, with the first token, separators and punctuation as sets."""
    found = hk.analysis.statistics(
        reading.model,
        reading.batches,
        exclude_keys=_special(reading),
        token_sets={"first": _first, "separator": _ends(reading), "punctuation": _marks(reading)},
    )
    return {"table": _rows(reading, found.measures)}


def _first(batch: Batch) -> Tensor:
    """The first token of each line: [CLS], <s>, or a word."""
    return torch.zeros_like(batch["input_ids"], dtype=torch.bool).index_fill(
        1, torch.tensor([0]), 1
    )


def _special(reading: Reading) -> list[int]:
    """[CLS], [SEP], <s>, </s>: no words."""
    return _ids(reading, "cls", "bos", "sep", "eos")


def _ends(reading: Reading) -> list[int]:
    return _ids(reading, "sep", "eos")


def _ids(reading: Reading, *names: str) -> list[int]:
    ids = [getattr(reading.tokenizer, f"{name}_token_id") for name in names]
    return sorted({token for token in ids if token is not None})


def _marks(reading: Reading) -> list[int]:
    """Tokens of the text that are punctuation alone."""
    there = sorted({token for line in reading.ids for token in line})
    return [
        token
        for token, word in zip(there, reading.words(there), strict=True)
        if all(unicodedata.category(letter).startswith("P") for letter in word)
    ]


def roles(reading: Reading) -> Found:
    """`hk.analysis.roles`: heads of one offset, and of the rarest word, by counts of the text itself.

    Chance alone finds the rarest word of few: no head is asked for it where fewer than half of the words are rare.
    """
    special = _special(reading)
    counts = Counter(token for line in reading.ids for token in line if token not in special)
    enough = len(counts) >= 2 * COMMON
    found = hk.analysis.roles(
        reading.model,
        reading.batches,
        special=special,
        counts=counts if enough else None,
        common=COMMON,
    )
    named = {
        (role.layer, role.head): role.what for role in (*found.rare_word(), *found.positional())
    }
    rare = found.rare_words
    columns = {"offset_share": found.offset_share}
    table = _rows(reading, columns | ({"rarest": rare.rarest} if rare else {}))
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
def distance(reading: Reading) -> Found:
    """`hk.analysis.distance`: all pairs, their layers and a map of all heads."""
    found = hk.analysis.distance(reading.model, reading.batches)
    places, points = _places(reading, found.layers), _rounded(found.embedding())
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
def importance(reading: Reading) -> Found:
    """Without labels: how the embeddings of the lines move."""
    fisher = _fisher(reading)
    left_out = hk.analysis.importance(
        reading.model, reading.batches, embeddings, method="leave_one_out"
    )
    sharp = hk.analysis.importance(
        reading.model, reading.batches, method="confidence", exclude_keys=_special(reading)
    )
    scores = {"fisher": fisher, "leave_one_out": left_out, "confidence": sharp}
    agreement = {name: each.spearman(left_out) for name, each in scores.items()}
    return {"table": _rows(reading, scores), "spearman_with_leave_one_out": _finite(agreement)}


@lru_cache(maxsize=1)
def _fisher(reading: Reading) -> hk.analysis.HeadScores:
    return hk.analysis.importance(reading.model, reading.batches, embeddings, method="fisher")


def embeddings(model: Any, batch: Batch) -> Tensor:
    """`[B, width]`: the mean of the hidden states of real tokens, of length 1."""
    hidden = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    mean = torch.where(real.bool(), hidden, 0).sum(1) / real.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


# ---------------------------------------------------------------------- how many can be closed
@torch.no_grad()
def pruning(reading: Reading) -> Found:
    """The cosine of the lines' embeddings with those of the whole model, as heads are closed in several orders."""
    least_first = _fisher(reading).ranked()
    orders = {"importance": least_first, "reversed": least_first[::-1]}
    for seed in range(ORDERS):
        chosen = torch.randperm(reading.heads, generator=torch.Generator().manual_seed(seed))
        orders[f"random {seed + 1}"] = [least_first[index] for index in chosen.tolist()]
    whole = torch.cat([embeddings(reading.model, batch) for batch in reading.batches])

    @cache
    def cosine(closed: frozenset[tuple[str, int]]) -> float:
        heads: dict[str, list[int]] = {}
        for layer, head in closed:
            heads.setdefault(layer, []).append(head)
        hk.heads.close(reading.model, heads)
        try:
            found = torch.cat([embeddings(reading.model, batch) for batch in reading.batches])
        finally:
            hk.heads.reopen(reading.model)
        return float((found * whole).sum(1).mean())

    table = []
    for share in SHARES:
        count = round(share * reading.heads)
        row = {name: cosine(frozenset(order[:count])) for name, order in orders.items()}
        table.append({"closed_share": share, "closed": count, **row})
    return {"table": table}


# ---------------------------------------------------------------------- how many dimensions they use
def energy(reading: Reading) -> Found:
    """The energy that the first dimensions of W_Q, W_K and their product hold: of all heads stacked, and of one."""
    layers, skipped = [], []
    for layer in reading.layers:
        try:
            heads = hk.convert.read_heads(layer)
        except ValueError as error:
            skipped.append({"layer": layer.index, "reason": str(error)})
            continue
        held = hk.convert.captured_energy(heads)
        curves = {
            "stacked_query": held.stacked_query,
            "stacked_key": held.stacked_key,
            "stacked_product": held.stacked_product,
            "single_query": held.query.mean(0),
            "single_key": held.key.mean(0),
            "single_product": held.product.mean(0),
            "weight_error": hk.convert.error_curve(heads),
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
    """How many dimensions hold this share."""
    return next(count for count, held in enumerate(curve, 1) if held >= share - 1e-6)


# ---------------------------------------------------------------------- one sentence
def maps(reading: Reading) -> Found:
    """The maps of one sentence: `tokens` and `attention` as BertViz takes them, `layers` says which they are."""
    found = hk.analysis.maps(reading.model, batch_of([reading.sentence]))
    words = reading.words(reading.sentence)
    shown = hk.analysis.bertviz(found, words)
    places = _places(reading, [each.layer for each in found])
    table = [
        row
        for layer, each in zip(places, found, strict=True)
        for head, rows in zip(each.heads, each.maps, strict=True)
        for row in _looks(layer, head, rows, words)
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


def _looks(layer: int, head: int, rows: Tensor, words: list[str]) -> Iterator[dict[str, Any]]:
    """What each token looks at most."""
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
def _rows(reading: Reading, columns: dict[str, hk.analysis.HeadScores]) -> list[dict[str, Any]]:
    """A row for each head."""
    return [
        {
            "layer": layer.index,
            "head": head,
            "name": layer.name,
            **{name: float(scores.scores[layer.index][head]) for name, scores in columns.items()},
        }
        for layer in reading.layers
        for head in range(layer.num_heads)
    ]


def _places(reading: Reading, names: Sequence[str]) -> list[int]:
    """The layers of these names; where one runs several times in a pass (ALBERT), the numbers of the runs."""
    if len(set(names)) < len(names):
        return list(range(len(names)))
    index = {layer.name: layer.index for layer in reading.layers}
    return [index[name] for name in names]


def _rounded(values: Tensor) -> Any:
    """Six decimals: files half as long."""
    return values.double().round(decimals=6).tolist()


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {name: value if value == value else None for name, value in values.items()}


#: In the order in which they are made.
STAGES: Final[dict[str, Stage]] = {
    "model": Stage(model, lambda reading: 0),
    "statistics": Stage(statistics, lambda reading: 1),
    "roles": Stage(roles, lambda reading: 1),
    "distance": Stage(distance, lambda reading: 1),
    "importance": Stage(importance, lambda reading: reading.heads + 3),
    "pruning": Stage(pruning, lambda reading: 3 + (len(SHARES) - 2) * (2 + ORDERS)),
    "energy": Stage(energy, lambda reading: 0),
    "maps": Stage(maps, lambda reading: 0),
}
