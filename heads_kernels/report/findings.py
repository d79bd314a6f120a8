"""What the numbers of a report say, in a sentence or two for each picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log
from typing import Any

from heads_kernels.report.pictures import Findings, by_layer

#: A cosine that counts as hardly changed.
CLOSE = 0.95


def importance(found: Findings) -> str:
    table = found["importance"]["table"]
    top = sorted(table, key=lambda row: -row["leave_one_out"])
    few = max(1, round(len(top) / 10))
    total = sum(row["leave_one_out"] for row in table) or 1
    share = sum(row["leave_one_out"] for row in top[:few]) / total
    said = (
        f"{_names(top[:5])} matter most; of what leaving out single heads changes, "
        f"{few} of {len(top)} have {_percent(share)}."
    )
    agreement = found["importance"]["spearman_with_leave_one_out"]
    ranks = [
        f"{name} {agreement[key]:.2f}"
        for key, name in (("fisher", "Fisher"), ("confidence", "confidence"))
        if agreement[key] is not None
    ]
    means = "Rank correlation with leaving out (1: the same order)"
    return said + (f" {means}: {', '.join(ranks)}." if ranks else "")


def pruning(found: Findings) -> str:
    table = found["pruning"]["table"]
    orders = [name for name in table[0] if name not in ("closed", "closed_share")]
    most = {
        name: max((row["closed"] for row in table if row[name] >= CLOSE), default=0)
        for name in orders
    }
    random = [count for name, count in most.items() if name.startswith("random")]
    return (
        f"With the least important first, at least {most['importance']} of {table[-1]['closed']} heads can be closed "
        f"while the cosine stays above {CLOSE}; in random order at least {_range(random)}, "
        f"with the most important first at least {most['reversed']}."
    )


def sharpness(found: Findings) -> str:
    table = sorted(found["statistics"]["table"], key=lambda row: -row["confidence"])
    sharp = ", ".join(f"{_name(row)} ({_percent(row['confidence'])})" for row in table[:3])
    mean = sum(row["confidence"] for row in table) / len(table)
    return f"The sharpest heads are {sharp}; the mean of all is {_percent(mean)}."


def looks(found: Findings) -> str:
    table = found["statistics"]["table"]

    def mean(column: str) -> str:
        return _percent(sum(row[column] for row in table) / len(table))

    best = [
        f"{words} {_name(row)} ({_percent(row[column])})"
        for column, words in (("to_previous", "the token before"), ("to_next", "the one behind"))
        if (row := max(table, key=lambda row: row[column]))
    ]
    return (
        f"On the mean {mean('to_first')} of attention goes to the first token, {mean('to_separator')} "
        f"to separators and {mean('to_punctuation')} to punctuation. Most to {', to '.join(best)}."
    )


def depth(found: Findings) -> str:
    return f"{_first_and_last(by_layer(found, 'statistics', 'distance'), 1, 'tokens')}."


def roles(found: Findings) -> str:
    table, chance = found["roles"]["table"], found["roles"]["rarest_by_chance"]
    named = [f"{_name(row)} ({row['role']})" for row in table if row["role"]]
    said, common = f"{', '.join(named) or 'No head has one'}. ", found["roles"]["common_words"]
    if chance is None:
        return (
            f"{said}Heads of the rarest word are left out: the text has "
            f"{found['roles']['different_words']} different words, and among fewer than "
            f"{2 * common} chance finds it too often."
        )
    best = max(table, key=lambda row: row["rarest"])
    return (
        f"{said}Most often at the rarest word looks {_name(best)}, in {_percent(best['rarest'])} of the rows "
        f"(by chance {_percent(chance)}). Rare are all words but the {common} most frequent of the text."
    )


def distance(found: Findings) -> str:
    means = _first_and_last(by_layer(found, "distance", "to_own_layer"), 2, "nats")
    odd = max(found["distance"]["table"], key=lambda row: row["to_own_layer"])
    return (
        f"Two heads of a layer are apart by {means} (at most {log(2):.2f}); "
        f"the oddest head is {_name(odd)}."
    )


def energy(found: Findings) -> str:
    said = []
    for name, words in (("stacked_product", "Stacked"), ("single_product", "A single head")):
        rows = [row for row in found["energy"]["table"] if row["curve"] == name]
        if rows:
            enough = _range([row["dimensions_for_90_percent"] for row in rows])
            said.append(
                f"{words}: 90 % of the energy in {enough} of {rows[0]['dimensions']} dimensions."
            )
    reasons = {each["reason"] for each in found["energy"]["skipped"]}
    return " ".join([*said, *sorted(reasons)])


def maps(found: Findings) -> str:
    return " ".join(found["maps"]["tokens"])


def _first_and_last(layers: list[list[float]], digits: int, unit: str) -> str:
    """Means of the first and the last layer that have heads."""
    means = {layer: sum(row) / len(row) for layer, row in enumerate(layers) if row}
    ends = dict.fromkeys((min(means), max(means)))
    return ", ".join(f"{means[layer]:.{digits}f} {unit} in layer {layer}" for layer in ends)


def _name(row: dict[str, Any]) -> str:
    return f"{row['layer']}:{row['head']}"


def _names(rows: Iterable[dict[str, Any]]) -> str:
    return ", ".join(map(_name, rows))


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
