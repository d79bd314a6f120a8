"""Which heads L0 gates leave open in a translation model, by kind of attention, and what that costs.

After section 5 of Voita et al. 2019: gates on all heads of encoder, decoder and cross-attention. "From trained" adds
gates to a trained model and continues its training; "from scratch" trains a new model with gates, for the same number
of steps in total. The controls are trained as long without gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import mean
from typing import Any

from lab import Lab, Results, Run
from matplotlib.figure import Figure
from plots import legend, line
from report import COLORS
from tables import by_seed, each, markdown, quality_cells
from training import learn, learn_gates, learn_on
from translators import corpus_of, measured, more_batches, new_model, settings_of, trained

from benchmarks.figures import BLUE, GREY, ORANGE, message

NAME = "l0_by_kind"
STARTS = {"from trained": BLUE, "from scratch": ORANGE}


def run(lab: Lab) -> None:
    """The models of all seeds."""
    settings = settings_of(lab)
    results = lab.results(NAME, settings)
    for start in STARTS:
        for seed in lab.seeds:
            results.run(f"before, seed {seed}", partial(before, lab, seed))
            for heads in (None, *settings.open_heads):
                gated(lab, results, start, heads, seed)


def gated(lab: Lab, results: Results, start: str, heads: int | None, seed: int) -> Run:
    """The run of a model that ends with `heads` open heads; with None, that of its control."""
    name = f"{label(start, heads)}, seed {seed}"
    return results.run(name, partial(model, lab, name, start, heads, seed))


def label(start: str, heads: int | None) -> str:
    return f"{start}, {'no gates' if heads is None else f'{heads} heads'}"


def before(lab: Lab, seed: int) -> Run:
    """The trained model to which gates are added."""
    return measured(trained(lab, seed), corpus_of(settings_of(lab), seed))


def model(lab: Lab, name: str, start: str, heads: int | None, seed: int) -> Run:
    """A model trained until it has `heads` open heads; with None, trained as long without gates."""
    settings = settings_of(lab)
    corpus = corpus_of(settings, seed)
    if start == "from trained":
        made, how, steps = trained(lab, seed), learn_on, settings.more_steps
        batches = more_batches(settings, seed)
    else:
        made, how = new_model(settings, seed), learn
        steps = settings.steps + settings.more_steps
        batches = corpus.batches(settings.batch, seed)
    gates = heads is not None
    learning = learn_gates(how, made, batches, steps, heads) if gates else how(made, batches, steps)
    lab.bar.follow(name, steps, learning)
    return measured(made, corpus)


# ---------------------------------------------------------------------- report
def tables(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, str]:
    """A row for every model; with several seeds, a number for each."""
    rows = [row("before", by_seed(runs, "before"))]
    for heads in (None, *settings["open_heads"]):
        rows += [row(name, by_seed(runs, name)) for name in (label(s, heads) for s in STARTS)]
    header = ("", *COLORS, "words, %", "sentences, %", "nats a word")
    return {NAME: markdown(header, rows)}


def row(name: str, models: list[Run]) -> list[str]:
    kinds = (each((m["open_heads"][kind] for m in models), "d") for kind in COLORS)
    return [name, *kinds, *quality_cells(models)]


def draw(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> Figure:
    """Quality over open heads, and which kinds the open heads are of."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    sentences, *kinds = figure.subplots(1, 3)
    counts, all_heads = settings["open_heads"], 3 * share_of(settings)
    fewest = []
    for start, color in STARTS.items():
        models = [by_seed(runs, label(start, heads)) for heads in counts]
        values = [[100 * m["sentences"] for m in of_seeds] for of_seeds in models]
        line(sentences, counts, values, color, start)
        level = mean(100 * m["sentences"] for m in by_seed(runs, label(start, None)))
        sentences.axhline(level, color=color, lw=1, ls=":", label=f"{start}, no gates")
        fewest.append(f"{mean(values[-1]):.0f} % {start}")
    message(sentences, f"{counts[-1]} of {all_heads} heads open, sentences right: {', '.join(fewest)}")
    sentences.set(ylabel="sentences translated right, %")
    legend(sentences)
    for axes, start in zip(kinds, STARTS, strict=True):
        left = []
        for kind, color in COLORS.items():
            models = [by_seed(runs, label(start, heads)) for heads in counts]
            values = [[100 * m["open_heads"][kind] / share_of(settings) for m in of] for of in models]
            line(axes, counts, values, color, kind)
            left.append(f"{mean(values[-1]):.0f} % of {kind}")
        axes.plot([0, all_heads], [0, 100], color=GREY, lw=1, ls=":", label="all kinds alike")
        message(axes, f"{start.capitalize()}, {counts[-1]} heads open: {', '.join(left)}")
        axes.set(ylabel="open heads, % of each kind", ylim=(-5, 130), yticks=range(0, 101, 20))
        legend(axes)
    for axes in (sentences, *kinds):
        axes.set(xlabel=f"open heads of {all_heads}", xticks=counts)
        axes.grid()
    return figure


def share_of(settings: Mapping[str, Any]) -> int:
    """The number of heads of each kind."""
    return settings["layers"] * settings["heads"]
