"""The page of a report: one HTML file with its pictures and tables inside."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from math import log
from typing import Final

from heads_kernels.report import drawing, pictures
from heads_kernels.report.drawing import Picture
from heads_kernels.report.results import Findings, Found, as_csv
from heads_kernels.report.stages import LEFT_OUT


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Attributes:
        stage: the stage whose results it shows.
        title: the question that it answers.
        content: makes a sentence or two and the pictures from the results.
        how: how it was measured.
    """

    stage: str
    title: str
    content: Callable[[Findings], tuple[str, list[Picture]]]
    how: str

    @property
    def anchor(self) -> str:
        return self.content.__name__


SECTIONS: Final = (
    Section("importance", "Which heads matter", pictures.importance,
        "No labels are needed: the embedding of a line is the mean of the last hidden states of its tokens, normalised "
        "to length 1. Leave one out: the mean squared change of the embedding when one head is closed. Fisher: the "
        "expected squared derivative with respect to the head's gate, for all heads from one backward pass. "
        "Confidence: the mean largest probability of the head's rows. Heads of the last layer act on the embedding "
        "directly, all others through the layers after them."),
    Section("pruning", "How many can be closed", pictures.pruning,
        "Heads are closed in equal steps in the order of Fisher, in the reverse order and in random order. The "
        "model is not trained again; heads are ranked and measured on the same text. \"At least\": the next step "
        "closes too many, and numbers in between were not tried."),
    Section("statistics", "How sharply and how far they attend", pictures.sharpness,
        "Means over all tokens. Confidence: the probability of the likeliest token, special tokens such as [CLS] not "
        "counted. Distance of a row: how many tokens away a key is, averaged by its probability. A point marked 3:5 is "
        "head 5 of layer 3, the highest of its layer."),
    Section("statistics", "What they attend to", pictures.targets,
        "Mean share of a row's attention. Separators are [SEP] or the end of the text. Each grid has its own scale."),
    Section("roles", "Heads with a role", pictures.roles,
        "Framed: heads that attend most to one offset in 90 % of the rows, or to the rarest word in half of them and "
        "clearly more often than by chance. Special tokens count neither as rows nor as keys."),
    Section("distance", "How alike they are", pictures.distance,
        f"Jensen-Shannon divergence between the attention of two heads, the mean over rows: at most {log(2):.2f} nats. "
        "The second picture approximates these distances in two dimensions (classical multidimensional scaling)."),
    Section("energy", "How many dimensions they use", pictures.energy,
        "Energy: share of the squared singular values of the products of query and key weights; for a single head the "
        "mean of the layer. Error: of the products of all heads of a layer when only so many features are kept "
        f"(hk.convert.curves). At most {drawing.MOST_CURVES} layers are drawn."),
    Section("maps", "One sentence, all heads", pictures.all_maps,
        "Rows of a square are tokens, downwards; columns are the tokens that they attend to, to the right."),
    Section("maps", "One sentence, a few heads", pictures.chosen_maps,
        "The heads of --heads, or the sharpest of each layer on the whole text (in this sentence if there are no "
        "statistics). For BertViz, in the folder of the report: found = json.load(open('maps.json')); "
        "head_view([torch.tensor(layer) for layer in found['attention']], found['tokens'])."),
)  # fmt: skip

#: Pictures are drawn dark on light; dark mode inverts them and restores their hues.
_CSS: Final = """
:root { color-scheme: light dark; --page: #f3f4f6; --card: #fff; --edge: #e3e7ec; --ink: #1c2733; --soft: #505b67;
  --link: #1f5fb0; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f1317; --card: #181d23; --edge: #2d353f; --ink: #e4e9ee; --soft: #a9b4c0; --link: #85b7f2; }
  img { filter: invert(.92) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
main { max-width: 1080px; margin: 0 auto; padding: 1.5rem .8rem 4rem; }
h1 { margin: 0 0 .3rem; font-size: 1.8rem; } h2 { margin: 0 0 .4rem; font-size: 1.3rem; }
section { margin: 1.2rem 0; padding: 1.1rem; background: var(--card); border: 1px solid var(--edge);
  border-radius: 10px; }
nav { display: flex; flex-wrap: wrap; gap: .4rem 1.1rem; margin-top: 1rem; font-size: .95rem; }
.pictures { display: grid; gap: 1rem 1.6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
figure { margin: .6rem 0 0; } figcaption { font-weight: 600; margin-bottom: .4rem; }
.wide { grid-column: 1 / -1; } img { display: block; width: 100%; max-width: 560px; } .wide img { max-width: 900px; }
pre { padding: .7rem .9rem; overflow-x: auto; background: var(--page); border-radius: 6px; font-size: .85rem; }
a { color: var(--link); } p { margin: .3rem 0; } .how { color: var(--soft); font-size: .9rem; }
"""


