"""Heads of a translation model: gated, trained, pruned, saved and loaded (after Voita et al. 2019, section 5).

    python examples/translation [--out DIR] [--heads K | --penalty LAMBDA] [--quick]

trains a small Transformer to translate between two small languages, adds a Hard Concrete gate to each of its 36 heads,
continues training with an L0 penalty until 16 heads are open, and removes the others from the weights. The control is a
copy that is trained as long without gates. This takes minutes on one core; with --quick it takes 20 seconds, in which
the model learns little.

At the end it writes pruned.safetensors, open_heads.png and results.json into DIR. An interrupted run prints what it has
reached. Exit status: 0; 1 if the pruned or the loaded model is not equal to the gated one; 2 for a bad option; 130 if
it was interrupted.

The other files here: languages.py and corpus.py, the data; transformer.py, the model; training.py; report.py;
options.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from copy import deepcopy
from typing import Final

import torch
from corpus import Batch, Corpus, padded
from languages import invented_pairs
from options import parse
from torch import Tensor
from training import accuracy, attach_gates, learn, learn_gates, learn_on, seconds_to_translate
from transformer import Translator

import heads_kernels as hk

try:
    import safetensors  # noqa: F401
    from report import Bar, Results, Row, heads_of, in_words, open_heads, table, write
    from rich.console import Console
except ImportError as error:
    sys.exit(f"{error}; this example needs pip install 'heads_kernels[examples]'")

HEADS, LAYERS = 4, 3
ALL_HEADS: Final = 3 * LAYERS * HEADS  # of encoder, decoder and cross-attention
PAIRS: Final = 20_000
TIMED: Final = 128  # sentences of the batch that inference is timed with


# ---------------------------------------------------------------------- the experiment
def experiment(options: argparse.Namespace, results: Results, bar: Bar) -> None:
    """Run every stage in order, and store its results in `results`."""
    torch.manual_seed(options.seed)
    corpus = Corpus(options.pairs or invented_pairs(PAIRS, options.seed), options.seed)

    def new_model() -> Translator:
        sizes = len(corpus.source.words), len(corpus.target.words), corpus.longest
        return Translator(*sizes, heads=HEADS, layers=LAYERS)

    def measure(name: str, model: Translator) -> None:
        parameters = sum(weight.numel() for weight in model.parameters())
        results.rows.append(Row(name, open_heads(model), *accuracy(model, corpus), parameters))

    model = new_model()
    batches = corpus.batches(options.batch, options.seed)
    bar.follow("training", options.steps, learn(model, batches, options.steps))
    measure("before", model)

    gated = deepcopy(model)
    learn_with_gates(gated, corpus, options, results, bar)
    results.layers = heads_of(gated)
    measure("gated", gated)

    # Closed heads are removed from the weights, and the gates of the others are folded into the weights.
    pruned = deepcopy(gated)
    hk.heads.prune(pruned, hk.heads.closed(pruned))
    measure("pruned", pruned)

    control = deepcopy(model)
    batches = corpus.batches(options.batch, options.seed + 1)  # the sentences of the gated one
    steps = options.gated_steps
    bar.follow("control", steps, learn_on(control, batches, steps))
    measure("control", control)

    file = options.out / "pruned.safetensors"
    hk.heads.save(pruned, file)
    loaded = new_model()  # with all heads: those that the file lacks are taken out as it is loaded
    hk.heads.load(loaded, file)

    batch = padded(corpus.held_out[:TIMED])
    logits = outputs(pruned, batch)
    results.checks = {
        "pruned = gated": torch.allclose(logits, outputs(gated, batch), rtol=0, atol=1e-5),
        "loaded = pruned, bit for bit": torch.equal(logits, outputs(loaded, batch)),
    }
    results.example = {
        "source": corpus.source.decode(batch.source[0]),
        "right": corpus.target.decode(batch.target[0]),
        "pruned": corpus.target.decode(pruned.translate(batch.source[:1])[0]),
    }
    times = seconds_to_translate([model, gated, pruned, control], batch.source)
    for row, seconds in zip(results.rows, times, strict=True):
        row.seconds = seconds


def learn_with_gates(
    model: Translator, corpus: Corpus, options: argparse.Namespace, results: Results, bar: Bar
) -> None:
    """Continue training with gates, until `--heads` are open, or as many as `--penalty` leaves open."""
    batches, steps = corpus.batches(options.batch, options.seed + 1), options.gated_steps
    bar.start("gates", steps)
    if options.penalty is None:
        learning = learn_gates(learn_on, model, batches, steps, options.heads)
    else:
        attach_gates(model)
        learning = learn_on(model, batches, steps, lambda: options.penalty * hk.nn.l0_penalty(model))
    results.history = [(0, open_heads(model))]
    for step, loss in learning:
        counts = open_heads(model)
        if counts != results.history[-1][1]:
            results.history.append((step, counts))
        bar.step(step, f"loss {loss:.2f}, {in_words(counts)}")


@torch.no_grad()
def outputs(model: Translator, batch: Batch) -> Tensor:
    """Logits of a batch, in evaluation mode."""
    logits: Tensor = model.eval()(batch.source, batch.target[:, :-1])
    return logits


# ---------------------------------------------------------------------- the command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit status."""
    options = parse(__doc__, ALL_HEADS, arguments)
    torch.set_num_threads(options.threads)
    names = "steps", "gated_steps", "heads", "penalty", "batch", "seed", "threads"
    results = Results({name: getattr(options, name) for name in names})
    console = Console()
    bar = Bar(console)
    try:
        with bar:
            experiment(options, results, bar)
        write(results, options.out)
    except KeyboardInterrupt:
        console.print(table(results))
        console.print(f"[bold yellow]interrupted[/] in {bar.reached}")
        return 130
    console.print(table(results))
    for name, sentence in results.example.items():
        console.print(f"{name:>8}: {sentence}", soft_wrap=True, markup=False)
    for name, holds in results.checks.items():
        console.print(f"{name}: {'yes' if holds else '[bold red]NO[/]'}")
    console.print(f"pruned.safetensors, open_heads.png, results.json in {options.out}", markup=False)
    return 0 if all(results.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
