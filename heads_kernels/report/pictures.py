"""The pictures of a report, each drawn from what the stages found, as their files hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from heads_kernels.report.drawing import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    WIDTH,
    Panel,
    by_depth,
    canvas,
    grids,
    layer_name,
    of_layers,
)
from heads_kernels.report.folder import Found

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What the stages found, by their names.
Findings = Mapping[str, Found]


def by_layer(found: Findings, stage: str, column: str, factor: float = 1.0) -> list[list[float]]:
    """A column of a stage's table with a row for each head, as `[L][H]`, times a factor."""
    table = found[stage]["table"]
    layers = 1 + max(row["layer"] for row in [*table, *found["model"]["table"]])
    values: list[list[float]] = [[] for _ in range(layers)]
    for row in table:
        values[row["layer"]].append(row[column] * factor)
    return values


# ---------------------------------------------------------------------- which heads matter
def importance(found: Findings) -> Figure:
    titles = {
        "leave_one_out": "How far embeddings move without the head",
        "fisher": "How fast they move with its gate (Fisher)",
        "confidence": "How sharply it looks (confidence)",
    }
    shares = {}
    for column in titles:
        total = sum(row[column] for row in found["importance"]["table"]) or 1
        shares[column] = by_layer(found, "importance", column, 100 / total)
    figure, axes = grids(
        [Panel(titles[name], "% of all heads", share, "{:.1f}") for name, share in shares.items()]
    )
    axes[3].set_visible(True)
    agreement = found["importance"]["spearman_with_leave_one_out"]["fisher"]
    _agreement(axes[3], shares["leave_one_out"], shares["fisher"], agreement)
    return figure


def _agreement(
    axes: Axes, left_out: list[list[float]], fisher: list[list[float]], spearman: float | None
) -> None:
    """Two ways of asking for the same: every head."""
    for color, x, y in zip(of_layers(len(left_out)), left_out, fisher, strict=True):
        axes.scatter(x, y, s=22, color=color, edgecolors=INK, linewidths=0.4)
    axes.set(xscale="log", yscale="log", xlabel="without the head, % of all heads",
        ylabel="Fisher, % of all heads")  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        plain = [d * 10.0**n for n in range(-9, 3) for d in (1, 2, 5) if low < d * 10.0**n < high]
        axis.set_ticks(plain, [f"{tick:g}" for tick in plain])
        axis.set_ticks([], minor=True)
    said = "" if spearman is None else f", Spearman {spearman:.2f}"
    axes.set_title(
        f"The first two agree{said}" if (spearman or 0) > 0.5 else f"The first two{said}"
    )
    axes.grid()


def pruning(found: Findings) -> Figure:
    figure, axes = canvas(1, 1, (7.5, 4.2))
    (panel,) = axes.flat
    table = found["pruning"]["table"]
    closed = [100 * row["closed_share"] for row in table]
    random = [[row[name] for name in row if name.startswith("random")] for row in table]
    means = [sum(each) / len(each) for each in random]
    panel.fill_between(closed, list(map(min, random)), list(map(max, random)), color=GREY,
        alpha=0.25, linewidth=0)  # fmt: skip
    lines = (
        ("least important first", BLUE, "o", [row["importance"] for row in table]),
        (f"random order, mean and range of {len(random[0])}", GREY, "s", means),
        ("most important first", ORANGE, "v", [row["reversed"] for row in table]),
    )
    for name, color, marker, values in lines:
        panel.plot(closed, values, color=color, marker=marker, markersize=5, lw=2, label=name)
    panel.set(title="What is left of the embeddings when heads are closed",
        xlabel=f"heads closed, % of {table[-1]['closed']}",
        ylabel="cosine with the whole model's embedding", xlim=(0, 100))  # fmt: skip
    panel.set_ylim(top=1.02)
    panel.set_xticks(range(0, 101, 10))
    panel.grid()
    panel.legend(loc="lower left")
    return figure


# ---------------------------------------------------------------------- what they look at
def sharpness(found: Findings) -> Figure:
    confidence = by_layer(found, "statistics", "confidence", 100)
    entropy = by_layer(found, "statistics", "entropy")
    panels = (
        Panel("How much goes to the likeliest word (confidence)", "% of attention", confidence),
        Panel("How broadly attention is spread (entropy)", "nats", entropy, "{:.1f}"),
    )
    return grids(panels)[0]


