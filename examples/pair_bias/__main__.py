"""Distances in folded chains, by attention with pair bias (AlphaFold 2, algorithms 7, 13 and 14; AlphaFold 3, 24).

    python examples/pair_bias [--steps N] [--seed S] [--threads N]

draws chains of helices, strands and loops in space. The model gets an alignment of noisy letters, the bonds and a third
of the distances, but not the order of the residues: it must infer the other distances from those of triangles. It is
trained twice, with and without pair bias, which takes about a minute on one core. The command prints the results on
held-out chains: nats per distance that was not given, and the error of the count of near residues.

The other files here: modules.py, the algorithms and the loading of weights in the reference layout; chains.py, the
data; model.py, the stack. Exit status: 0; 2 for a bad option; 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from chains import CLASSES, Batch, draw
from model import Stack, losses, without_pair_bias_

ROWS: Final = 4
LENGTH: Final = 16
BATCH: Final = 8
HELD_OUT: Final = 64  # chains
RATE: Final = 3e-3  # of Adam: it rises over 50 steps and falls to a tenth


def train(model: Stack, steps: int, seed: int) -> float:
    """Train on new chains in every step; returns the seconds."""
    generator = torch.Generator().manual_seed(seed)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=RATE)

    def slope(step: int) -> float:
        return min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, slope)
    start = time.perf_counter()
    for _ in range(steps):
        distances, near = losses(model, draw(BATCH, ROWS, LENGTH, generator))
        (distances + near).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return time.perf_counter() - start


@torch.no_grad()
def measure(model: Stack, held_out: Batch) -> tuple[float, float]:
    """Nats and error on held-out chains."""
    distances, near = losses(model, held_out)
    return float(distances), float(near)


def experiment(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, tuple[float, float]]:
    """The results of an untrained model, one with pair bias and one without; `say` prints each when it is known."""
    held_out = draw(HELD_OUT, ROWS, LENGTH, torch.Generator().manual_seed(options.seed + 1))
    share = torch.bincount(held_out.classes[held_out.asked], minlength=CLASSES) / held_out.asked.sum()
    say(f"{'':20}  distances, nats  near residues, squared error")
    say(f"{'shares of classes':20}  {float(torch.special.entr(share).sum()):15.3f}  {1.0:28.3f}")
    found = {}
    for name in ("before training", "with pair bias", "without pair bias"):
        torch.manual_seed(options.seed)
        model, seconds = Stack(), 0.0
        if name == "without pair bias":
            without_pair_bias_(model)
        if name != "before training":
            seconds = train(model, options.steps, options.seed)
        found[name] = measure(model, held_out)
        took = f"  {seconds:.0f} s" if seconds else ""
        say(f"{name:20}  {found[name][0]:15.3f}  {found[name][1]:28.3f}{took}")
    return found


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a whole number, 1 or more")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python examples/pair_bias",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=positive, default=300, help="of training, default 300")
    parser.add_argument("--seed", type=int, default=0, help="of chains and weights, default 0")
    parser.add_argument("--threads", type=positive, default=1,
        help="default 1: tensors this small gain little from more, and lose much on a busy machine")  # fmt: skip
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        experiment(options, print)
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
