"""What is measured for each panel of a report, by `hk.analysis` and `hk.convert`: values that report.html.j2 shows.

Values of heads are lists, `[H]` of each layer; pictures are data URIs.
"""

from __future__ import annotations

import base64
import io
import sys
import unicodedata
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain
from math import ceil
from statistics import mean
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.report.inputs import Batch, Inputs, batch_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found: TypeAlias = dict[str, Any]

#: The number of most frequent words that do not count as rare, as in Voita et al. 2019.
COMMON: Final = 500
#: What --fast does without.
LEFT_OUT: Final = (
    "heads are not left out one at a time, and the pruning curve has 5 steps and 1 random order instead of 10 and 3"
)
#: A cosine that counts as hardly changed.
CLOSE: Final = 0.95
#: Most layers of which a map is drawn large.
MOST_MAPS: Final = 12


def measure(inputs: Inputs) -> dict[str, Found]:
    """What each panel shows, by the name that report.html.j2 has for it."""
    panels = (importance, pruning, statistics, roles, distance, energy, maps)
    found = {}
    for panel in panels:
        print(f"{panel.__name__} ...", file=sys.stderr)
        found[panel.__name__] = panel(inputs)
    return found


# ---------------------------------------------------------------------- which heads matter
def importance(inputs: Inputs) -> Found:
    """Importance without labels, from the change of the lines' embeddings. With --fast no head is left out."""
    model, data = inputs.model, inputs.batches
    scores: dict[str, hk.analysis.HeadScores] = {}
    if not inputs.fast:
        scores["leaving out"] = hk.analysis.importance(model, data, embeddings, method="leave_one_out")
    scores["Fisher"] = _fisher(inputs)
    scores["confidence"] = _statistics(inputs).confidence
    reference, *others = scores
    return {
        "scores": {name: _lists(each) for name, each in scores.items()},
        "reference": reference,
        "top": [name for _, name in _ranked(_lists(scores[reference]))[:5]],
        "correlation": {name: scores[name].spearman(scores[reference]) for name in others},
    }


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
    """The cosine of the lines' embeddings with those of the whole model, as heads are closed in several orders."""
    index = {layer.name: layer.index for layer in inputs.layers}
    least_first = [(index[name], head) for name, head in _fisher(inputs).ranked()]
    orders = {"least important first": least_first, "most important first": least_first[::-1]}
    steps, at_random = (5, 1) if inputs.fast else (10, 3)
    for seed in range(at_random):
        generator = torch.Generator().manual_seed(seed)
        places = torch.randperm(len(least_first), generator=generator).tolist()
        orders[f"random order {seed + 1}"] = [least_first[place] for place in places]
    whole = torch.cat([embeddings(inputs.model, batch) for batch in inputs.batches])

    @cache
    def cosine(closed: frozenset[tuple[int, int]]) -> float:
        hk.heads.close(inputs.model, _by_layer(closed))
        try:
            found = torch.cat([embeddings(inputs.model, batch) for batch in inputs.batches])
        finally:
            hk.heads.reopen(inputs.model)
        return float((found * whole).sum(1).mean())

    counts = sorted({round(step / steps * len(least_first)) for step in range(steps + 1)})
    curves = {name: [cosine(frozenset(order[:count])) for count in counts] for name, order in orders.items()}
    most = {
        name: max((count for count, at in zip(counts, curve, strict=True) if at >= CLOSE), default=0)
        for name, curve in curves.items()
    }
    return {
        "closed": counts,
        "cosine": curves,
        "close": CLOSE,
        "most": most,
        "prunable": _by_layer(least_first[: most["least important first"]]),
    }


def _by_layer(heads: Any) -> dict[int, list[int]]:
    chosen: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        chosen.setdefault(layer, []).append(head)
    return chosen


# ---------------------------------------------------------------------- what they attend to
def statistics(inputs: Inputs) -> Found:
    """The means of `hk.analysis.statistics`."""
    found = _statistics(inputs)
    values = {name: _lists(scores) for name, scores in found.measures.items()}
    return {
        "values": values,
        "means": {name: mean(chain(*layers)) for name, layers in values.items()},
        "sharpest": _ranked(values["confidence"])[:3],
        "farthest": _ranked(values["distance"])[0],
    }


@lru_cache(maxsize=1)
def _statistics(inputs: Inputs) -> hk.analysis.HeadStatistics:
    """With the first token, separators and punctuation as sets."""
    there = sorted(set(chain(*inputs.ids)))
    words = zip(there, inputs.words(there), strict=True)
    sets: dict[str, Any] = {
        "first": _first,
        "separator": _ids(inputs, "sep", "eos"),
        "punctuation": [token for token, word in words if _is_mark(word)],
    }
    special = _ids(inputs, *SPECIAL)
    return hk.analysis.statistics(inputs.model, inputs.batches, exclude_keys=special, token_sets=sets)


#: Tokens of tokenizers, by their attributes, that are no words.
SPECIAL: Final = ("cls", "bos", "sep", "eos")


def _ids(inputs: Inputs, *names: str) -> list[int]:
    ids = [getattr(inputs.tokenizer, f"{name}_token_id") for name in names]
    return sorted({token for token in ids if token is not None})


def _first(batch: Batch) -> Tensor:
    """The first token of each line: [CLS], <s>, or a word."""
    return torch.zeros_like(batch["input_ids"]).index_fill(1, torch.tensor([0]), 1).bool()


