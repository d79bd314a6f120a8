"""Closing the heads of a character language model with L0 gates: how many stay open, and at what loss.

    python examples/char_lm.py                 # about 15 minutes on 2 cores
    python examples/char_lm.py --quick         # seconds: does everything run?

A small pre-norm Transformer (3 layers of 8 heads) learns the text of `pydoc_data.topics`, which comes with Python.
Copies of it are then trained further, each with the loss

    nats per character + lambda * expected number of open heads of the model (hk.nn.l0_penalty)

and one with `hk.heads.GateSchedule`, which adjusts the weight of the penalty to a requested number of heads. A control
is trained as long without gates: the cost of the gates is the difference from the control, not from the model that they
started from. The table has open heads and bits per character of held-out text, by both rules of evaluation.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import heads_kernels as hk

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
except ImportError:
    sys.exit("this example needs rich: pip install rich")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    layers: int = 3
    heads: int = 8
    width: int = 128
    length: int = 96
    batch: int = 32
    steps: int = 1200  # of the base; half of it for every copy
    rate: float = 1e-3
    gate_rate: float = 0.05  # of log_alpha, which must change by 4 and more
    #: lambda, and the log_alpha that gates start from: 0 is half open, 2 nearly open
    penalties: tuple[tuple[float, float], ...] = (
        (0.002, 0.0),
        (0.005, 0.0),
        (0.01, 0.0),
        (0.02, 0.0),
        (0.01, 2.0),
    )
    open_heads: int = 12  # asked of the schedule
    held_out: float = 0.1  # share of the text, its end
    seed: int = 0


QUICK = Settings(
    layers=2,
    heads=4,
    width=16,
    length=16,
    batch=4,
    steps=8,
    penalties=((0.01, 0.0),),
    open_heads=3,
    held_out=0.01,
)


class Block(nn.Module):
    """Attention and feed-forward layer, each on a normalised input and added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = hk.nn.GatedMultiheadAttention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), is_causal=True)[0]
        return x + self.feed_forward(self.norms[1](x))


