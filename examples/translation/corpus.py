"""Sentence pairs as numbers: reading them from a file, vocabularies, batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from languages import Pair, Words
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PAD, START, END, UNKNOWN = range(4)
HELD_OUT: Final = 512


def read_pairs(path: Path) -> list[Pair]:
    """The sentence pairs of a file, each source once: a line is source, tab, target, with spaces between words.

    Raises:
        ValueError: a line has another form.
    """
    found: dict[str, Pair] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        sides = [side.split() for side in line.split("\t")]
        if len(sides) != 2 or not all(sides):
            raise ValueError(f"{path}, line {number} is {line!r}; write source, tab, target")
        found[" ".join(sides[0])] = sides[0], sides[1]
    return list(found.values())


class Vocabulary:
    """Numbers for the words of some sentences; the first four are `PAD`, `START`, `END` and `UNKNOWN`."""

    def __init__(self, sentences: Sequence[Words]) -> None:
        self.words = ["<pad>", "<s>", "</s>", "<unk>"]
        self.words += sorted({word for sentence in sentences for word in sentence})
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def encode(self, sentence: Words) -> Tensor:
        """Numbers of the words between `START` and `END`, int64 `[length + 2]`."""
        inner = [self.numbers.get(word, UNKNOWN) for word in sentence]
        return torch.tensor([START, *inner, END])

    def decode(self, numbers: Tensor) -> str:
        """The words of `[length]` numbers that begin with `START`, up to `END`."""
        inner = numbers.tolist()[1:]
        return " ".join(self.words[n] for n in inner[: (*inner, END).index(END)])


class Batch(NamedTuple):
    """Sentences with `START` and `END`, padded to the longest: int64 `[B, S]` and `[B, T]`."""

    source: Tensor
    target: Tensor


class Corpus:
    """Sentence pairs for training and for measuring, as numbers.

    Attributes:
        source, target: the vocabularies, of the words in the training part.
        train, held_out: the pairs; `HELD_OUT` of them, or a fifth if that is less, are held out.
        longest: numbers in the longest sentence, including `START` and `END`.
    """

    def __init__(self, pairs: Sequence[Pair], seed: int) -> None:
        shuffled = random.Random(seed).sample(pairs, len(pairs))
        held_out = min(HELD_OUT, len(pairs) // 5)
        self.source, self.target = (Vocabulary([pair[side] for pair in shuffled[held_out:]]) for side in (0, 1))
        encoded = [(self.source.encode(a), self.target.encode(b)) for a, b in shuffled]
        self.held_out, self.train = encoded[:held_out], encoded[held_out:]
        self.longest = max(len(side) for pair in encoded for side in pair)

    def batches(self, size: int, seed: int) -> Iterator[Batch]:
        """Endless training batches: all pairs in random order, then all again in another order."""
        order = random.Random(seed)
        while True:
            shuffled = order.sample(self.train, len(self.train))
            for start in range(0, len(shuffled), size):
                yield padded(shuffled[start : start + size])


def padded(pairs: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    """A batch of these pairs."""
    source, target = (pad_sequence(list(side), True, PAD) for side in zip(*pairs, strict=True))
    return Batch(source, target)
