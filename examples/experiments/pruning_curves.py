"""Quality over the number of heads that are closed, by every measure of importance, at random and reversed.

After section 3.3 of Michel et al. 2019, on a pretrained sentence encoder (MiniLM) and on the translation model, without
training in between. Heads are closed in the order of their scores, the lowest first; reversed, the highest first.
Scores and quality are computed on different sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any, Final

import heads_of_minilm
import sentences
import translators
from lab import Lab, Run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rankings import Ranking, by_layer, random_ranking, relevance_of, scores_of
from tables import by_seed, markdown
from torch import nn

import heads_kernels as hk
from benchmarks.figures import BLUE, GREY, ORANGE, PURPLE, message

NAME = "pruning_curves"
RANDOM: Final = "at random"
#: The orders in the figure, besides random ones: more lines would be hard to distinguish. The tables have all orders.
DRAWN: Final = {
    "Fisher": (ORANGE, "-"),
    "leave one out": (BLUE, "-"),
    "confidence": (PURPLE, "-"),
    "Fisher, reversed": (ORANGE, "--"),
}


@dataclass(frozen=True)
class Settings:
    """Sizes of both models, and of this experiment.

    Attributes:
        minilm_closed, translator_closed: how many heads are closed.
        random: how many random orders.
        relevance: batches of the translation model for relevance, which takes longer than the other measures.
    """

    minilm: sentences.Settings
    translator: translators.Settings
    minilm_closed: tuple[int, ...] = (6, 12, 24, 36, 48, 60)
    translator_closed: tuple[int, ...] = (4, 8, 12, 16, 20, 24, 28, 32)
    random: int = 3
    relevance: int = 2


def settings_of(lab: Lab) -> Settings:
    models = sentences.settings_of(lab), translators.settings_of(lab)
    return Settings(*models, (60,), (8,), 1, 1) if lab.quick else Settings(*models)


def run(lab: Lab) -> None:
    """MiniLM, then the translation model of each seed."""
    settings = settings_of(lab)
    results = lab.results(NAME, settings)
    results.run("MiniLM", partial(minilm, lab, settings))
    for seed in lab.seeds:
        results.run(f"translation, seed {seed}", partial(translation, lab, settings, seed))


def minilm(lab: Lab, settings: Settings) -> Run:
    """MiniLM, by the scores of `heads_of_minilm`."""
    sizes = settings.minilm
    model = sentences.load()
    _, held_out = sentences.texts(sizes)
    data = sentences.batches(held_out, sizes.batch)
    original = sentences.embedded(model, data)

    def measure() -> dict[str, float]:
        return sentences.agreement(sentences.embedded(model, data), original)

    importance = partial(heads_of_minilm.importance, lab, sizes)
    found = lab.results(heads_of_minilm.NAME, sizes).run("importance", importance)
    rankings = found["ranked"]
    return curves(lab, model, rankings, settings.random, settings.minilm_closed, measure)


def translation(lab: Lab, settings: Settings, seed: int) -> Run:
    """The translation model of a seed, by its loss on training sentences."""
    model = translators.trained(lab, seed)
    corpus = translators.corpus_of(settings.translator, seed)
    data = translators.read_batches(settings.translator, seed)
    scores = scores_of(lab, model, data, translators.sentence_losses, translators.special_keys)
    few = data[: settings.relevance]
    scores["relevance"] = relevance_of(lab, model, few, translators.logits)
    rankings = {name: each.ranked() for name, each in scores.items()}
    return curves(lab, model, rankings, settings.random, settings.translator_closed,
        lambda: translators.word_quality(model, corpus))  # fmt: skip


def curves(
    lab: Lab,
    model: nn.Module,
    rankings: Mapping[str, Ranking],
    random: int,
    counts: tuple[int, ...],
    measure: Callable[[], dict[str, float]],
) -> Run:
    """Quality at each count, of every order; `whole` is that of the model with all heads."""
    orders: dict[str, Ranking] = {}
    for name, ranking in rankings.items():
        orders |= {name: ranking, f"{name}, reversed": ranking[::-1]}
    orders |= {f"{RANDOM} {seed}": random_ranking(model, seed) for seed in range(random)}
    found: dict[str, list[dict[str, float]]] = {}
    whole = measure()
    for name, order in orders.items():
        lab.bar.start(name, len(counts))
        found[name] = []
        for number, count in enumerate(counts, 1):
            hk.heads.close(model, by_layer(order[:count]))
            found[name].append(measure())
            hk.heads.reopen(model)
            lab.bar.step(number, f"{count} heads closed")
    return {"counts": counts, "whole": whole, "curves": found}


# ---------------------------------------------------------------------- report
def tables(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, str]:
    """Quality over closed heads, in every order; means over the seeds."""
    return {
        f"{NAME}-neighbours": table([runs["MiniLM"]], "neighbours"),
        f"{NAME}-cosine": table([runs["MiniLM"]], "cosine"),
        f"{NAME}-words": table(by_seed(runs, "translation"), "words"),
    }


def table(models: list[Run], what: str) -> str:
    """Shares in percent; for random orders mean, smallest and largest."""
    whole = sum(m["whole"][what] for m in models) / len(models)
    rows = [[order, f"{100 * whole:.1f}", *(f"{100 * mean(v):.1f}" for v in places)]
        for order, places in orders_of(models, what).items() if order != RANDOM]  # fmt: skip
    at_random = orders_of(models, what)[RANDOM]
    cells = (f"{100 * mean(v):.1f} ({100 * min(v):.1f} to {100 * max(v):.1f})" for v in at_random)
    rows.append([RANDOM, f"{100 * whole:.1f}", *cells])
    return markdown(("heads closed", "0", *map(str, models[0]["counts"])), rows)


def orders_of(models: list[Run], what: str) -> dict[str, list[list[float]]]:
    """For every order, the values at each count; all random orders are one entry."""
    found: dict[str, list[list[float]]] = {}
    for model in models:
        for order, points in model["curves"].items():
            name = RANDOM if order.startswith(RANDOM) else order
            places = found.setdefault(name, [[] for _ in points])
            for place, point in zip(places, points, strict=True):
                place.append(point[what])
    return found


def draw(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> Figure:
    """Quality over closed heads in a few orders; random orders as their mean and a grey range."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    translation = by_seed(runs, "translation")
    panel(left, [runs["MiniLM"]], "neighbours", "MiniLM", "same nearest neighbour")
    panel(middle, [runs["MiniLM"]], "cosine", "MiniLM", "cosine with the original")
    panel(right, translation, "words", "Translation", "words right")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def panel(axes: Axes, models: list[Run], what: str, model: str, unit: str) -> None:
    counts = [0, *models[0]["counts"]]
    whole = [[m["whole"][what] for m in models]]
    orders = orders_of(models, what)
    means = {}
    for order in (*DRAWN, RANDOM):
        values = [[100 * value for value in place] for place in (*whole, *orders[order])]
        means[order] = [mean(place) for place in values]
        if order == RANDOM:
            low, high = [min(place) for place in values], [max(place) for place in values]
            axes.fill_between(counts, low, high, color=GREY, alpha=0.3, lw=0, label="range of random orders")
            axes.plot(counts, means[order], color=GREY, label=f"{RANDOM}, mean")
        else:
            color, style = DRAWN[order]
            axes.plot(counts, means[order], color=color, ls=style, label=order, lw=1.6)
    half = len(counts) // 2
    chosen, random = (means[order][half] for order in ("Fisher", RANDOM))
    message(
        axes,
        f"{model}, {counts[half]} heads closed: {unit} {chosen:.0f} % by Fisher, {random:.0f} % at random",
    )
    axes.set(xlabel="closed heads, the lowest scores first", ylabel=f"{unit}, %")
    axes.grid()
