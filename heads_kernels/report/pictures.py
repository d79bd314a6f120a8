"""What each section of a report says and shows: a sentence, and pictures with a message and a description."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

from heads_kernels.report import drawing
from heads_kernels.report.drawing import Picture
from heads_kernels.report.results import (
    Findings,
    by_layer,
    head_name,
    head_names,
    percent,
    span,
    top_row,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A cosine that counts as hardly changed.
CLOSE: Final = 0.95
#: Measures of importance, the preferred one first, each as a word and as a phrase.
_MEASURES: Final = {
    "leave_one_out": ("leaving out", "change of the embeddings when the head is left out"),
    "fisher": ("Fisher", "Fisher information of the head's gate"),
    "confidence": ("confidence", "confidence of the head's attention"),
}


# ---------------------------------------------------------------------- which heads matter
def importance(found: Findings) -> tuple[str, list[Picture]]:
    table = found["importance"]["table"]
    reference = next(column for column in _MEASURES if column in table[0])
    top = sorted(table, key=lambda row: -row[reference])
    few = max(1, round(len(top) / 10))
    total = sum(row[reference] for row in table) or 1
    share = sum(row[reference] for row in top[:few]) / total
    said = (
        f"{head_names(top[:5])} matter most. By {_MEASURES[reference][0]}, "
        f"{few} of {len(top)} heads account for {percent(share)} of the total."
    )
    shares, pictures = {}, []
    for column, (name, what) in _MEASURES.items():
        if column not in table[0]:
            continue
        whole = sum(row[column] for row in table) or 1
        shares[column] = by_layer(found, "importance", column, 100 / whole)
        best = head_names(sorted(table, key=lambda row: -row[column])[:3])
        pictures.append(
            drawing.grid(f"By {name}, {best} come first", what, shares[column], "% of all heads", "{:.1f}")
        )  # fmt: skip
    agreement = found["importance"].get("spearman_with_leave_one_out", {})
    ranks = [
        f"{_MEASURES[key][0]} {rank:.2f}" for key, rank in agreement.items() if rank is not None
    ]
    if ranks:
        said += f" Rank correlation with leaving out (1: the same order): {', '.join(ranks)}."
    if reference == "leave_one_out":
        pictures.append(_agreement(shares, agreement["fisher"]))
    return said, pictures


def _agreement(shares: Mapping[str, list[list[float]]], spearman: float | None) -> Picture:
    points = {
        (layer, head): (x, shares["fisher"][layer][head])
        for layer, row in enumerate(shares["leave_one_out"])
        for head, x in enumerate(row)
    }
    rank = "" if spearman is None else f": rank correlation {spearman:.2f}"
    verb = "agrees with" if (spearman or 0) > 0.5 else "differs from"
    return Picture(
        f"Fisher {verb} leaving out{rank}",
        f"{len(points)} points, one for each head, darker in deeper layers; both axes are logarithmic{rank}.",
        drawing.scatter(
            points, "leaving out, % of all heads", "Fisher, % of all heads", logarithmic=True
        ),
    )


# ---------------------------------------------------------------------- how many can be closed
def pruning(found: Findings) -> tuple[str, list[Picture]]:
    table = found["pruning"]["table"]
    most = {
        name: max((row["closed"] for row in table if row[name] >= CLOSE), default=0)
        for name in table[0]
        if name not in ("closed", "closed_share")
    }
    random = [count for name, count in most.items() if name.startswith("random")]
    heads = table[-1]["closed"]
    said = (
        f"With the least important first, at least {most['importance']} of {heads} heads can be closed "
        f"at a cosine of {CLOSE} or more; in random order at least {span(random)}, "
        f"with the most important first at least {most['reversed']}."
    )
    lines = {
        "least important first": [row["importance"] for row in table],
        "random order": [mean(each) for each in _random(table)],
        "most important first": [row["reversed"] for row in table],
    }
    half = min(range(len(table)), key=lambda place: abs(table[place]["closed_share"] - 0.5))
    at_half = ", ".join(f"{values[half]:.2f} with {name}" for name, values in lines.items())
    seen = (
        f"Three curves fall from {lines['random order'][0]:.2f} to {lines['random order'][-1]:.2f} as all {heads} "
        f"heads are closed. With {table[half]['closed']} closed the cosine is {at_half}."
    )
    message = f"{most['importance']} of {heads} heads can be closed at a cosine of {CLOSE}"
    return said, [Picture(message, seen, _pruning(table, lines))]


def prunable(found: Findings) -> dict[int, list[int]]:
    """The heads closed at the pruning curve's last point with a cosine of `CLOSE` or more: `{layer: [heads]}`."""
    table, order = found["pruning"]["table"], found["pruning"]["order"]
    count = max((row["closed"] for row in table if row["importance"] >= CLOSE), default=0)
    heads: dict[int, list[int]] = {}
    for layer, head in sorted(order[:count]):
        heads.setdefault(layer, []).append(head)
    return heads


