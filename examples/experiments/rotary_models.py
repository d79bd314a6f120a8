"""Small language models with rotary positions: their text, training, files and loss."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice

import torch
from lab import Lab
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

#: Learning rates of Adam: the highest for a new model, and that for a trained one.
RATE = 3e-3
RATE_AFTER = 1e-3
#: One of this many topics is held out.
HELD_OUT = 7


@dataclass(frozen=True)
class Settings:
    """Sizes.

    Attributes:
        width, heads, layers: of the model; every head has its own keys and values.
        length: characters of a window of the text.
        batch: windows of a batch.
        steps: of training a new model.
        more_steps: of further training.
        read: windows of the training part for calibration.
        held_out: other windows, on which the loss is measured.
    """

    width: int = 128
    heads: int = 8
    layers: int = 4
    length: int = 128
    batch: int = 8
    steps: int = 1500
    more_steps: int = 100
    read: int = 64
    held_out: int = 192

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


QUICK = Settings(width=32, heads=4, layers=2, length=32, batch=2, steps=3, more_steps=2, read=4, held_out=4)


def settings_of(lab: Lab) -> Settings:
    return QUICK if lab.quick else Settings()


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Characters of Python's documentation to train on, and held-out ones; no paragraph is in both."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    seen: set[str] = set()
    parts: tuple[list[str], list[str]] = ([], [])
    for number, name in enumerate(sorted(topics), 1):
        found = {each.strip(): each for each in topics[name].split("\n\n")}
        parts[number % HELD_OUT == 0].extend(found[key] for key in found if key not in seen)
        seen.update(found)
    train, held_out = ("\n\n".join(part).encode("ascii", "replace") for part in parts)
    return torch.tensor(list(train)), torch.tensor(list(held_out))


def batches(settings: Settings, seed: int) -> Iterator[Tensor]:
    """Endless random windows of the training part, `[batch, length]`."""
    train, _ = texts()
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(train) - settings.length, (settings.batch, 1), generator=draw)
        yield train[starts + torch.arange(settings.length)]


def more_batches(settings: Settings, seed: int) -> Iterator[Tensor]:
    """The batches of further training: the same for all models of a seed."""
    return batches(settings, seed + 1000)


def read_batches(settings: Settings, seed: int) -> list[dict[str, Tensor]]:
    """Batches for calibration: held-out text has no influence on the choice of features."""
    count = -(-settings.read // settings.batch)
    return [{"input_ids": ids} for ids in islice(batches(settings, seed + 2000), count)]


def new_model(settings: Settings, seed: int) -> LlamaForCausalLM:
    """The untrained model of a seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=settings.width,
        intermediate_size=8 * settings.width // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def trained(lab: Lab, seed: int) -> LlamaForCausalLM:
    """The model of the seed after `steps` of training: trained once, then read from the folder."""
    settings = settings_of(lab)
    model = new_model(settings, seed)
    learning = partial(learn, model, batches(settings, seed), settings.steps, RATE)
    lab.trained(f"rotary-{seed}", model, settings.steps, learning)
    return model


def learn(model: LlamaForCausalLM, data: Iterator[Tensor], steps: int, rate: float) -> Iterator[tuple[int, float]]:
    """Train with Adam; yields steps and losses. The rate rises over a tenth of the steps, then falls to 0."""
    optimizer = torch.optim.Adam(model.parameters(), rate)

    def slope(step: int) -> float:
        return min(10 * (step + 1) / steps, 1 - step / steps, 1.0)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, slope)
    model.train()
    for step, ids in enumerate(islice(data, steps), 1):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        yield step, loss.item()


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, settings: Settings) -> float:
    """Nats per character, over consecutive windows of the held-out text."""
    _, held_out = texts()
    count = min(settings.held_out, len(held_out) // settings.length)
    count -= count % settings.batch
    windows = held_out[: count * settings.length].view(-1, settings.batch, settings.length)
    model.eval()
    return sum(model(ids, labels=ids).loss.item() for ids in windows) / len(windows)
