"""Claims of papers about the heads of trained models, tested on MiniLM; the control has random weights.

1. Heads attend more similarly in deeper layers; one or two heads of a layer differ from the others (Clark et al. 2019).
2. A few heads look at one offset, or at the rarest word (Voita et al. 2019).
3. Queries and keys of all heads together need few dimensions, those of a single head nearly all (Cordonnier et al.
   2020).
4. The bias of the keys has no effect, that of the queries has one (the same paper).
5. Measures of importance rank heads similarly to leaving them out (Michel et al. 2019; Voita et al. 2019).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from statistics import mean
from typing import Any, Final

import sentences
import torch
from lab import Lab, Run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import DEPTH
from rankings import relevance_of, scores_of
from tables import markdown
from torch import Tensor, nn

import heads_kernels as hk
from benchmarks.figures import BLUE, GREY, ORANGE, message

NAME = "heads_of_minilm"
MODELS: Final = ("MiniLM", "random weights")
PARTS: Final = {"query": "queries", "key": "keys", "value": "values"}
ENERGY: Final = 0.9
#: A head is odd if its mean distance to the others of its layer is more than this times the median of the layer.
ODD: Final = 1.5


def run(lab: Lab) -> None:
    """Run all parts, with both models where that is meaningful."""
    settings = sentences.settings_of(lab)
    results = lab.results(NAME, settings)
    for name in MODELS:
        results.run(f"attention, {name}", partial(attention, lab, settings, name))
        results.run(f"energy, {name}", partial(energy, name))
    results.run("biases", partial(biases, settings))
    results.run("importance", partial(importance, lab, settings))


def model_of(name: str) -> nn.Module:
    """MiniLM, or an untrained model of the same shape."""
    model: Any = sentences.load()
    if name != "MiniLM":
        torch.manual_seed(0)
        model = type(model)(model.config).eval()
        hk.integrations.transformers.use(model)
    return model


# ---------------------------------------------------------------------- 1, 2: what heads attend to
def attention(lab: Lab, settings: sentences.Settings, name: str) -> Run:
    """Distances between heads, statistics and roles; a row for each layer."""
    model = model_of(name)
    read, _ = sentences.texts(settings)
    data = sentences.batches(read, settings.batch)
    lab.bar.start(f"attention, {name}", 3)
    distance = hk.analysis.distance(model, data)
    lab.bar.step(1, "distances")
    statistics = hk.analysis.statistics(
        model, data, exclude_keys=sentences.SPECIAL, token_sets={"special": sentences.SPECIAL}
    )
    lab.bar.step(2, "statistics")
    counts = Counter(int(token) for row in sentences.everything() for token in row)
    roles = hk.analysis.roles(model, data, special=sentences.SPECIAL, counts=counts)
    lab.bar.step(3, "roles")
    layers = [
        {name: scores.scores[n].tolist() for name, scores in statistics.measures.items()}
        for n in range(len(statistics.rows))
    ]
    found = roles.positional() + roles.syntactic() + roles.rare_word()
    return {
        "distance": {
            **as_json(distance),
            "within": as_json(distance.within()),
            "embedding": as_json(distance.embedding()),
        },
        "statistics": {"layers": layers},
        "roles": {**as_json(roles), "roles": as_json(found)},
    }


def as_json(value: Any) -> Any:
    """A result of the analysis as JSON types: a dataclass is a dict of its fields, a tensor a list."""
    if isinstance(value, hk.analysis.HeadScores):
        names = zip(value.layers, value.scores, strict=True)
        layers = [{"name": name, "scores": scores.tolist()} for name, scores in names]
        return {"method": value.method, "layers": layers}
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    return value


def odd_heads(distance: Mapping[str, Any], layer: int) -> list[int]:
    """The heads of a layer that are far from its other heads; see `ODD`."""
    own = [row for row, (place, _) in enumerate(distance["heads"]) if place == layer]
    block = torch.tensor(distance["matrix"])[own][:, own]
    means = block.sum(1) / (len(own) - 1)
    return [head for head, mean in enumerate(means) if mean > ODD * means.median()]


# ---------------------------------------------------------------------- 3: captured energy
def energy(name: str) -> Run:
    """For each layer, the number of dimensions with 90 % of the energy: of all heads together, and of each head."""

    def needed(shares: Tensor) -> Any:
        return ((shares < ENERGY).sum(-1) + 1).tolist()

    layers = [
        {
            "stacked_query": needed(held.stacked_query),
            "stacked_key": needed(held.stacked_key),
            "stacked_product": needed(held.stacked_product),
            "heads": needed(held.product),
            "dimensions": [held.stacked_product.shape[-1], held.product.shape[-1]],
            "curve": held.stacked_product.tolist(),
            "head_curve": held.product.mean(0).tolist(),
        }
        for held in hk.convert.curves(model_of(name), progress=False).energy
    ]
    return {"layers": layers}


# ---------------------------------------------------------------------- 4: biases
def biases(settings: sentences.Settings) -> Run:
    """How the embeddings of held-out sentences change if a bias is set to 0 in all layers."""
    _, held_out = sentences.texts(settings)
    data = sentences.batches(held_out, settings.batch)
    original = sentences.embedded(sentences.load(), data)
    found = {}
    for part in PARTS:
        model = sentences.load()
        for layer in hk.heads.projected_layers(model):
            nn.init.zeros_(getattr(layer, part).linear.bias)
        changed = sentences.embedded(model, data)
        largest = (changed - original).abs().max().item()
        found[part] = {**sentences.agreement(changed, original), "largest": largest}
    return {"without": found}


# ---------------------------------------------------------------------- 5: importance
def importance(lab: Lab, settings: sentences.Settings) -> Run:
    """Scores by each measure, with the loss of halves of sentences and, if the measure allows it, without a loss."""
    model = model_of("MiniLM")
    read, _ = sentences.texts(settings)
    halves = sentences.halves(read, settings.batch)
    scores = scores_of(lab, model, halves, sentences.halves_loss, sentences.SPECIAL)
    whole = sentences.batches(read, settings.batch)
    free = scores_of(lab, model, whole, sentences.embeddings, sentences.SPECIAL, ("leave one out", "Fisher"))
    scores |= {f"{name}, without a loss": each for name, each in free.items()}
    few = sentences.batches(read[: settings.relevance], settings.batch)
    scores["relevance"] = relevance_of(lab, model, few, output)
    references = [name for name in scores if name.startswith("leave one out")]
    return {
        "scores": {name: as_json(each) for name, each in scores.items()},
        "ranked": {name: each.ranked() for name, each in scores.items()},
        "spearman": {name: {of: each.spearman(scores[of]) for of in references} for name, each in scores.items()},
    }


def output(model: Any, batch: sentences.Batch) -> tuple[Tensor, Tensor]:
    """The output whose relevance is propagated: the embedding of each sentence, its numbers weighted by their size."""
    means = sentences.means(model, batch)
    return means, means.abs()


# ---------------------------------------------------------------------- report
def tables(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, str]:
    """A table for each of the five."""
    return {
        f"{NAME}-layers": table_of_layers(runs),
        f"{NAME}-roles": table_of_roles(runs),
        f"{NAME}-energy": table_of_energy(runs),
        f"{NAME}-biases": table_of_biases(runs["biases"]),
        f"{NAME}-importance": table_of_importance(runs["importance"]),
    }


def table_of_layers(runs: Mapping[str, Any]) -> str:
    distance, control = (runs[f"attention, {name}"]["distance"] for name in MODELS)
    rows = []
    for number, layer in enumerate(runs["attention, MiniLM"]["statistics"]["layers"]):
        odd = odd_heads(distance, number)
        rows.append([
            f"layer {number}", f"{distance['within'][number]:.3f}",
            f"{control['within'][number]:.3f}", len(odd),
            *(f"{mean(layer[what]):.2f}" for what in ("confidence", "entropy")),
            f"{mean(layer['distance']):.1f}", f"{100 * mean(layer['to_special']):.0f}",
        ])  # fmt: skip
    header = ("", "distance of its heads, nats", "random weights", "odd heads", "confidence",
        "entropy, nats", "tokens away", "to [CLS], [SEP], %")  # fmt: skip
    return markdown(header, rows)


def table_of_roles(runs: Mapping[str, Any]) -> str:
    """The number of heads above the usual thresholds, and the best heads."""
    rows = []
    for name in MODELS:
        roles = runs[f"attention, {name}"]["roles"]
        positional = [r for r in roles["roles"] if r["role"] == "positional"]
        heads = [f"layer {layer_of(r)}: {r['what']}, {r['share']:.0%}" for r in positional]
        shares = [value for layer in roles["offset_share"]["layers"] for value in layer["scores"]]
        rare = [value for layer in roles["rare_words"]["rarest"]["layers"] for value in layer["scores"]]
        chance = roles["rare_words"]["chance"][0]
        rows += [
            [f"{name}: one offset in 90 % of the rows", len(positional), f"{max(shares):.0%}", "",
                "; ".join(heads)],
            [f"{name}: the rarest word in half of the rows", sum(v >= 0.5 for v in rare),
                f"{max(rare):.0%}", f"{chance:.0%}", ""],
        ]  # fmt: skip
    return markdown(("", "heads", "best head", "by chance", "which"), rows)


def layer_of(role: Mapping[str, Any]) -> int:
    """The number in the name of the layer."""
    return next(int(part) for part in role["layer"].split(".") if part.isdigit())


def table_of_energy(runs: Mapping[str, Any]) -> str:
    trained, control = (runs[f"energy, {name}"]["layers"] for name in MODELS)
    rows = []
    for number, (layer, random) in enumerate(zip(trained, control, strict=True)):
        stacked = [layer[f"stacked_{what}"] for what in ("query", "key", "product")]
        rows.append([f"layer {number}", *stacked, random["stacked_product"],
            f"{mean(layer['heads']):.1f}", f"{mean(random['heads']):.1f}"])  # fmt: skip
    stacked_of, head_of = trained[0]["dimensions"]
    header = ("", f"W_Q, of {stacked_of}", "W_K", "W_Q W_K^T", "random W_Q W_K^T",
        f"W_Q W_K^T of a head, of {head_of}", "random weights")  # fmt: skip
    return markdown(header, rows)


def table_of_biases(found: Mapping[str, Any]) -> str:
    rows = [
        [f"without the bias of the {PARTS[part]}", f"{row['largest']:.1e}", f"{100 * row['cosine']:.2f}",
            f"{100 * row['neighbours']:.1f}"]
        for part, row in found["without"].items()
    ]  # fmt: skip
    header = ("", "largest change of a number", "cosine, %", "same nearest neighbour, %")
    return markdown(header, rows)


def table_of_importance(found: Mapping[str, Any]) -> str:
    references = list(next(iter(found["spearman"].values())))
    rows = [[name, *(f"{row[of]:.2f}" for of in references)] for name, row in found["spearman"].items()]
    return markdown(("Spearman's rank correlation with", *references), rows)


def draw(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> Figure:
    """Distances over depth, the heads in the plane, energy over dimensions."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    depth, plane, held = figure.subplots(1, 3)
    distance, control = (runs[f"attention, {name}"]["distance"] for name in MODELS)
    within = distance["within"]
    last = len(within) - 1
    depth.plot(within, "o-", color=BLUE, markersize=4, label="MiniLM")
    depth.plot(control["within"], "o-", color=GREY, markersize=4, label="random weights")
    message(
        depth,
        f"Heads of a layer are {within[0]:.2f} nats apart in layer 0, {within[-1]:.2f} in layer {last}",
    )
    depth.set(xlabel="layer", ylabel="divergence of two heads, mean, nats", ylim=(0, None))
    depth.set_xticks(range(last + 1))
    points = torch.tensor(distance["embedding"])
    layers = [layer for layer, _ in distance["heads"]]
    drawn = plane.scatter(*points.T, c=layers, cmap=DEPTH, s=16)
    closest = min(range(last + 1), key=within.__getitem__)
    message(plane, f"Heads that attend alike are near each other; those of layer {closest} are closest")
    plane.set(xlabel="first coordinate, nats", ylabel="second coordinate, nats")
    figure.colorbar(drawn, ax=plane, label="layer", ticks=range(last + 1))
    energies = runs["energy, MiniLM"]["layers"]
    for layer in (0, last // 2, last):
        curve(held, energies[layer]["curve"], DEPTH(layer / last), f"all heads, layer {layer}")
    curve(held, energies[0]["head_curve"], ORANGE, "one head, mean of layer 0")
    held.axhline(100 * ENERGY, color=GREY, lw=1, ls=":", label=f"{ENERGY:.0%}")
    stacked, single = ([100 * need for need in needs] for needs in zip(*map(shares_needed, energies), strict=True))
    message(held, f"{ENERGY:.0%} of the energy is in {min(stacked):.0f} to {max(stacked):.0f} % of the dimensions of "
        f"all heads, {min(single):.0f} to {max(single):.0f} % of one head's")  # fmt: skip
    held.set(xlabel="dimensions, % of all", ylabel="energy of $W_Q W_K^T$, %", ylim=(0, 102))
    for axes in (depth, held):
        axes.legend()
    for axes in (depth, plane, held):
        axes.grid()
    return figure


def curve(axes: Axes, shares: list[float], color: Any, label: str) -> None:
    places = [100 * place / len(shares) for place in range(1, len(shares) + 1)]
    axes.plot(places, [100 * share for share in shares], color=color, lw=1.6, label=label)


def shares_needed(layer: Mapping[str, Any]) -> tuple[float, float]:
    """The shares of the dimensions with `ENERGY`: of all heads together, and of a head on average."""
    stacked_of, head_of = layer["dimensions"]
    return layer["stacked_product"] / stacked_of, mean(layer["heads"]) / head_of