def looks(found: Findings) -> Figure:
    titles = {
        "to_previous": "the token before",
        "to_self": "the token itself",
        "to_next": "the token behind",
        "to_first": "the first token",
        "to_separator": "separators",
        "to_punctuation": "punctuation",
    }
    panels = [
        Panel(f"To {title}", "% of attention", by_layer(found, "statistics", column, 100))
        for column, title in titles.items()
    ]
    return grids(panels, columns=3)[0]


def roles(found: Findings) -> Figure:
    share = by_layer(found, "roles", "offset_share", 100)
    places = [[_signed(int(place)) for place in row] for row in by_layer(found, "roles", "offset")]
    panels = [
        Panel("Where heads look most, in tokens from themselves", "% of rows", share, words=places)
    ]
    if found["roles"]["rarest_by_chance"] is not None:
        rare = by_layer(found, "roles", "rarest", 100)
        panels.append(Panel("Rows that look most at the rarest word", "% of rows", rare))
    figure, axes = grids(panels, top=100)
    for row in found["roles"]["table"]:
        if row["role"]:
            _frame(axes[not row["role"].startswith("offset")], row["head"], row["layer"])
    return figure


def _signed(place: int) -> str:
    return f"{place:+d}".replace("-", "\N{MINUS SIGN}") if place else "0"


def _frame(axes: Axes, head: int, layer: int) -> None:
    from matplotlib.patches import Rectangle

    corner = (head - 0.46, layer - 0.46)
    axes.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, ec=ORANGE, lw=2))


def depth(found: Findings) -> Figure:
    figure, axes = canvas(1, 2, (WIDTH, 3.8))
    how_far = by_layer(found, "statistics", "distance")
    by_depth(axes[0, 0], how_far, "How far heads look", "mean distance of attention, tokens")
    entropy = by_layer(found, "statistics", "entropy")
    by_depth(axes[0, 1], entropy, "How broadly they look", "entropy of attention, nats")
    return figure


# ---------------------------------------------------------------------- how alike they are
def distance(found: Findings) -> Figure:
    figure, axes = canvas(1, 2, (WIDTH, 4.4))
    by_depth(axes[0, 0], by_layer(found, "distance", "to_own_layer"),
        "How unlike the heads of a layer attend", "Jensen-Shannon to the others, nats", odd=True)  # fmt: skip
    _embedding(axes[0, 1], found["distance"]["table"])
    return figure


def _embedding(axes: Axes, table: list[dict[str, Any]]) -> None:
    layers = 1 + max(row["layer"] for row in table)
    for layer, color in enumerate(of_layers(layers)):
        points = [(row["x"], row["y"]) for row in table if row["layer"] == layer]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=42, color=color, edgecolors=INK,
                linewidths=0.5, label=layer_name(layer, layers))  # fmt: skip
    outside = sorted(table, key=lambda row: -(row["x"] ** 2 + row["y"] ** 2))[:6]
    for row in outside:
        axes.annotate(f"{row['layer']}:{row['head']}", (row["x"], row["y"]), fontsize=7.5,
            xytext=(5, 4), textcoords="offset points")  # fmt: skip
    axes.set(title="Heads that attend alike lie together", xlabel="first coordinate",
        ylabel="second coordinate")  # fmt: skip
    axes.set_aspect("equal", adjustable="datalim")
    axes.grid()
    axes.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


# ---------------------------------------------------------------------- how many dimensions
def energy(found: Findings) -> Figure | None:
    layers = found["energy"]["layers"]
    if not layers:
        return None
    figure, axes = canvas(1, 3, (WIDTH, 3.7))
    colors = of_layers(1 + max(layer["layer"] for layer in layers))
    titles = {
        "stacked_product": "All heads of a layer stacked",
        "single_product": "A single head, mean of the layer",
        "weight_error": "What fewer features lose",
    }
    for panel, (name, title) in zip(axes.flat, titles.items(), strict=True):
        for layer in layers:
            curve = layer[name]
            if name != "weight_error":
                curve = [0.0, *curve]
            share = [100 * count / (len(curve) - 1) for count in range(len(curve))]
            panel.plot(share, [100 * value for value in curve], color=colors[layer["layer"]],
                lw=1.8, label=layer_name(layer["layer"], len(colors)))  # fmt: skip
        panel.set(title=title, xlabel=f"dimensions, % of {len(curve) - 1}", xlim=(0, 100),
            ylim=(0, 102))  # fmt: skip
        panel.grid()
    for panel in axes[0, :2]:
        panel.axhline(90, color=PURPLE, lw=1, ls="--")
        panel.set_ylabel(r"captured energy of $W_Q^\top W_K$, %")
    axes[0, 2].set_ylabel("error of all products, %")
    axes[0, 1].legend(fontsize=7.5, loc="lower right")
    return figure
