"""A translation model pruned by L0 gates against the same model pruned by importance, at equal numbers of heads.

Importance is computed on training sentences, and the heads with the lowest scores are removed at once. The model is
measured at once, and after further training for as long as L0 gates train. There are two controls: heads removed at
random, and the heads that L0 gates closed, removed at once. The latter separates the choice of heads from the way in
which L0 closes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import mean
from typing import Any, Final

import l0_by_kind
from lab import Lab, Run
from matplotlib.figure import Figure
from plots import legend, line
from rankings import by_layer, random_ranking, scores_of
from report import COLORS, open_heads
from tables import by_seed, each, markdown
from training import learn_on
from translators import (
    corpus_of,
    more_batches,
    quality,
    read_batches,
    sentence_losses,
    settings_of,
    special_keys,
    trained,
)

import heads_kernels as hk
from benchmarks.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, message

NAME = "l0_or_importance"
MEASURES: Final = ("leave one out", "gradient")
CHOICES: Final = {
    "leave one out": BLUE,
    "gradient": GREEN,
    "at random": GREY,
    "the heads of L0": PURPLE,
}


def run(lab: Lab) -> None:
    """The models of all seeds; those of L0 gates are the ones of `l0_by_kind`."""
    settings = settings_of(lab)
    results = lab.results(NAME, settings)
    for seed in lab.seeds:
        results.run(f"all heads, seed {seed}", partial(by_l0, lab, None, seed))
        ranked = results.run(f"rankings, seed {seed}", partial(rankings, lab, seed))
        for heads in settings.open_heads:
            l0 = results.run(label("L0", heads, seed), partial(by_l0, lab, heads, seed))
            for choice in CHOICES:
                name = label(choice, heads, seed)
                order = ranked.get(choice)
                gone = by_layer(order[:-heads]) if order else l0["closed"]
                results.run(name, partial(pruned, lab, name, gone, seed))


def label(choice: str, heads: int, seed: int | None = None) -> str:
    return f"{choice}, {heads} heads" + ("" if seed is None else f", seed {seed}")


def by_l0(lab: Lab, heads: int | None, seed: int) -> Run:
    """The result of `l0_by_kind` from the trained model: quality, and the closed heads."""
    results = lab.results(l0_by_kind.NAME, settings_of(lab))
    found = l0_by_kind.gated(lab, results, "from trained", heads, seed)
    closed = {layer["name"]: layer["closed"] for layer in found["layers"]}
    after = {what: found[what] for what in ("words", "sentences", "loss")}
    return {"closed": closed, "open_heads": found["open_heads"], "after": after}


def rankings(lab: Lab, seed: int) -> Run:
    """The heads of the trained model in the order of removal, by each choice."""
    settings = settings_of(lab)
    model = trained(lab, seed)
    data = read_batches(settings, seed)
    scores = scores_of(lab, model, data, sentence_losses, special_keys, MEASURES)
    ranked = {name: each.ranked() for name, each in scores.items()}
    return {**ranked, "at random": random_ranking(model, seed)}


def pruned(lab: Lab, name: str, gone: Mapping[str, list[int]], seed: int) -> Run:
    """The results of the trained model without these heads: at once, and after further training."""
    settings = settings_of(lab)
    corpus = corpus_of(settings, seed)
    model = trained(lab, seed)
    hk.heads.prune(model, gone)
    at_once = quality(model, corpus)
    learning = learn_on(model, more_batches(settings, seed), settings.more_steps)
    lab.bar.follow(name, settings.more_steps, learning)
    return {"open_heads": open_heads(model), "at_once": at_once, "after": quality(model, corpus)}


# ---------------------------------------------------------------------- report
def tables(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, str]:
    """A row for every model; with several seeds, a number for each."""
    models = by_seed(runs, "all heads")
    rows = [["all heads, trained on", *quality_cells(models)]]
    for heads in settings["open_heads"]:
        rows += [
            [label(choice, heads), *quality_cells(by_seed(runs, label(choice, heads)))] for choice in ("L0", *CHOICES)
        ]
    header = (*COLORS, "sentences at once, %", "sentences, %", "words, %", "nats a word")
    return {NAME: markdown(("", *header), rows)}


def quality_cells(models: list[Run]) -> list[str]:
    """Open heads by kind, and quality, of a choice."""
    at_once = [m["at_once"]["sentences"] for m in models if "at_once" in m]
    return [
        *(each((m["open_heads"][kind] for m in models), "d") for kind in COLORS),
        each(at_once),
        *(each(m["after"][what] for m in models) for what in ("sentences", "words")),
        each((m["after"]["loss"] for m in models), ".3f"),
    ]


def draw(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> Figure:
    """Quality over open heads, pruned at once and trained on."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = dict(zip(("at_once", "after"), figure.subplots(1, 2, sharey=True), strict=True))
    counts, means = settings["open_heads"], {}
    for when, axes in panels.items():
        for choice, color in {"L0": ORANGE, **CHOICES}.items():
            models = [by_seed(runs, label(choice, heads)) for heads in counts]
            if when in models[0][0]:
                values = [[100 * m[when]["sentences"] for m in of_seeds] for of_seeds in models]
                line(axes, counts, values, color, choice)
                means[when, choice] = [mean(each) for each in values]
        axes.set(xlabel="open heads", ylabel="sentences translated right, %", xticks=counts)
        axes.grid()
        legend(axes)
    chosen, random = (means["at_once", choice][0] for choice in ("gradient", "at random"))
    message(panels["at_once"], f"Pruned to {counts[0]} heads, sentences right: {chosen:.0f} % by gradient, "
        f"{random:.0f} % at random")  # fmt: skip
    chosen, random, l0 = (means["after", choice][-1] for choice in ("gradient", "at random", "L0"))
    control = mean(100 * m["after"]["sentences"] for m in by_seed(runs, "all heads"))
    message(panels["after"], f"Trained on, {counts[-1]} heads: {chosen:.0f} % by gradient, {random:.0f} % at random, "
        f"{l0:.0f} % with L0 gates; all heads {control:.0f} %")  # fmt: skip
    return figure
