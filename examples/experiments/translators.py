"""The model of examples/translation in the experiments: its training, files and quality."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from corpus import END, PAD, START, Batch, Corpus, padded
from lab import Lab
from languages import invented_pairs
from report import heads_of, open_heads
from torch import Tensor, nn
from training import learn, sentences_right, words_right
from transformer import Translator

import heads_kernels as hk


@dataclass(frozen=True)
class Settings:
    """Sizes of the experiments on translation.

    Attributes:
        pairs, batch: sentence pairs of a language, and of a batch.
        width, heads, layers: of the model; three kinds of attention with `layers * heads` heads each.
        steps: of training a new model.
        more_steps: of further training, with or without gates.
        open_heads: numbers of open heads, one model each.
        read: sentence pairs of the training part on which importance is computed.
    """

    pairs: int = 20_000
    batch: int = 32
    width: int = 64
    heads: int = 4
    layers: int = 3
    steps: int = 1600
    more_steps: int = 800
    open_heads: tuple[int, ...] = (24, 16, 10, 6)
    read: int = 512


QUICK = Settings(pairs=60, batch=8, width=32, heads=4, layers=1, steps=3, more_steps=4, open_heads=(5,), read=16)


def settings_of(lab: Lab) -> Settings:
    return QUICK if lab.quick else Settings()


@cache
def corpus_of(settings: Settings, seed: int) -> Corpus:
    """Sentence pairs; each seed has its own language."""
    return Corpus(invented_pairs(settings.pairs, seed), seed)


def new_model(
    settings: Settings,
    seed: int,
    attention: Callable[[int, int], nn.Module] = hk.nn.GatedMultiheadAttention,
) -> Translator:
    """The untrained model of a seed."""
    corpus = corpus_of(settings, seed)
    torch.manual_seed(seed)
    return Translator(
        len(corpus.source.words),
        len(corpus.target.words),
        corpus.longest,
        settings.width,
        settings.heads,
        settings.layers,
        attention,
    )


def trained(lab: Lab, seed: int) -> Translator:
    """The model of the seed after `steps` of training: trained once, then read from the folder."""
    settings = settings_of(lab)
    model = new_model(settings, seed)
    batches = corpus_of(settings, seed).batches(settings.batch, seed)
    learning = partial(learn, model, batches, settings.steps)
    lab.trained(f"translator-{seed}", model, settings.steps, learning)
    return model


def more_batches(settings: Settings, seed: int) -> Iterator[Batch]:
    """The batches of further training: the same for all models of a seed."""
    return corpus_of(settings, seed).batches(settings.batch, seed + 1000)


def read_batches(settings: Settings, seed: int) -> list[Batch]:
    """Sentence pairs of the training part, for importance: held-out pairs have no influence on the choice of heads."""
    corpus = corpus_of(settings, seed)
    count = -(-min(settings.read, len(corpus.train)) // settings.batch)
    return list(islice(corpus.batches(settings.batch, seed + 2000), count))


def logits(model: Translator, batch: Batch) -> Tensor:
    """Logits of the word after each word of the target, `[B, T - 1, words]`."""
    found: Tensor = model(batch.source, batch.target[:, :-1])
    return found


def sentence_losses(model: Translator, batch: Batch) -> Tensor:
    """The cross-entropy per word of each sentence, `[B]`, in nats."""
    right = batch.target[:, 1:]
    words = nn.functional.cross_entropy(logits(model, batch).mT, right, ignore_index=PAD, reduction="none")
    return words.sum(1) / (right != PAD).sum(1)


def special_keys(batch: Batch) -> dict[str, Tensor]:
    """The keys that are not words, for each kind of attention."""
    marks = torch.tensor([START, END])
    source, target = (torch.isin(side, marks) for side in batch)
    return {"encoder": source, "decoder": target, "cross": source}


@torch.no_grad()
def word_quality(model: Translator, corpus: Corpus) -> dict[str, float]:
    """On held-out pairs: the share of `words` that are right, and the `loss` in nats per word."""
    words = words_right(model, corpus)
    return {"words": words, "loss": sentence_losses(model, padded(corpus.held_out)).mean().item()}


def quality(model: Translator, corpus: Corpus) -> dict[str, float]:
    """`word_quality`, and the share of held-out `sentences` that are translated right."""
    return {**word_quality(model, corpus), "sentences": sentences_right(model, corpus)}


def measured(model: Translator, corpus: Corpus) -> dict[str, Any]:
    """The quality of a model, and its open heads by kind and by layer."""
    return {
        **quality(model, corpus), "open_heads": open_heads(model), "layers": heads_of(model),
    }  # fmt: skip
