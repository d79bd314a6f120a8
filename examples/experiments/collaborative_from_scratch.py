"""Collaborative against ordinary attention, both trained from scratch, at smaller and smaller key widths.

After section 4.1 of Cordonnier et al. 2020: the keys of all heads together have width D_k. Ordinary attention gives
each head a part of it; in collaborative attention the heads share one query and key of that width. Everything else is
the same. Mixing vectors have Xavier initialisation, as in the paper's code for translation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from statistics import mean, median
from typing import Any, Final

import torch
from corpus import END, Batch, padded
from lab import Lab, Run
from matplotlib.figure import Figure
from plots import legend, line
from tables import by_seed, markdown, quality_cells
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training import learn, seconds_to_translate
from transformer import Attention, Translator
from translators import corpus_of, new_model, quality, sentence_losses, settings_of, trained

import heads_kernels as hk
from benchmarks.figures import BLUE, ORANGE, message

NAME = "collaborative_from_scratch"
CUTS: Final = (1, 2, 4, 8)  # of the key width
KINDS: Final = {"ordinary": BLUE, "collaborative": ORANGE}
ROUNDS: Final = 15
TIMED: Final = 128  # sentences whose translation is timed


def run(lab: Lab) -> None:
    """The times of all kinds, in turn; then the models of all seeds."""
    settings = settings_of(lab)
    results = lab.results(NAME, settings)
    results.run("costs", partial(costs, lab))
    for kind in KINDS:
        for seed in lab.seeds:
            for D_k in widths(settings.width):
                name = f"{label(kind, D_k)}, seed {seed}"
                results.run(name, partial(model, lab, name, kind, D_k, seed))


def widths(width: int) -> list[int]:
    """The widths of the keys of all heads together, in a model of `width`."""
    return [width // cut for cut in CUTS]


def label(kind: str, D_k: int) -> str:
    return f"{kind}, D_k {D_k}"


def attention(kind: str, D_k: int) -> Attention:
    """Makes layers of this kind."""
    if kind == "ordinary":
        return lambda width, heads: hk.nn.GatedMultiheadAttention(
            width, heads, head_dim=D_k // heads, value_dim=width // heads
        )
    return lambda width, heads: hk.nn.CollaborativeMultiheadAttention(width, heads, D_k, mixing_init="xavier")


def model(lab: Lab, name: str, kind: str, D_k: int, seed: int) -> Run:
    """A model trained from scratch. With ordinary attention at full width it is the model of the other experiments."""
    settings = settings_of(lab)
    corpus = corpus_of(settings, seed)
    if (kind, D_k) == ("ordinary", settings.width):
        made = trained(lab, seed)
    else:
        made = new_model(settings, seed, attention(kind, D_k))
        batches = corpus.batches(settings.batch, seed)
        lab.bar.follow(name, settings.steps, learn(made, batches, settings.steps))
    return dict(quality(made, corpus))


# ---------------------------------------------------------------------- costs
def costs(lab: Lab) -> Run:
    """For each kind: parameters, those of queries and keys, FLOPs, and times, which are measured in turn."""
    settings = settings_of(lab)
    corpus = corpus_of(settings, 0)
    batch = next(corpus.batches(settings.batch, 0))
    kinds = [(kind, D_k) for kind in KINDS for D_k in widths(settings.width)]
    models = [new_model(settings, 0, attention(*each)) for each in kinds]
    lab.bar.start("costs", ROUNDS)
    times: list[list[float]] = [[] for _ in models]
    for number in range(1, ROUNDS + 1):
        for made, taken in zip(models, times, strict=True):
            taken.append(seconds_to_train(made.train(), batch))
        lab.bar.step(number, "")
    source = padded(corpus.held_out[:TIMED]).source
    for made in models:
        nn.init.constant_(made.words[-1].bias[END], -1e9)  # all translate to full length
    translating = seconds_to_translate(models, source)
    rows = {}
    for (kind, D_k), made, taken, seconds in zip(kinds, models, times, translating, strict=True):
        rows[label(kind, D_k)] = {
            "parameters": sum(weight.numel() for weight in made.parameters()),
            "query_and_key": sum(query_and_key(module) for module in made.modules()),
            "mflops": flops(made, batch) / 1e6,
            "train_ms": 1e3 * median(taken),
            "translate_ms": 1e3 * seconds,
        }
    return {"rows": rows, "tokens": [list(side.shape) for side in batch]}


def seconds_to_train(made: Translator, batch: Batch) -> float:
    """Seconds of one forward and backward pass."""
    start = time.perf_counter()
    sentence_losses(made, batch).sum().backward()
    taken = time.perf_counter() - start
    made.zero_grad()
    return taken


def flops(made: Translator, batch: Batch) -> int:
    """Dense FLOPs of one forward pass, as `torch.utils.flop_counter` counts them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        made.eval()(batch.source, batch.target[:, :-1])
    return counter.get_total_flops()


def query_and_key(module: nn.Module) -> int:
    """The parameters of scores: weights and biases of queries and keys, mixing and content bias."""
    names = ("q_proj", "k_proj", "content_proj", "mixing")
    return sum(weight.numel() for name, weight in module.named_parameters() if name.startswith(names))


# ---------------------------------------------------------------------- report
def tables(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, str]:
    """Quality, a number for each seed; costs."""
    names = [label(kind, D_k) for D_k in widths(settings["width"]) for kind in KINDS]
    quality_header = ("", "words, %", "sentences, %", "nats a word")
    costs_header = ("", "parameters", "of queries and keys", "MFLOP a batch",
        "ms a training step", "ms to translate")  # fmt: skip
    rows = runs["costs"]["rows"]
    return {
        f"{NAME}-quality": markdown(quality_header, [[name, *quality_cells(by_seed(runs, name))] for name in names]),
        f"{NAME}-costs": markdown(costs_header, [[name, *cost_cells(rows[name])] for name in names]),
    }


def cost_cells(row: Mapping[str, float]) -> list[str]:
    forms = {"parameters": ",d", "query_and_key": ",d", "mflops": ".1f", "train_ms": ".1f",
        "translate_ms": ".0f"}  # fmt: skip
    return [format(row[what], form) for what, form in forms.items()]


def draw(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> Figure:
    """Quality over the key width."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    D_ks = widths(settings["width"])
    for axes, what, words, factor, form in zip(
        figure.subplots(1, 2), ("sentences", "loss"), ("sentences translated right, %", "held-out loss, nats a word"),
        (100, 1), (".0f", ".2f"), strict=True,
    ):  # fmt: skip
        narrowest = []
        for kind, color in KINDS.items():
            models = [by_seed(runs, label(kind, D_k)) for D_k in D_ks]
            values = [[factor * m[what] for m in of] for of in models]
            line(axes, D_ks, values, color, kind)
            narrowest.append(f"{mean(values[-1]):{form}} {kind}")
        message(axes, f"At D_k {D_ks[-1]}, {words}: {', '.join(narrowest)}")
        axes.set(xlabel="key width of all heads, D_k (logarithmic)", ylabel=words, xscale="log")
        axes.set_xticks(D_ks, [str(D_k) for D_k in D_ks])
        axes.set_xticks([], minor=True)
        axes.grid()
        legend(axes)
    return figure
