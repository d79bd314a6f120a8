"""Training steps, accuracy on held-out sentences, seconds of inference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from corpus import PAD, Batch, Corpus, padded
from torch import Tensor, nn
from transformer import Translator


def train(
    model: Translator,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    steps: int,
    penalty: Callable[[], Tensor | float] = lambda: 0.0,
) -> Iterator[tuple[int, float]]:
    """Train, and after every step give its number, from 1, and the cross-entropy of its batch.

    What is minimised is the cross-entropy a word, labels smoothed by 0.1, plus `penalty()`.
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


@torch.no_grad()
def accuracy(model: Translator, corpus: Corpus) -> tuple[float, float]:
    """Of the held-out pairs, the share of words that are right, and of sentences.

    A word is predicted after the right ones before it; a sentence is right if the greedy translation is, to the word.
    """
    model.eval()
    source, target = padded(corpus.held_out)
    real = target[:, 1:] != PAD
    words = (model(source, target[:, :-1]).argmax(-1) == target[:, 1:])[real].float().mean()
    pairs = zip(model.translate(source), target, strict=True)
    right = [corpus.target.decode(ours) == corpus.target.decode(theirs) for ours, theirs in pairs]
    return words.item(), sum(right) / len(right)


def seconds_to_translate(
    models: Sequence[Translator], source: Tensor, rounds: int = 5
) -> list[float]:
    """The median time of each model for a batch, measured in turn so that noise meets all alike."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            model.eval().translate(source)
            taken.append(time.perf_counter() - start)
    return [median(taken) for taken in times]