def _is_mark(word: str) -> bool:
    return all(unicodedata.category(letter).startswith("P") for letter in word)


def roles(inputs: Inputs) -> Found:
    """`hk.analysis.roles`: heads that attend to one offset or to the rarest word, counted in the text itself.

    With few rare words chance alone finds the rarest: the role is left out if fewer than half of the words are rare.
    """
    special = _ids(inputs, *SPECIAL)
    counts = Counter(token for token in chain(*inputs.ids) if token not in special)
    found = hk.analysis.roles(
        inputs.model,
        inputs.batches,
        special=special,
        counts=counts if len(counts) >= 2 * COMMON else None,
        common=COMMON,
    )
    index = {layer.name: layer.index for layer in inputs.layers}
    rare = found.rare_words
    return {
        "words": len(counts),
        "common": COMMON,
        "offsets": [[f"{offset:+d}" for offset in layer.tolist()] for layer in found.offset],
        "offset_share": _lists(found.offset_share),
        "rarest": _lists(rare.rarest) if rare else None,
        "chance": rare.chance[0] if rare else None,
        "positional": {f"{index[role.layer]}:{role.head}": role.what for role in found.positional()},
        "rare_word": {f"{index[role.layer]}:{role.head}": role.what for role in found.rare_word()},
    }


# ---------------------------------------------------------------------- how alike they are
def distance(inputs: Inputs) -> Found:
    """`hk.analysis.distance`: the mean of each head to the others of its layer, and to all others."""
    found = hk.analysis.distance(inputs.model, inputs.batches)
    layers = _places(inputs, found.layers)
    blocks = [found.block(place) for place in range(len(layers))]
    within = [(block.sum(1) / max(len(block) - 1, 1)).tolist() for block in blocks]
    to_all = found.matrix.sum(1) / max(len(found.matrix) - 1, 1)
    return {
        "layers": layers,
        "within": within,
        "to_all": [each.tolist() for each in torch.split(to_all, list(map(len, blocks)))],
        "odd": _ranked(within, layers)[0][1],
    }


# ---------------------------------------------------------------------- how many dimensions
def energy(inputs: Inputs) -> Found:
    """`hk.convert.curves` of the layers that are not converted yet, or why there are none."""
    layers = [x.index for x in inputs.layers if x.num_heads and not hasattr(x.module, "mixing")]
    try:
        curves = hk.convert.curves(inputs.model, layers=layers or None, progress=False)
    except ValueError as error:
        return {"refused": str(error)}
    halves = [float(errors[len(errors) // 2]) for errors in curves.errors]
    return {"refused": "", "halves": halves, "picture": _svg(hk.convert.plot(curves))}


# ---------------------------------------------------------------------- one sentence
def maps(inputs: Inputs) -> Found:
    """The attention maps of a sentence: of all heads, and of the sharpest with their tokens."""
    found = hk.analysis.maps(inputs.model, batch_of([inputs.sentence]))
    words = inputs.words(inputs.sentence)
    layers = _places(inputs, [each.layer for each in found])
    sharpest = [(layer, int(each.maps.amax(-1).mean(-1).argmax())) for layer, each in zip(layers, found, strict=True)]
    pictures = {}
    for layer, head in sharpest[:: ceil(len(sharpest) / MOST_MAPS)]:
        each = found[layers.index(layer)]
        only = replace(each, heads=(head,), maps=each.maps[[head]])
        pictures[f"{layer}:{head}"] = _svg(hk.analysis.plot_maps([only], words))
    return {
        "words": words,
        "layers": layers,
        "all": [[_pixels(rows) for rows in each.maps] for each in found],
        "pictures": pictures,
    }


def _pixels(rows: Tensor) -> str:
    """A pixel for each pair of tokens, in the colors of `hk.analysis.plot_maps`."""
    from matplotlib.image import imsave

    content = io.BytesIO()
    imsave(content, rows.numpy(), cmap="Blues", vmin=0, vmax=1, format="png")
    return _data_uri("image/png", content.getvalue())


# ---------------------------------------------------------------------- values and pictures
def _lists(scores: hk.analysis.HeadScores) -> list[list[float]]:
    return [layer.tolist() for layer in scores.scores]


def _ranked(values: Sequence[Sequence[float]], layers: Sequence[int] | None = None) -> list[tuple[float, str]]:
    """The value and the name, layer:head, of each head, the highest first."""
    named = [
        (value, f"{layer}:{head}")
        for layer, row in zip(layers or range(len(values)), values, strict=True)
        for head, value in enumerate(row)
    ]
    return sorted(named, key=lambda each: -each[0])


def _places(inputs: Inputs, names: Sequence[str]) -> list[int]:
    """The indices of these layers; where one layer runs several times in a pass (ALBERT), those of the runs."""
    if len(set(names)) < len(names):
        return list(range(len(names)))
    index = {layer.name: layer.index for layer in inputs.layers}
    return [index[name] for name in names]


def _svg(figure: Figure) -> str:
    import matplotlib as mpl

    content = io.BytesIO()
    # Text stays text: the reader's fonts have the letters of all tokens, and matplotlib's need not.
    with mpl.rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(content, format="svg", transparent=True)
    return _data_uri("image/svg+xml", content.getvalue())


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
