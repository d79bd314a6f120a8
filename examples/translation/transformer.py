"""A small pre-norm Transformer with one module of `hk.nn` for its three kinds of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from corpus import END, PAD, START
from torch import Tensor, nn

import heads_kernels as hk

Cache = hk.nn.KeyValueCache | None
#: Makes an attention module of a width and a number of heads.
Attention = Callable[[int, int], nn.Module]


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward part, each applied to a normalised input and added to the residual stream."""

    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = attention(width, heads)
        self.feed_forward = feed_forward(width)

    def forward(self, x: Tensor, mask: hk.Mask) -> Tensor:
        x = x + self.attention(self.norm(x), mask=mask)[0]
        out: Tensor = x + self.feed_forward(x)
        return out


class DecoderLayer(nn.Module):
    """As `EncoderLayer`, with attention to the encoder's output, `memory`, in between."""

    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = attention(width, heads)
        self.cross_norm = nn.LayerNorm(width)
        self.cross = attention(width, heads)
        self.feed_forward = feed_forward(width)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: hk.Mask,
        cross_mask: hk.Mask,
        cache: Cache = None,
        cross_cache: Cache = None,
    ) -> Tensor:
        x = x + self.attention(self.norm(x), mask=mask, cache=cache)[0]
        x = x + self.cross(self.cross_norm(x), memory, mask=cross_mask, cache=cross_cache)[0]
        out: Tensor = x + self.feed_forward(x)
        return out


def feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


class Translator(nn.Module):
    """Encoder and decoder over words, with learned positions.

    Args:
        source_words, target_words: sizes of the two vocabularies.
        longest: the most words of a sentence, including `START` and `END`.
        width: of a word's vector, a multiple of `heads`.
        heads, layers: heads of every attention layer, layers of the encoder and of the decoder.
        attention: makes the attention of a layer, from `width` and `heads`.
    """

    def __init__(
        self,
        source_words: int,
        target_words: int,
        longest: int,
        width: int = 64,
        heads: int = 4,
        layers: int = 3,
        attention: Attention = hk.nn.GatedMultiheadAttention,
    ) -> None:
        super().__init__()
        self.source = nn.Embedding(source_words, width)
        self.target = nn.Embedding(target_words, width)
        self.position = nn.Embedding(longest, width)
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, attention) for _ in range(layers))
        self.memory_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, attention) for _ in range(layers))
        self.words = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, target_words))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits `[B, T, target_words]` of the word after each of `target`; source `[B, S]`, target `[B, T]`, int64.

        One mask serves all layers. It hides padded keys and padded rows, which cost nothing.
        """
        real, target_real = source != PAD, target != PAD
        mask = hk.Mask(causal=True, key_mask=target_real, query_mask=target_real)
        cross_mask = hk.Mask(key_mask=real, query_mask=target_real)
        return self.decode(target, self.encode(source), mask, cross_mask)

    def encode(self, source: Tensor) -> Tensor:
        """The output of the encoder, `[B, S, width]`."""
        real = source != PAD
        mask = hk.Mask(key_mask=real, query_mask=real)
        x: Tensor = self.source(source) + self.position.weight[: source.shape[1]]
        for layer in self.encoder:
            x = layer(x, mask)
        memory: Tensor = self.memory_norm(x)
        return memory

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        mask: hk.Mask,
        cross_mask: hk.Mask,
        caches: Sequence[tuple[Cache, Cache]] | None = None,
        start: int = 0,
    ) -> Tensor:
        """Logits after the words `target`, the first of which has position `start`."""
        caches = caches or [(None, None)] * len(self.decoder)
        x: Tensor = self.target(target) + self.position.weight[start : start + target.shape[1]]
        for layer, pair in zip(self.decoder, caches, strict=True):
            x = layer(x, memory, mask, cross_mask, *pair)
        logits: Tensor = self.words(x)
        return logits

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        """Greedy translations of `[B, S]`: words `[B, T]`, the first `START`; ignore those after an `END`.

        A step runs only the newest word: the caches hold keys and values of earlier words, and of the encoder.
        """
        memory = self.encode(source)
        mask, cross_mask = hk.Mask(causal="lower_right"), hk.Mask(key_mask=source != PAD)
        caches = [(hk.nn.KeyValueCache(), hk.nn.KeyValueCache()) for _ in self.decoder]
        words = torch.full_like(source[:, :1], START)
        ended = torch.zeros_like(words, dtype=torch.bool)
        for position in range(self.position.num_embeddings - 1):
            logits = self.decode(words[:, -1:], memory, mask, cross_mask, caches, position)
            words = torch.cat((words, logits.argmax(-1)), 1)
            ended |= words[:, -1:] == END
            if ended.all():
                break
        return words
