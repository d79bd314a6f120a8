"""The model of a report and its text, loaded and checked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import heads_kernels as hk

Batch = dict[str, Tensor]

#: Lines in a batch. Heuristic.
_BATCH: Final = 16


class BadOption(argparse.ArgumentTypeError):
    """An option that cannot be used, or does not fit the model."""

    def __init__(self, option: str, was: str, instead: str) -> None:
        super().__init__(f"{was}; {instead}")
        self.option = option


@dataclass(frozen=True, eq=False)
class Inputs:
    path: Path  # the folder of the model
    model: Any  # of transformers, whose output has `last_hidden_state`
    tokenizer: Any
    layers: list[hk.heads.AttentionLayer]
    ids: list[list[int]]  # the tokens of each line
    batches: list[Batch]  # all lines, short ones first, padded on the right
    sentence: list[int]  # the tokens whose attention maps are drawn
    fast: bool  # panels are made with fewer passes over the text

    def words(self, ids: Sequence[int]) -> list[str]:
        texts = [self.tokenizer.decode([token]).strip() for token in ids]
        names = self.tokenizer.convert_ids_to_tokens(list(ids))
        return [text or str(name) for text, name in zip(texts, names, strict=True)]


def load(options: argparse.Namespace) -> Inputs:
    """Load the model and the text that the options name.

    Raises `BadOption` for a model that cannot be read or has no tokenizer, and for a sentence or text without tokens.
    """
    model = _model(options.model)
    tokenizer = _tokenizer(options.model)
    layers = hk.heads.attention_layers(model)
    longest = _longest(model, tokenizer, options.tokens)
    ids = [
        tokens
        for line in options.text[: options.limit]
        if (tokens := tokenizer(line, truncation=True, max_length=longest)["input_ids"])
    ]
    if not ids:
        raise BadOption("text", "has no tokens", "pass text that the model's tokenizer knows")
    known = model.get_input_embeddings().num_embeddings
    if (highest := max(map(max, ids))) >= known:
        was = f"has a tokenizer that gives token {highest}, but embeddings of {known} tokens"
        raise BadOption("model", was, "save the tokenizer that it was trained with in its folder")
    lines = sorted(ids, key=len)
    return Inputs(
        path=options.model,
        model=model,
        tokenizer=tokenizer,
        layers=layers,
        ids=ids,
        batches=[
            batch_of(lines[start : start + _BATCH], tokenizer.pad_token_id or 0)
            for start in range(0, len(lines), _BATCH)
        ],
        sentence=_sentence(options.sentence, tokenizer, longest) or ids[0],
        fast=options.fast,
    )


def _model(path: Path) -> Any:
    import transformers
    from safetensors import SafetensorError

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    instead = "pass the folder of an encoder or of a decoder"
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        if config.is_encoder_decoder:
            was = f"is an encoder-decoder model ({config.model_type}), which takes pairs of texts"
            raise BadOption("model", was, instead)
        model = hk.integrations.transformers.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        if model.main_input_name != "input_ids":
            raise BadOption("model", f"takes {model.main_input_name} ({config.model_type}), not text", instead)
        model.config.use_cache = False
        hk.integrations.transformers.use(model.eval())
        heads = [layer.num_heads for layer in hk.heads.attention_layers(model)]
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BadOption("model", f"cannot be read: {error}", instead) from error
    if not any(heads):
        raise BadOption("model", "has no heads left", instead)
    return model


def _tokenizer(path: Path) -> Any:
    import transformers

    instead = "save it there with tokenizer.save_pretrained"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadOption("model", f"has no tokenizer ({str(error).splitlines()[0]})", instead) from error
    names = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    if not any((path / name).exists() for name in names):  # transformers creates an empty one
        raise BadOption("model", "has no tokenizer", instead)
    return tokenizer


def _longest(model: Any, tokenizer: Any, tokens: int) -> int:
    """The most tokens of a line that model, tokenizer and user allow."""
    positions = getattr(model.config, "max_position_embeddings", None) or tokens
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            positions -= padding + 1  # RoBERTa and its relatives start after the padding index
            break
    return int(min(tokens, positions, tokenizer.model_max_length))


def _sentence(text: str | None, tokenizer: Any, longest: int) -> list[int]:
    if text is None:
        return []
    ids: list[int] = tokenizer(text)["input_ids"]
    if not text.strip() or not ids:
        raise BadOption("sentence", f"is {text!r}", "pass some words")
    if len(ids) > longest:
        raise BadOption("sentence", f"has {len(ids)} tokens", f"pass one of at most {longest}, or raise --tokens")
    return ids


def batch_of(rows: list[list[int]], padding: int = 0) -> Batch:
    """`input_ids` and `attention_mask` of these rows."""
    tokens = pad_sequence([torch.tensor(row) for row in rows], True, padding)
    lengths = torch.tensor([len(row) for row in rows])
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    return {"input_ids": tokens, "attention_mask": real.long()}