def _random(table: list[dict[str, Any]]) -> list[list[float]]:
    return [[row[name] for name in row if name.startswith("random")] for row in table]


def _pruning(table: list[dict[str, Any]], lines: Mapping[str, list[float]]) -> Figure:
    figure, axes = drawing.canvas(3.6)
    closed, random = [row["closed"] for row in table], _random(table)
    styles = ((drawing.BLUE, "o"), (drawing.GREY, "s"), (drawing.ORANGE, "v"))
    for (name, values), (color, marker) in zip(lines.items(), styles, strict=True):
        axes.plot(closed, values, color=color, marker=marker, markersize=4, lw=2, label=name)
    if len(random[0]) > 1:
        axes.fill_between(closed, [min(each) for each in random], [max(each) for each in random],
            color=drawing.GREY, alpha=0.25, linewidth=0, label=f"range of {len(random[0])}")  # fmt: skip
    axes.axhline(CLOSE, color=drawing.INK, lw=1, ls=":", label=f"cosine {CLOSE}")
    axes.set(xlabel=f"closed heads of {closed[-1]}", xlim=(0, closed[-1]),
        ylabel="cosine with the whole model's embedding")  # fmt: skip
    axes.grid()
    figure.legend(loc="outside upper left", ncols=3)
    return figure


# ---------------------------------------------------------------------- what they attend to
def sharpness(found: Findings) -> tuple[str, list[Picture]]:
    table = sorted(found["statistics"]["table"], key=lambda row: -row["confidence"])
    sharp = ", ".join(f"{head_name(row)} ({percent(row['confidence'])})" for row in table[:3])
    average = percent(mean(row["confidence"] for row in table))
    confidence = by_layer(found, "statistics", "confidence", 100)
    entropy = by_layer(found, "statistics", "entropy")
    far, farthest = by_layer(found, "statistics", "distance"), top_row(table, "distance")
    return f"The sharpest heads are {sharp}; the mean of all is {average}.", [
        drawing.grid(f"{head_name(table[0])} gives {percent(table[0]['confidence'])} of its attention to one token",
            "attention of the likeliest token (confidence)", confidence, "% of attention"),
        drawing.by_depth("Entropy of attention", entropy, "nats", "{:.2f}"),
        drawing.grid(f"{head_name(farthest)} attends farthest: {farthest['distance']:.1f} tokens away",
            "mean distance of attention", far, "tokens", "{:.1f}"),
        drawing.by_depth("Mean distance of attention", far, "tokens", "{:.1f}"),
    ]  # fmt: skip


def targets(found: Findings) -> tuple[str, list[Picture]]:
    kinds = {
        "to_previous": "the token before",
        "to_self": "the token itself",
        "to_next": "the token after",
        "to_first": "the first token",
        "to_separator": "separators",
        "to_punctuation": "punctuation",
    }
    table = found["statistics"]["table"]
    means = {column: percent(mean(row[column] for row in table)) for column in kinds}
    pictures = []
    for column, what in kinds.items():
        shares = by_layer(found, "statistics", column, 100)
        best = top_row(table, column)
        pictures.append(
            drawing.grid(f"To {what}: most in {head_name(best)}, {percent(best[column])}",
                f"attention to {what}", shares, "% of attention")
        )  # fmt: skip
    return (
        f"On average {means['to_first']} of attention goes to the first token, {means['to_separator']} to separators "
        f"and {means['to_punctuation']} to punctuation."
    ), pictures


