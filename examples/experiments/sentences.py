"""MiniLM and English sentences: those that heads are analysed on, those that quality is measured on, embeddings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from lab import Lab
from torch import Tensor, nn

import heads_kernels as hk
from benchmarks import minilm

Batch = dict[str, Tensor]

ALL: Final = 10_000  # more sentences than exist
SPECIAL: Final = (101, 102)  # [CLS] and [SEP]
#: The factor of cosines in the training of the model.
SHARPNESS: Final = 20.0


@dataclass(frozen=True)
class Settings:
    """Sizes of the experiments on MiniLM.

    Attributes:
        read: sentences on which heads are analysed.
        relevance: the number of them for relevance, which takes longer.
        held_out: other sentences, on which quality is measured.
        batch: sentences of a batch.
        longest: the most tokens of a sentence, including [CLS] and [SEP]; leaving out every head takes many passes.
    """

    read: int = 96
    relevance: int = 16
    held_out: int = 160
    batch: int = 32
    longest: int = 32


QUICK = Settings(read=2, relevance=1, held_out=3, batch=3)


def settings_of(lab: Lab) -> Settings:
    return QUICK if lab.quick else Settings()


def load() -> nn.Module:
    """A copy of the model, with gates and statistics; raises `benchmarks.minilm.Unavailable`."""
    return deepcopy(_loaded())


@cache
def _loaded() -> nn.Module:
    model: nn.Module = minilm.load()
    hk.integrations.transformers.use(model)
    return model


def texts(settings: Settings) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids of the sentences to read and of the held-out ones: all different, drawn from the same texts."""
    short = [row for row in everything() if len(row) <= settings.longest]
    drawn = random.Random(0).sample(short, settings.read + settings.held_out)
    return drawn[: settings.read], drawn[settings.read :]


def everything() -> list[Tensor]:
    """Token ids of all sentences, each once."""
    ids, lengths = minilm.tokens(ALL)
    rows = [tuple(row[:length].tolist()) for row, length in zip(ids, lengths, strict=True)]
    return [torch.tensor(row) for row in dict.fromkeys(rows)]


def batches(rows: Sequence[Tensor], size: int) -> list[Batch]:
    """Padded batches of sentences of about the same length."""
    ordered = sorted(rows, key=len)
    return [padded(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def padded(rows: Sequence[Tensor]) -> Batch:
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": real.long()}


def halves(rows: Sequence[Tensor], size: int) -> list[Batch]:
    """Batches of `2 * size` rows: first halves of sentences, then their second halves, each with [CLS] and [SEP]."""
    made, ordered = [], sorted(rows, key=len)
    for start in range(0, len(rows), size):
        first, second = [], []
        for row in ordered[start : start + size]:
            middle = len(row) // 2
            first.append(torch.cat((row[:middle], row[-1:])))
            second.append(torch.cat((row[:1], row[middle:])))
        made.append(padded(first + second))
    return made


def means(model: Any, batch: Batch) -> Tensor:
    """The mean of the last states over the tokens of each sentence, `[B, 384]`."""
    states = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    found: Tensor = (states * real).sum(1) / real.sum(1)
    return found


def embeddings(model: Any, batch: Batch) -> Tensor:
    """The embedding of each sentence, `[B, 384]`: `means`, normalised to length 1."""
    return nn.functional.normalize(means(model, batch), dim=-1)


def halves_loss(model: Any, batch: Batch) -> Tensor:
    """The training loss of the model, summed: each first half must find its second half in the batch."""
    first, second = embeddings(model, batch).chunk(2)
    similarities = SHARPNESS * first @ second.T
    return nn.functional.cross_entropy(similarities, torch.arange(len(first)), reduction="sum")


@torch.no_grad()
def embedded(model: nn.Module, data: Sequence[Batch]) -> Tensor:
    """The embeddings of all sentences, `[N, 384]`."""
    return torch.cat([embeddings(model.eval(), batch) for batch in data])


def agreement(changed: Tensor, original: Tensor) -> dict[str, float]:
    """How close embeddings are to the original ones.

    `cosine` is the mean cosine similarity with the original; `neighbours` is the share of sentences whose nearest
    other sentence is the same.
    """
    nearest = [(all_of @ all_of.T).fill_diagonal_(-2).argmax(1) for all_of in (changed, original)]
    return {
        "cosine": (changed * original).sum(1).mean().item(),
        "neighbours": (nearest[0] == nearest[1]).float().mean().item(),
    }
