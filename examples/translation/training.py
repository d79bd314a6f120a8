"""Training with and without gates, accuracy on held-out sentences, seconds of inference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Final

import torch
from corpus import PAD, Batch, Corpus, padded
from torch import Tensor, nn
from transformer import Translator

import heads_kernels as hk

#: Learning rates of Adam: the highest for a new model, and that for a trained one.
RATE: Final = 3e-3
RATE_AFTER: Final = 6e-4

Steps = Iterator[tuple[int, float]]
Learn = Callable[..., Steps]


def no_penalty() -> float:
    return 0.0


def learn(
    model: Translator,
    batches: Iterator[Batch],
    steps: int,
    penalty: Callable[[], Tensor | float] = no_penalty,
    warmup: bool = True,
) -> Steps:
    """`train` a new model. The learning rate rises over a sixth of the steps (`warmup`), and falls to a fifth."""
    optimizer = adam(model, RATE, steps)

    def slope(step: int) -> float:
        rise = min(1.0, 6 * (step + 1) / steps) if warmup else 1.0
        return rise * (1 - 0.8 * step / steps)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [slope, lambda step: 1.0][: len(optimizer.param_groups)])
    for step, loss in train(model, optimizer, batches, steps, penalty):
        scheduler.step()
        yield step, loss


def learn_on(
    model: Translator,
    batches: Iterator[Batch],
    steps: int,
    penalty: Callable[[], Tensor | float] = no_penalty,
) -> Steps:
    """`train` a trained model, at a constant learning rate."""
    return train(model, adam(model, RATE_AFTER, steps), batches, steps, penalty)


def learn_gates(learn: Learn, model: Translator, batches: Iterator[Batch], steps: int, heads: int) -> Steps:
    """`learn` or `learn_on` with gates, until `heads` of them are open.

    Heads close during four fifths of the steps. In the last fifth the weights adapt to the open heads.
    """
    attach_gates(model)
    schedule = hk.heads.GateSchedule(model, open_heads=heads, steps=max(1, steps * 4 // 5), warmup=0.7, rate=4 / steps)
    for step, loss in learn(model, batches, steps, schedule.penalty):
        schedule.step()
        if step == schedule.steps:
            schedule.finish()
        yield step, loss


def attach_gates(model: Translator) -> None:
    """Attach a gate to every head, open or closed in evaluation mode."""
    hk.heads.gate(model, partial(hk.nn.HardConcrete, evaluate="binary"))


def adam(model: nn.Module, rate: float, steps: int) -> torch.optim.Optimizer:
    """The optimiser of all models here: one group for weights, and one for gates if there are any."""
    gates = [p for name, p in model.named_parameters() if "head_gate" in name]
    weights = [p for name, p in model.named_parameters() if "head_gate" not in name]
    groups = [{"params": weights, "lr": rate}]
    if gates:  # from open to closed a gate goes a way of 4 and more, however few the steps are
        groups.append({"params": gates, "lr": 50 / steps})
    return torch.optim.Adam(groups, betas=(0.9, 0.98), fused=True)


def train(
    model: Translator,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    steps: int,
    penalty: Callable[[], Tensor | float] = no_penalty,
) -> Steps:
    """Train, and after every step yield its number, from 1, and the cross-entropy of its batch.

    The loss is the cross-entropy per word, with labels smoothed by 0.1, plus `penalty()`.
    """
    model.train()
    for step in range(1, steps + 1):
        source, target = next(batches)
        logits = model(source, target[:, :-1])
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=0.1
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss + penalty())
        optimizer.step()
        yield step, loss.item()


def accuracy(model: Translator, corpus: Corpus) -> tuple[float, float]:
    """The shares of words and of sentences that are right, on held-out pairs."""
    return words_right(model, corpus), sentences_right(model, corpus)


@torch.no_grad()
def words_right(model: Translator, corpus: Corpus) -> float:
    """The share of held-out words that are right, each predicted from the right words before it."""
    source, target = padded(corpus.held_out)
    real = target[:, 1:] != PAD
    right = model.eval()(source, target[:, :-1]).argmax(-1) == target[:, 1:]
    return right[real].float().mean().item()


def sentences_right(model: Translator, corpus: Corpus) -> float:
    """The share of held-out sentences whose greedy translation is right in every word."""
    source, target = padded(corpus.held_out)
    pairs = zip(model.eval().translate(source), target, strict=True)
    right = [corpus.target.decode(ours) == corpus.target.decode(theirs) for ours, theirs in pairs]
    return sum(right) / len(right)


def seconds_to_translate(models: Sequence[Translator], source: Tensor, rounds: int = 5) -> list[float]:
    """The median time of each model for a batch, measured in turn so that noise affects all alike."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            model.eval().translate(source)
            taken.append(time.perf_counter() - start)
    return [median(taken) for taken in times]