def roles(found: Findings) -> tuple[str, list[Picture]]:
    table, chance = found["roles"]["table"], found["roles"]["rarest_by_chance"]
    common = found["roles"]["common_words"]
    named = [f"{head_name(row)} ({row['role']})" for row in table if row["role"]]
    said = f"{', '.join(named) or 'No head has one of these roles'}. "
    share = by_layer(found, "roles", "offset_share", 100)
    places = [[_signed(int(place)) for place in row] for row in by_layer(found, "roles", "offset")]
    framed = {(row["layer"], row["head"]): row["role"] for row in table if row["role"]}
    at_offset = [place for place, role in framed.items() if role.startswith("offset")]
    pictures = [
        drawing.grid(f"{len(at_offset) or 'No'} heads attend to one offset",
            "rows whose most attended token is at the offset written in the cell", share, "% of rows",
            words=places, top=100, framed=at_offset)
    ]  # fmt: skip
    if chance is None:
        return (
            f"{said}Heads of the rarest word are left out: the text has {found['roles']['different_words']} different "
            f"words, and with fewer than {2 * common} chance finds the rarest too often."
        ), pictures
    rare, best = by_layer(found, "roles", "rarest", 100), top_row(table, "rarest")
    others = [place for place in framed if place not in at_offset]
    often = f"{head_name(best)}, in {percent(best['rarest'])} of the rows"
    pictures.append(
        drawing.grid(f"Most often to the rarest word: {often}",
            "rows whose most attended token is the rarest word", rare, "% of rows", top=100, framed=others)
    )  # fmt: skip
    said += (
        f"The rarest word is attended to most often by {often} (by chance {percent(chance)}). "
        f"All words but the {common} most frequent of the text count as rare."
    )
    return said, pictures


# ---------------------------------------------------------------------- how alike they are
def distance(found: Findings) -> tuple[str, list[Picture]]:
    table = found["distance"]["table"]
    odd = top_row(table, "to_own_layer")
    far = sorted(table, key=lambda row: -(row["x"] ** 2 + row["y"] ** 2))[:6]
    points = {(row["layer"], row["head"]): (row["x"], row["y"]) for row in table}
    within = by_layer(found, "distance", "to_own_layer")
    return f"The head least similar to the others of its layer is {head_name(odd)}.", [
        drawing.by_depth("Distance within the layer", within, "nats", "{:.2f}"),
        Picture(f"{head_name(far[0])} attends most differently from the others",
            f"{len(table)} points, one for each head, close together if heads attend alike, darker in deeper layers. "
            f"Farthest from the middle: {head_names(far)}.",
            drawing.scatter(points, "first coordinate, nats", "second coordinate, nats",
                named=[(row["layer"], row["head"]) for row in far])),
    ]  # fmt: skip


