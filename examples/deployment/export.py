"""A pruned model packaged by AOTInductor, for a C++ program that runs it without Python.

    python examples/deployment/export.py --folder deployed

writes `model.pt2`, the `inputs.pt` of one call, and `expected.pt`, the outputs that Python computes. Build and run the
program with

    cmake -S examples/deployment -B deployed \
      -DCMAKE_PREFIX_PATH=$(python -c "import torch; print(torch.utils.cmake_prefix_path)") \
      -DHEADS_KERNELS=$(python -c "import heads_kernels as hk; print(hk.integrations.cpp.library_path())")
    cmake --build deployed
    deployed/run deployed/model.pt2 deployed/inputs.pt deployed/outputs.pt

The model is a small encoder with layers of this package, or with `--model bert` a BERT of transformers; both have
random weights. The package serves 1 to 1024 sequences of 2 to 128 tokens, with padding.

Exit status: 0; 2 for a bad option.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import heads_kernels as hk

WIDTH, HEADS, VOCABULARY, LONGEST = 64, 4, 100, 128


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = attention

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), key_padding_mask=hidden)[0]


class Encoder(nn.Module):
    """Tokens to two logits, through gated and collaborative attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            [
                Block(hk.nn.GatedMultiheadAttention(WIDTH, HEADS, output_gate="head")),
                Block(hk.nn.CollaborativeMultiheadAttention(WIDTH, HEADS, shared_dim=32)),
            ]
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask == 0)
        return self.head(x[:, 0])


class Bert(nn.Module):
    """The logits of a BERT of transformers, which returns an object."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=LONGEST,
        )
        self.model = transformers.BertForSequenceClassification(config).eval()
        hk.integrations.transformers.use(self.model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


MODELS: dict[str, Any] = {"encoder": Encoder, "bert": Bert}


def pruned(name: str) -> nn.Module:
    """A model without heads 1 and 3 of its first layer, and with gates on the heads of its second."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    hk.heads.prune(model, {0: [1, 3]})
    hk.heads.gate(model, lambda heads: hk.nn.FixedGate(torch.linspace(0, 1, heads)), layers=[1])
    return model


def batch(count: int, length: int) -> dict[str, Tensor]:
    """A batch of sequences, each shorter than the one before it."""
    lengths = torch.tensor([max(1, length - 2 * row) for row in range(count)])
    return {
        "input_ids": torch.randint(VOCABULARY, (count, length)),
        "attention_mask": (torch.arange(length) < lengths[:, None]).long(),
    }


def exported(model: nn.Module) -> ExportedProgram:
    """The program for any number of sequences of any length."""
    sizes = {0: Dim("sequences", min=1, max=1024), 1: Dim("tokens", min=2, max=LONGEST)}
    example = batch(3, 7)
    with torch.no_grad():
        shapes = dict.fromkeys(example, sizes)
        return torch.export.export(model, (), example, dynamic_shapes=shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="encoder")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = pruned(options.model)
    package = options.folder / "model.pt2"
    torch._inductor.aoti_compile_and_package(exported(model), package_path=str(package))
    inputs = batch(5, 33)
    with torch.no_grad():
        torch.save([model(**inputs)], options.folder / "expected.pt")
    torch.save(list(inputs.values()), options.folder / "inputs.pt")


if __name__ == "__main__":
    main()
