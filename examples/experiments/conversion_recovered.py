"""A translation model made collaborative: what conversion loses at once, and what further training recovers.

After section 4.2 of Cordonnier et al. 2020: train, decompose, train again. All attention of the model, in encoder,
decoder and cross-attention, is converted to fewer features per layer than its queries and keys had. The control is
trained as long without conversion.
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
from tables import by_seed, each, markdown
from training import learn_on
from translators import corpus_of, more_batches, quality, read_batches, settings_of, trained

import heads_kernels as hk
from benchmarks.figures import BLUE, GREEN, GREY, ORANGE, message

NAME = "conversion_recovered"
#: Average features per layer, as shares of the width of all its queries.
SHARES: Final = (0.5, 0.25, 0.125)
CHOICES: Final = {"cp": BLUE, "ragged": GREEN, "cp, weights alone": ORANGE}


def run(lab: Lab) -> None:
    """The models of all seeds; the control is the one of `l0_by_kind`."""
    settings = settings_of(lab)
    results = lab.results(NAME, settings)
    for seed in lab.seeds:
        results.run(f"before, seed {seed}", partial(before, lab, seed))
        results.run(f"control, seed {seed}", partial(control, lab, seed))
        for share in SHARES:
            for choice in CHOICES:
                name = f"{label(choice, share)}, seed {seed}"
                results.run(name, partial(converted, lab, name, choice, share, seed))


def label(choice: str, share: float) -> str:
    return f"{choice}, {share:.1%}"


def before(lab: Lab, seed: int) -> Run:
    """The trained model that is converted."""
    model = trained(lab, seed)
    return {"at_once": quality(model, corpus_of(settings_of(lab), seed)), **sizes(model)}


def control(lab: Lab, seed: int) -> Run:
    """The trained model, trained further as long as the converted ones."""
    results = lab.results(l0_by_kind.NAME, settings_of(lab))
    found = l0_by_kind.gated(lab, results, "from trained", None, seed)
    after = {what: found[what] for what in ("words", "sentences", "loss")}
    return {"after": after, **sizes(trained(lab, seed))}


def converted(lab: Lab, name: str, choice: str, share: float, seed: int) -> Run:
    """The results of the converted model: at once, and after further training."""
    settings = settings_of(lab)
    corpus = corpus_of(settings, seed)
    model = trained(lab, seed)
    batches = [(batch.source, batch.target[:, :-1]) for batch in read_batches(settings, seed)]
    conversion = hk.convert.collaborate(
        model,
        max(1, round(share * settings.width)),
        method=choice.partition(",")[0],
        calibration=None if "alone" in choice else batches,
        progress=False,
    )
    at_once = quality(model, corpus)
    learning = learn_on(model, more_batches(settings, seed), settings.more_steps)
    lab.bar.follow(name, settings.more_steps, learning)
    found = {"at_once": at_once, "after": quality(model, corpus), "dims": conversion.dims}
    return {**found, "error": conversion.error, **sizes(model)}


def sizes(model: Any) -> dict[str, int]:
    """The number of parameters."""
    return {"parameters": sum(weight.numel() for weight in model.parameters())}


# ---------------------------------------------------------------------- report
def tables(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, str]:
    """A row for every model; with several seeds, a number for each."""
    names = ["before", "control", *(label(choice, share) for share in SHARES for choice in CHOICES)]
    rows = [row(name, by_seed(runs, name)) for name in names]
    header = ("", "weights", "relative error", "at once", "trained on", "words", "nats a word")
    return {NAME: markdown(header, rows)}


def row(name: str, models: list[Run]) -> list[str]:
    done = [m["after"] for m in models if "after" in m]
    return [
        name,
        each((m["parameters"] for m in models), ",d"),
        each((m["error"] for m in models if "error" in m), ".3f"),
        each(m["at_once"]["sentences"] for m in models if "at_once" in m),
        *(each(m[what] for m in done) for what in ("sentences", "words")),
        each((m["loss"] for m in done), ".3f"),
    ]


def draw(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> Figure:
    """Quality over the share of features, converted and trained on."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = dict(zip(("at_once", "after"), figure.subplots(1, 2, sharey=True), strict=True))
    titles = {"at_once": "", "after": " and trained on"}
    levels = {
        "at_once": ("before", "not converted"),
        "after": ("control", "control, not converted"),
    }
    shares = [100 * share for share in SHARES]
    for when, axes in panels.items():
        means = []
        for choice, color in CHOICES.items():
            models = [by_seed(runs, label(choice, share)) for share in SHARES]
            values = [[100 * m[when]["sentences"] for m in of_seeds] for of_seeds in models]
            line(axes, shares, values, color, choice)
            means.append(f"{mean(values[-1]):.0f} % by {choice}")
        name, words = levels[when]
        level = mean(100 * m[when]["sentences"] for m in by_seed(runs, name))
        axes.axhline(level, color=GREY, lw=1, ls=":", label=words)
        message(
            axes,
            f"Converted to {shares[-1]:g} % of the features{titles[when]}, sentences right: {'; '.join(means)}",
        )
        axes.set(xlabel="features a layer, % of the width of its queries", xticks=shares)
        axes.set(ylabel="sentences translated right, %")
        axes.grid()
        legend(axes)
    return figure