class CharLM(nn.Module):
    """Logits of the next character, `[B, T, characters]`, from characters `[B, T]`."""

    def __init__(self, characters: int, settings: Settings) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, settings.width)
        self.positions = nn.Embedding(settings.length, settings.width)
        self.blocks = nn.Sequential(*(Block(settings.width, settings.heads) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.width)
        self.logits = nn.Linear(settings.width, characters)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        return self.logits(self.norm(self.blocks(x)))


# ---------------------------------------------------------------------- text
def load_text(settings: Settings) -> tuple[Tensor, Tensor, int]:
    """The training characters, the held-out characters, and the number of different characters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([alphabet[character] for character in text])
    border = round(len(numbers) * (1 - settings.held_out))
    return numbers[:border], numbers[border:], len(alphabet)


def batches(text: Tensor, settings: Settings, seed: int) -> Iterator[Tensor]:
    """Random windows `[batch, length + 1]`; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(settings.length + 1)
    while True:
        last = len(text) - settings.length
        yield text[torch.randint(last, (settings.batch, 1), generator=generator) + window]


def nats(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean loss of predicting every character but the first of each window."""
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.inference_mode()
def bits_per_character(model: nn.Module, text: Tensor, settings: Settings) -> float:
    """Bits per character over consecutive windows of the whole text."""
    model.eval()
    windows = text.unfold(0, settings.length + 1, settings.length)
    losses = [nats(model, part) * len(part) for part in windows.split(256)]
    return float(sum(losses)) / len(windows) / math.log(2)


# ---------------------------------------------------------------------- training
def train(
    model: nn.Module,
    text: Tensor,
    settings: Settings,
    steps: int,
    advance: Callable[[], None],
    penalty: Callable[[], Tensor | float] = lambda: 0.0,
    after_step: Callable[[], None] = lambda: None,
) -> float:
    """Train with AdamW and a short warm-up; gates have their own rate and no weight decay. Returns the seconds."""
    gates = [p for name, p in model.named_parameters() if name.endswith("log_alpha")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("log_alpha")]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": settings.rate}]
    groups += [{"params": gates, "lr": settings.gate_rate, "weight_decay": 0.0}] if gates else []
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=min(100, steps))
    model.train()
    start = time.perf_counter()
    for _, windows in zip(range(steps), batches(text, settings, settings.seed), strict=False):
        (nats(model, windows) + penalty()).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        after_step()
        advance()
    return time.perf_counter() - start


def by_both_rules(model: nn.Module, held_out: Tensor, settings: Settings) -> dict[str, Any]:
    """Open heads, in total and per layer, and bits per character, by each rule of evaluation."""
    found: dict[str, Any] = {"expected_open": hk.nn.expected_open(model).item()}
    for rule in ("binary", "mean"):
        for module in model.modules():
            if isinstance(module, hk.nn.HardConcrete):
                module.evaluate = rule
        bits = bits_per_character(model, held_out, settings)
        by_layer = [settings.heads - len(heads) for heads in hk.heads.closed(model).values()]
        found[rule] = {"open": sum(by_layer), "by_layer": by_layer, "bits": bits}
    return found


def experiment(settings: Settings, progress: Progress) -> Iterator[dict[str, Any]]:
    """Yields the rows of the table."""
    text, held_out, characters = load_text(settings)
    short = settings.steps // 2
    torch.manual_seed(settings.seed)
    base = CharLM(characters, settings)

    def run(name: str, model: nn.Module, steps: int, **options: Any) -> dict[str, Any]:
        task = progress.add_task(name, total=steps)
        torch.manual_seed(settings.seed)
        seconds = train(model, text, settings, steps, lambda: progress.advance(task), **options)
        return {"name": name, "steps": steps, "seconds": round(seconds, 1)}

    def copy_of_base(log_alpha: float | None = None) -> CharLM:
        model = copy.deepcopy(base)
        if log_alpha is not None:
            hk.heads.gate(model, lambda heads: hk.nn.HardConcrete(heads, log_alpha=log_alpha))
        return model

    row = run("base", base, settings.steps)
    yield row | {"bits": bits_per_character(base, held_out, settings)}

    control = copy_of_base()
    row = run("control, no gates", control, short)
    yield row | {"bits": bits_per_character(control, held_out, settings)}

    for weight, log_alpha in settings.penalties:
        model = copy_of_base(log_alpha)
        row = run(
            f"lambda {weight:g}, log_alpha {log_alpha:g}",
            model,
            short,
            penalty=lambda model=model, weight=weight: weight * hk.nn.l0_penalty(model),
        )
        row |= {"lambda": weight, "log_alpha": log_alpha}
        yield row | by_both_rules(model, held_out, settings)

    model = copy_of_base(2.0)
    schedule = hk.heads.GateSchedule(model, open_heads=settings.open_heads, steps=math.ceil(short * 5 / 6))

    def settle() -> None:
        schedule.step()
        if schedule.steps_done == schedule.steps:
            schedule.finish()  # the remaining steps train the open heads

    name = f"schedule, {settings.open_heads} heads"
    row = run(name, model, short, penalty=schedule.penalty, after_step=settle)
    row |= {"asked": settings.open_heads, "log_alpha": 2.0}
    yield row | by_both_rules(model, held_out, settings)


# ---------------------------------------------------------------------- report
def table(rows: list[dict[str, Any]], settings: Settings) -> Table:
    made = Table(
        title=f"{settings.layers} layers of {settings.heads} heads",
        caption="open heads and bits per character, held out, by both rules",
    )
    made.add_column("run", no_wrap=True)
    for heading in ("binary", "by layer", "bits", "mean", "bits", "s"):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = ["", "", f"{row['bits']:.3f}", "", ""] if "bits" in row else []
        for rule in ("binary", "mean"):
            if rule in row:
                found = row[rule]
                cells.append(str(found["open"]))
                cells += [" ".join(map(str, found["by_layer"]))] if rule == "binary" else []
                cells.append(f"{found['bits']:.3f}")
        made.add_row(row["name"], *cells, f"{row['seconds']:.0f}")
    return made


def write(path: Path, settings: Settings, rows: list[dict[str, Any]]) -> None:
    """Write a temporary file, then rename it, so that an error leaves no partial file."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    found = {"settings": dataclasses.asdict(settings), "versions": versions, "runs": rows}
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a whole number of at least 2")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, help="of the base (1200); copies train for half")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("char_lm.json"), help="the table as JSON")
    options = parser.parse_args(arguments)
    if not options.out.parent.is_dir():
        parser.error(f"--out is {options.out}; {options.out.parent} is no folder")
    settings = dataclasses.replace(QUICK if options.quick else Settings(), seed=options.seed)
    if options.steps:
        settings = dataclasses.replace(settings, steps=options.steps)

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    rows: list[dict[str, Any]] = []
    try:
        with Progress(*columns, console=console) as progress:
            for row in experiment(settings, progress):
                rows.append(row)
                write(options.out, settings, rows)
    except KeyboardInterrupt:
        console.print(f"interrupted; {options.out} holds the runs that were finished")
        return 130
    finally:
        console.print(table(rows, settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
