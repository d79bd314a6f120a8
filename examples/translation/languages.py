"""Two small languages to translate between: a little English, and a language generated from a seed.

A sentence, and its translation with English words in place of invented ones:

    a tired guard dog that heard two boats waited because it ran
    it ran because guarddog tired that boats two heard waited

Heads of all kinds are needed, since hardly any word can be translated by itself or in place:

- every clause ends with its verb, and the clause of the reason or time comes first;
- adjectives and numbers follow their noun, there is no "a", and a compound is one word: "dog guard", "guard dog" and
  "dog" have nothing in common;
- articles, adjectives and pronouns agree with the gender and number of their noun;
- a verb agrees with its subject, however far away, although the English past tense does not show it;
- "old", "light" and "ran" have two translations, one for the living and one for things;
- "it" and "they" stand for the subject of the other clause.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import Final

LIVING: Final = ("dog", "horse", "guard", "bird")
THINGS: Final = ("house", "boat", "clock", "paper")
ADJECTIVES: Final = ("red", "small", "young", "tired", "strange", "quiet", "old", "light")
TRANSITIVE: Final = ("saw", "heard", "followed", "carried", "found", "painted")
INTRANSITIVE: Final = ("slept", "waited", "fell", "stopped", "ran")
CONJUNCTIONS: Final = ("because", "while", "before")
TWO_SENSES: Final = ("old", "light", "ran")

Words = list[str]
Pair = tuple[Words, Words]


@dataclass(frozen=True)
class Noun:
    """The properties of a noun on which other words of the sentence depend."""

    gender: int
    plural: bool
    living: bool


class Grammar:
    """Draws sentences with their translations. The seed determines the target language and the sentences."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        syllables = ["".join(letters) for letters in product("bdfgklmnprstvz", "aeiou")]
        pairs = self.random.sample(list(product(syllables, repeat=2)), 200)
        self.unused = ["".join(pair) for pair in pairs]
        self.lexicon: dict[tuple[str, bool], str] = {}
        self.gender: dict[str, int] = {}

    def sentence(self) -> Pair:
        """One clause, or two with a conjunction between them; in the target the second comes first."""
        source, target, subject = self.clause()
        if self.random.random() < 0.5:
            word = self.random.choice(CONJUNCTIONS)
            more, translated, _ = self.clause(subject)
            source, target = [*source, word, *more], [*translated, self.stem(word), *target]
        return source, target

    def clause(self, before: Noun | None = None) -> tuple[Words, Words, Noun]:
        """Subject and predicate, and the subject; it may be a pronoun for that of the clause `before`."""
        if before is not None and self.random.random() < 0.5:
            subject, source = before, ["they" if before.plural else "it"]
            target = [self.inflected("it", before)]
        else:
            source, target, subject = self.noun_phrase(relative=True)
        more, translated = self.predicate(subject)
        return source + more, target + translated, subject

    def predicate(self, subject: Noun) -> Pair:
        """A verb, and an object if it wants one: verb first in the source, last in the target."""
        verb = self.random.choice(self.random.choice((TRANSITIVE, INTRANSITIVE)))
        source, target, _ = self.noun_phrase() if verb in TRANSITIVE else ([], [], subject)
        conjugated = self.stem(verb, subject.living) + ("nt" if subject.plural else "t")
        return [verb, *source], [*target, conjugated]

    def noun_phrase(self, relative: bool = False) -> tuple[Words, Words, Noun]:
        """Article or number, adjectives, noun or compound; with `relative` sometimes a relative clause."""
        parts = self.random.sample(LIVING + THINGS, self.random.choice((1, 2)))
        word, plural = " ".join(parts), self.random.random() < 0.5
        gender = self.gender.setdefault(word, self.random.randrange(2))
        noun = Noun(gender, plural, parts[-1] in LIVING)
        first = self.random.choice(("the", "two") if plural else ("the", "a"))
        adjectives = self.random.sample(ADJECTIVES, self.random.choice((0, 0, 1, 1, 2)))
        source = [first, *adjectives, *parts[:-1], parts[-1] + "s" * plural]
        article, number = ["the"] * (first == "the"), ["two"] * (first == "two")
        target = [self.inflected(each, noun) for each in (*article, word, *number, *adjectives)]
        if relative and self.random.random() < 0.25:
            more, translated = self.predicate(noun)
            source, target = [*source, "that", *more], [*target, self.stem("that"), *translated]
        return source, target, noun

    def stem(self, word: str, living: bool = False) -> str:
        """The invented word; for a word with two senses, that for living beings or for things."""
        sense = word, living and word in TWO_SENSES
        if sense not in self.lexicon:
            self.lexicon[sense] = self.unused.pop()
        return self.lexicon[sense]

    def inflected(self, word: str, noun: Noun) -> str:
        """Word of a noun phrase with the ending for the noun's number and gender."""
        return self.stem(word, noun.living) + (("s", "na"), ("ri", "ne"))[noun.plural][noun.gender]


def invented_pairs(count: int, seed: int) -> list[Pair]:
    """`count` different sentences and their translations."""
    grammar = Grammar(seed)
    found: dict[str, Pair] = {}
    while len(found) < count:
        source, target = grammar.sentence()
        found[" ".join(source)] = source, target
    return list(found.values())