def html(found: Findings, heads: list[tuple[int, int]] | None, model: str) -> str:
    """The page of these results.

    Args:
        found: results by stage, including "model".
        heads: the (layer, head) whose maps are drawn large; default the sharpest.
        model: the path of the model, for code that loads it.
    """
    import matplotlib as mpl

    if "maps" in found:
        found = {**found, "maps": {**found["maps"], "heads": heads}}
    sections = [section for section in SECTIONS if section.stage in found]
    with mpl.rc_context(drawing.STYLE):
        body = [line for section in sections for line in _section(section, found, model)]
    return "\n".join([*_head(found, sections), *body, "</main></body></html>", ""])


def _head(found: Findings, sections: list[Section]) -> Iterator[str]:
    model = found["model"]
    title = escape(f"The heads of {model['name']}")
    heads = sum(layer["heads"] for layer in model["table"])
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title><style>{_CSS}</style></head><body><main><h1>{title}</h1>"
    yield (
        f"<p>{escape(model['family'])}, {len(model['table'])} layers, {heads} heads, "
        f"{model['parameters'] / 1e6:,.1f} million parameters, on {model['lines']:,} lines of text with "
        f"{model['tokens']:,} tokens. A head is written layer:head, both counted from 0.</p>"
    )
    if any(each.get("fast") for each in found.values()):
        yield f"<p>Made with --fast: {LEFT_OUT}. The same command without --fast computes the rest.</p>"
    yield f'<p class="how">heads_kernels {model["version"]}. Layers: {_table(found["model"], "model")}</p><nav>'
    for section in sections:
        yield f'<a href="#{section.anchor}">{section.title}</a>'
    yield "</nav>"


def _section(section: Section, found: Findings, model: str) -> Iterator[str]:
    said, drawn = section.content(found)
    yield f'<section id="{section.anchor}"><h2>{section.title}</h2>'
    if said:
        yield f"<p>{escape(said)}</p>"
    yield f'<div class="pictures">{"".join(map(_figure, drawn))}</div>'
    if section.stage == "pruning":
        yield from _snippet(found, model)
    numbers = _table(found[section.stage], section.stage)
    yield f'<p class="how">{escape(section.how)} Numbers: {numbers}</p></section>'


def _figure(picture: Picture) -> str:
    kind = ' class="wide"' if picture.wide else ""
    image = _data("image/svg+xml", drawing.svg(picture.figure))
    return (
        f"<figure{kind}><figcaption>{escape(picture.message)}</figcaption>"
        f'<img src="{image}" alt="{escape(picture.seen)}"></figure>'
    )


def _table(found: Found, stage: str) -> str:
    """A link that saves the table of a stage, which the page contains."""
    table = _data("text/csv", as_csv(found["table"]))
    return f'<a download="{stage}.csv" href="{table}">{stage}.csv</a>'


def _data(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _snippet(found: Findings, model: str) -> Iterator[str]:
    """Code that prunes the heads that the curve shows to be dispensable."""
    heads = pictures.prunable(found)
    if not heads:
        return
    count, of = sum(map(len, heads.values())), len(found["pruning"]["order"])
    chosen = "".join(f"    {layer}: {numbers},\n" for layer, numbers in heads.items())
    code = (
        "import heads_kernels as hk\n\n"
        f"model = hk.integrations.transformers.from_pretrained({model!r})\n"
        f"heads = {{\n{chosen}}}  # layer: heads, both counted from 0\n"
        "hk.heads.prune(model, heads)\n"
        'model.save_pretrained("pruned")  # loaded by the same from_pretrained\n'
    )
    yield (
        f"<p><strong>Prune these {count} of {of} heads</strong>, which keeps a cosine of {pictures.CLOSE} on "
        f"this text; measure your own task before and after:</p><pre><code>{escape(code)}</code></pre>"
    )
