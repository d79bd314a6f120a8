"""Heads that learn how sparse they are: alpha-entmax in place of softmax, with an alpha per head.

After Correia, Niculae and Martins 2019. The controls are softmax, which gives every key a probability above 0, and
entmax with alpha 1.5 in all heads; everything else is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from corpus import Corpus, padded
from lab import Lab, Run
from matplotlib.figure import Figure
from plots import DEPTH
from tables import by_seed, each, markdown, quality_cells, seeds_of
from training import learn
from transformer import Translator
from translators import corpus_of, logits, new_model, quality
from translators import settings_of as translation_of

import heads_kernels as hk
from benchmarks.figures import GREY, message

NAME = "sparse_heads"
#: Kind of probabilities: whether they are entmax, and whether alpha is learned.
KINDS: Final = {
    "softmax": (False, False),
    "entmax, alpha 1.5": (True, False),
    "entmax, alpha learned": (True, True),
}
LEARNED: Final = "entmax, alpha learned"
#: The kinds of attention, in the order of the panels.
ATTENTION: Final = ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class HeadsOfLayer:
    """The heads of a layer on held-out pairs; `support` is the mean share of visible keys above 0."""

    kind: str
    alpha: list[float]
    support: list[float]


def run(lab: Lab) -> None:
    """Every kind of probabilities, for all seeds."""
    results = lab.results(NAME, translation_of(lab))
    for seed in lab.seeds:
        for kind in KINDS:
            name = f"{kind}, seed {seed}"
            results.run(name, partial(train_one, lab, name, kind, seed))


def train_one(lab: Lab, name: str, kind: str, seed: int) -> Run:
    """Quality, and the share of keys to which each head attends."""
    settings = translation_of(lab)
    entmax, learned = KINDS[kind]
    corpus = corpus_of(settings, seed)
    attention = partial(hk.nn.GatedMultiheadAttention, entmax=entmax)
    model = new_model(settings, seed, attention)
    for layer in hk.heads.attention_layers(model):
        if entmax and not learned:
            layer.module.alpha_logits.requires_grad_(False)
    learning = learn(model, corpus.batches(settings.batch, seed), settings.steps)
    lab.bar.follow(name, settings.steps, learning)
    found = heads_of(model.eval(), corpus) if entmax else []
    return {**quality(model, corpus), "layers": [asdict(layer) for layer in found]}


@torch.no_grad()
def heads_of(model: Translator, corpus: Corpus) -> list[HeadsOfLayer]:
    """The heads of each layer on the held-out pairs."""
    found: list[HeadsOfLayer] = []

    def see(layer: hk.heads.AttentionLayer, call: hk.analysis.AttentionCall) -> None:
        visible = replace(call, alpha=None).support_sizes()  # of softmax: all keys that a row sees
        rows = visible.sum(1) > 0
        share = call.support_sizes() / visible.clamp(min=1)
        shares = [share[:, h][rows].mean().item() for h in range(call.H)]
        alpha = layer.module.alpha
        found.append(HeadsOfLayer(layer.kind, alpha.tolist(), shares))

    with hk.analysis.observe(model, see):
        logits(model, padded(corpus.held_out))
    return found


# ---------------------------------------------------------------------- report
def tables(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, str]:
    """Quality and sparsity, a number for each seed."""
    header = ("probabilities", "words, %", "sentences, %", "nats a word",
        *(f"keys above 0, {kind}, %" for kind in ATTENTION), "alpha, least to largest")  # fmt: skip
    rows = []
    for kind, (entmax, learned) in KINDS.items():
        found = by_seed(runs, kind)
        above = [each((mean_of(m, of) for m in found), ".0%") if entmax else "100" for of in ATTENTION]
        alphas = [sorted(alphas_of(m)) for m in found]
        spread = ", ".join(f"{each[0]:.2f} to {each[-1]:.2f}" for each in alphas) if learned else ""
        rows.append([kind, *quality_cells(found), *above, spread or ("1.5" if entmax else "")])
    return {NAME: markdown(header, rows)}


def mean_of(run: Mapping[str, Any], kind: str) -> float:
    """The share of keys above 0 over all heads of a kind of attention."""
    shares = [s for layer in run["layers"] if layer["kind"] == kind for s in layer["support"]]
    return sum(shares) / len(shares)


def alphas_of(run: Mapping[str, Any]) -> list[float]:
    return [alpha for layer in run["layers"] for alpha in layer["alpha"]]


def draw(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> Figure:
    """Alpha and the share of keys above 0 of every head that learned it, for each kind of attention."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    found = by_seed(runs, LEARNED)
    for axes, kind in zip(figure.subplots(1, 3, sharex=True, sharey=True), ATTENTION, strict=True):
        axes.axvline(1.5, color=GREY, lw=1, ls="--")
        for run in found:
            layers = [layer for layer in run["layers"] if layer["kind"] == kind]
            for depth, layer in enumerate(layers):
                color = DEPTH(depth / max(1, len(layers) - 1))
                percent = [100 * share for share in layer["support"]]
                label = f"layer {depth}" if run is found[0] else None
                axes.plot(layer["alpha"], percent, "o", color=color, markersize=4, label=label)
        shares = each((mean_of(run, kind) for run in found), ".0%")
        message(axes, f"{kind}: {shares} % of the keys above 0")
        axes.set(xlabel="alpha of a head (all start at 1.5)", ylim=(0, 105))
        axes.grid()
    figure.axes[0].set_ylabel("keys above 0, %")
    figure.axes[0].legend(title=f"seeds {', '.join(map(str, seeds_of(runs)))}")
    return figure
