"""index.html of a report: static, with the pictures and files that lie beside it."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from heads_kernels.report import findings, maps, pictures
from heads_kernels.report.drawing import STYLE, png
from heads_kernels.report.folder import Folder, Found
from heads_kernels.report.pictures import Findings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Section:
    """A picture, what it says, and how it was measured.

    Attributes:
        stage: whose findings it shows; its files are `<stage>.json` and `<stage>.csv`.
        title: of the section.
        draw: the picture, called `<name of the function>.png`; None where there is nothing to draw.
        say: what was found, in a sentence.
        how: how it was measured.
    """

    stage: str
    title: str
    draw: Callable[[Findings], Figure | None]
    say: Callable[[Findings], str]
    how: str

    @property
    def picture(self) -> str:
        return f"{self.draw.__name__}.png"


SECTIONS: Final = (
    Section("importance", "Which heads matter", pictures.importance, findings.importance,
        "Without labels: the embedding of a line is the mean of the last hidden states of its tokens, made of length "
        "1. Leaving out: the mean squared change of it when one head is closed. Fisher: the expected squared slope by "
        "the head's gate, for all heads at once from one backward pass. The embedding is the last layer's output: "
        "its heads move it straight, all others only through the layers behind. Confidence looks at attention alone."),
    Section("pruning", "How many can be closed", pictures.pruning, findings.pruning,
        "Heads are closed in steps of 10 %, in the order of Fisher, in the reversed order and in random ones. "
        "Nothing is trained again; ranked and measured on the same text. At least: one step "
        "more is too many, and what lies between was not tried."),
    Section("statistics", "How sharply they look", pictures.sharpness, findings.sharpness,
        "Means over all tokens. Special tokens such as [CLS] do not count as the likeliest word."),
    Section("statistics", "What they look at", pictures.looks, findings.looks,
        "Mean share of a row's attention. Separators are [SEP] or the end of the text. Each grid has its own scale."),
    Section("statistics", "How far they look", pictures.depth, findings.depth,
        "Distance of a row: the mean of how many tokens a key is away, weighed by its probability."),
    Section("roles", "Heads with a role", pictures.roles, findings.roles,
        "Framed: heads that look most at one place in 90 % of the rows, or at the rarest word in half of them "
        "and clearly more often than by chance. Special tokens count neither as rows nor as places."),
    Section("distance", "How alike they are", pictures.distance, findings.distance,
        "Jensen-Shannon divergence between the attention of two heads, the mean over rows. On the right all heads, "
        "as far apart as two dimensions allow (classical multidimensional scaling)."),
    Section("energy", "How many dimensions they use", pictures.energy, findings.energy,
        "Share of the squared singular values of the products of query and key weights. On the right the error of "
        "the products of all heads of a layer when only so many features are kept (hk.convert.error_curve)."),
    Section("maps", "One sentence", maps.all_maps, findings.maps,
        "Each row of a square is a token, top down, and what it looks at, from left to right."),
    Section("maps", "Some heads of it", maps.chosen_maps, findings.maps,
        "The heads of --heads, or in each layer the sharpest on the whole text (in this sentence if the statistics "
        "were left out). For BertViz, found = json.load(open('maps.json')); "
        "head_view([torch.tensor(layer) for layer in found['attention']], found['tokens'])."),
)  # fmt: skip

_CSS: Final = """
body { margin: 0; background: #f3f4f6; color: #1c2733; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { margin: 0 0 .3rem; font-size: 2rem; } h2 { margin: 0 0 .4rem; font-size: 1.3rem; }
section { margin: 1.5rem 0; padding: 1.4rem 1.6rem; background: #fff; border: 1px solid #e3e7ec; border-radius: 10px; }
nav { display: flex; flex-wrap: wrap; gap: .4rem 1.1rem; margin-top: 1rem; font-size: .95rem; }
img { display: block; max-width: 100%; height: auto; margin: 1rem auto; }
a { color: #1f5fb0; } p { margin: .3rem 0; } .how { color: #5a6572; font-size: .9rem; }
"""


def write_page(
    folder: Folder, prints: Mapping[str, str], heads: list[tuple[int, int]] | None
) -> None:
    """Draw what the folder has of this model and text, and write the page around it.

    Args:
        folder: of the report.
        prints: the fingerprint of each stage.
        heads: (layer, head) of the maps to draw large; None chooses.
    """
    import matplotlib as mpl

    found = {name: each for name in prints if (each := folder.read(name, prints[name]))}
    if "maps" in found:
        found["maps"]["heads"] = heads
    body: list[str] = []
    sections = [section for section in SECTIONS if section.stage in found]
    with mpl.rc_context(STYLE):
        for section in sections:
            figure = section.draw(found)
            if figure is not None:
                folder.write_whole(section.picture, png(figure))
            body.extend(_section(section, section.say(found), figure is not None))
    page = [*_head(found["model"], sections), *body, "</main></body></html>", ""]
    folder.write_whole("index.html", "\n".join(page).encode())


def _head(model: Found, sections: list[Section]) -> Iterator[str]:
    title = html.escape(f"The heads of {model['name']}")
    heads = sum(layer["heads"] for layer in model["table"])
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title><style>{_CSS}</style></head><body><main><h1>{title}</h1>"
    yield (
        f"<p>{html.escape(model['family'])}, {len(model['table'])} layers, {heads} heads, "
        f"{model['parameters'] / 1e6:,.1f} million parameters. Read on {model['lines']:,} lines of text, "
        f"{model['tokens']:,} tokens. A head is called layer:head, both counted from 0.</p>"
    )
    yield f'<p class="how">heads_kernels {model["version"]} <a href="model.json">model.json</a></p><nav>'
    for section in sections:
        yield f'<a href="#{section.draw.__name__}">{section.title}</a>'
    yield "</nav>"


def _section(section: Section, said: str, drawn: bool) -> Iterator[str]:
    said = html.escape(said)
    yield f'<section id="{section.draw.__name__}"><h2>{section.title}</h2><p>{said}</p>'
    if drawn:
        yield f'<a href="{section.picture}"><img src="{section.picture}" alt="{section.title}"></a>'
    files = (
        f'<a href="{section.stage}.{kind}">{section.stage}.{kind}</a>' for kind in ("csv", "json")
    )
    yield f'<p class="how">{html.escape(section.how)} Numbers: {", ".join(files)}</p></section>'