# ---------------------------------------------------------------------- how many dimensions
def energy(found: Findings) -> tuple[str, list[Picture]]:
    layers = found["energy"]["layers"]
    said = " ".join(sorted({each["reason"] for each in found["energy"]["skipped"]}))
    if not layers:
        return said, []
    pictures = []
    for name, whose in (
        ("stacked_product", "All heads of a layer"),
        ("single_product", "A single head"),
    ):
        rows = [row for row in found["energy"]["table"] if row["curve"] == name]
        enough = span([row["dimensions_for_90_percent"] for row in rows])
        each = ", ".join(
            f"{row['dimensions_for_90_percent']} in layer {row['layer']}" for row in rows
        )
        pictures.append(
            Picture(f"{whose}: 90 % of the energy in {enough} of {rows[0]['dimensions']} dimensions",
                f"Rising curves of at most {drawing.MOST_CURVES} layers. Dimensions for 90 % of the energy: {each}.",
                drawing.curves_of_layers({layer["layer"]: [0.0, *layer[name]] for layer in layers},
                    f"dimensions, % of {rows[0]['dimensions']}", "captured energy of $W_Q^\\top W_K$, %",
                    (90, "90 %")))
        )  # fmt: skip
    errors = {layer["layer"]: layer["weight_error"] for layer in layers}
    features = max(map(len, errors.values())) - 1
    halves = {layer: round(100 * curve[len(curve) // 2]) for layer, curve in errors.items()}
    each = ", ".join(f"{error} % in layer {layer}" for layer, error in halves.items())
    pictures.append(
        Picture(f"With half of the features the error is {span([*halves.values()])} %",
            f"Falling curves of at most {drawing.MOST_CURVES} layers. With half of the features the error is {each}.",
            drawing.curves_of_layers(errors, f"features kept, % of {features}",
                "error of the products of all heads, %", None))
    )  # fmt: skip
    return said, pictures


# ---------------------------------------------------------------------- one sentence
def all_maps(found: Findings) -> tuple[str, list[Picture]]:
    layers = [layer["layer"] for layer in found["maps"]["layers"]]
    maps = [each[0] for each in found["maps"]["attention"]]
    heads = [rows for layer in maps for rows in layer]
    first = sum(1 for rows in heads if _columns(rows).index(max(_columns(rows))) == 0)
    seen = (
        f"{len(heads)} small attention maps, a row of them for each layer, of a sentence of "
        f"{len(found['maps']['tokens'])} tokens. In {first} of them the first token gets the most attention."
    )
    message = f"The first token gets the most attention in {first} of {len(heads)} heads"
    figure = drawing.maps_of_heads(maps, layers)
    return " ".join(found["maps"]["tokens"]), [Picture(message, seen, figure, wide=True)]


def chosen_maps(found: Findings) -> tuple[str, list[Picture]]:
    tokens = found["maps"]["tokens"]
    line = {layer["layer"]: n for n, layer in enumerate(found["maps"]["layers"])}
    pictures = []
    for layer, head in found["maps"].get("heads") or sharpest(found):
        rows = found["maps"]["attention"][line[layer]][0][head]
        best = [row.index(max(row)) for row in rows]
        where = _most_attended(best, tokens)
        strongest = sorted(range(len(rows)), key=lambda place: -rows[place][best[place]])[:3]
        pairs = ", ".join(
            f"{tokens[place]} to {tokens[best[place]]} ({percent(rows[place][best[place]])})"
            for place in strongest
        )
        pictures.append(
            Picture(f"{layer}:{head} attends most to {where}",
                f"Attention map of head {layer}:{head}: most attention to {where}. Strongest: {pairs}.",
                drawing.map_of_head(rows, tokens))
        )  # fmt: skip
    return "", pictures


def sharpest(found: Findings, most: int = 12) -> list[tuple[int, int]]:
    """The head with the highest confidence in each of at most `most` layers, evenly spaced.

    Confidence is that on the whole text, or in this sentence where the layer has no statistics.
    """
    on_text = by_layer(found, "statistics", "confidence") if "statistics" in found else []
    shown = list(zip(found["maps"]["layers"], found["maps"]["attention"], strict=True))
    chosen = []
    for layer, (maps,) in shown[:: ceil(len(shown) / most)]:
        here = [sum(map(max, maps[head])) for head in range(layer["heads"])]
        sharp = dict(enumerate(on_text)).get(layer["layer"], here)
        chosen.append((layer["layer"], sharp.index(max(sharp))))
    return chosen


# ---------------------------------------------------------------------- as text
def _most_attended(best: list[int], tokens: list[str]) -> str:
    """The key that most rows attend to most, as text: an offset, or a token."""
    ((offset, rows),) = Counter(key - place for place, key in enumerate(best)).most_common(1)
    ((key, same),) = Counter(best).most_common(1)
    if same > rows:
        return f"{tokens[key]} in {same} of {len(best)} rows"
    far = {0: "itself", -1: "the token before", 1: "the token after"}
    return f"{far.get(offset, f'offset {offset:+d}')} in {rows} of {len(best)} rows"


def _columns(rows: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _signed(place: int) -> str:
    return f"{place:+d}".replace("-", "\N{MINUS SIGN}") if place else "0"
