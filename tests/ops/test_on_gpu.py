"""What only a GPU can show: CUDA graphs, calls that never wait for the GPU, and kernels at the sizes of real models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from heads_kernels.mask import Mask
from heads_kernels.ops import collaborative_attention, entmax_attention, gated_attention
from heads_kernels.testing import (
    Case,
    CollaborativeCase,
    EntmaxCase,
    GatedCase,
    Inputs,
    check,
    dirty_allocator,
    masks,
)

Result = tuple[Tensor, dict[str, Tensor]]
#: Runs the graph of one forward and backward pass, and the tensors that it writes.
Captured = tuple[Callable[[], object], Result]

TABLES = {
    "gated_attention": gated_attention.BACKENDS,
    "collaborative_attention": collaborative_attention.BACKENDS,
    "entmax_attention": entmax_attention.BACKENDS,
}


def on_kernels(cases: list[Case]) -> pytest.MarkDecorator:
    """Every case on every backend that has GPU kernels; not named `backend`: no simulator serves these."""
    pairs = [
        (case, row.name)
        for case in cases
        for row in TABLES[case.operator]
        if row.name not in ("cpu", "eager")
    ]
    return pytest.mark.parametrize(("case", "kernels"), pairs, ids=lambda value: str(value))


def differences(got: Result, want: Result) -> list[str]:
    """The results that differ in a bit."""
    pairs = {"out": (got[0], want[0]), **{name: (got[1][name], want[1][name]) for name in want[1]}}
    return [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


# ---------------------------------------------------------------------- CUDA graphs
GRAPHS: list[Case] = [
    GatedCase("heads", 2, 8, 300, 300, D=64, Dv=64, gate="H", closed=0.5, is_causal=True),
    GatedCase("batch_heads", 3, 8, 200, 257, D=64, Dv=64, Hk=2, gate="BH", closed=0.5),
    GatedCase("padded", 3, 4, 256, 256, D=128, Dv=128, gate="H", closed=0.25,
        mask=masks.padded(256, 77, 130)),
    GatedCase("elements", 1, 4, 256, 256, D=128, Dv=128, gate="BHTD", gate_activation="sigmoid"),
    EntmaxCase("entmax", 2, 4, 256, 256, D=64, Dv=64, gate="H", closed=0.5, is_causal=True),
    CollaborativeCase("mixing", 2, 6, 200, 200, Ds=256, Dv=64, gate="H", closed=0.5,
        mixing="chunks", content_bias=True),
    CollaborativeCase("ragged", 1, 6, 200, 200, Ds=256, Dv=64, mixing="ragged", is_causal=True),
]  # fmt: skip


def stale(inputs: Inputs, backend: str, capture: Callable[[Inputs, str], Captured]) -> list[str]:
    """What differs from an ordinary call in a replay, the first or one with other heads closed."""
    replay, static = capture(inputs, backend)
    wrong = []
    for step in range(3):
        replay()
        wrong += [
            f"replay {step}: {name}" for name in differences(static, inputs.backward(backend))
        ]
        with torch.no_grad():  # in place, by one head: other heads are closed, other chunks empty
            for name in inputs.tensors.keys() & {"gate", "mixing"}:
                tensor = inputs.tensors[name]
                tensor.copy_(tensor.roll(1, 0 if name == "mixing" or tensor.dim() == 1 else 1))
    return wrong


def captured(inputs: Inputs, backend: str) -> Captured:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            inputs.backward(backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = inputs.backward(backend)
    return graph.replay, static


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("closed_grad", [True, False])
@on_kernels(GRAPHS)
def test_a_cuda_graph_reads_new_gates(case: Case, kernels: str, closed_grad: bool) -> None:
    """Nor does an ordinary call wait for the GPU."""
    drawn = case.make(torch.bfloat16, "cuda")
    inputs = replace(drawn, options={**drawn.options, "closed_grad": closed_grad}).requires_grad()
    inputs.backward(kernels)  # compiles
    with no_synchronisation():
        inputs.backward(kernels)
    assert stale(inputs, kernels, captured) == []


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("case", GRAPHS[::5], ids=str)
def test_a_replay_with_old_gates_is_found(case: Case, reads: bool) -> None:
    """On the CPU, where a replay computes anew, or nothing."""

    def capture(inputs: Inputs, backend: str) -> Captured:
        static = inputs.backward(backend)

        def replay() -> None:
            out, gradients = inputs.backward(backend)
            static[0].copy_(out)
            for name, gradient in gradients.items():
                static[1][name].copy_(gradient)

        return (replay if reads else lambda: None), static

    small = replace(case, T=17, S=17)
    with torch.no_grad():
        inputs = small.make(torch.float32, "cpu").requires_grad()
    assert bool(stale(inputs, "cpu", capture)) is not reads


# ---------------------------------------------------------------------- real sizes
#: At most 8 heads of 2048 x 2048 or 4 of 4096 x 4096: the oracle's matrices have 0.5 GiB each, about ten at once.
REAL: list[Case] = [
    GatedCase("dense_64", 1, 8, 2048, 2048, D=64, Dv=64, gate="H", layout="transposed"),
    GatedCase("causal_128", 1, 8, 2048, 2048, D=128, Dv=128, gate="H", is_causal=True,
        layout="transposed"),
    GatedCase("elements_128", 1, 4, 4096, 4096, D=128, Dv=128, Hk=2, gate="BHTD",
        gate_activation="sigmoid", is_causal=True, layout="transposed"),
    GatedCase("closed_64", 1, 8, 2048, 2048, D=64, Dv=64, gate="BH", closed=0.5),
    GatedCase("padded_causal_128", 2, 2, 4001, 4001, D=128, Dv=128, gate="H",
        mask=masks.padded(4001, 2500, causal=True)),
    GatedCase("window_128", 1, 4, 4096, 4096, D=128, Dv=128,
        mask=masks.fixed(Mask(causal=True, window=(511, 0)))),
    GatedCase("outliers_64", 1, 4, 2048, 2048, D=64, Dv=64, gate="H", outlier=40.0),
    CollaborativeCase("shared_256_causal", 1, 4, 4096, 4096, Ds=256, Dv=64, is_causal=True),
    CollaborativeCase("shared_512_ragged", 1, 6, 2048, 2048, Ds=512, Dv=64, mixing="ragged",
        gate="H", closed=0.34),
    CollaborativeCase("shared_512_padded", 2, 3, 2048, 2048, Ds=512, Dv=64, content_bias=True,
        mask=masks.padded(2048, 1111)),
    CollaborativeCase("shared_768", 1, 4, 2048, 2048, Ds=768, Dv=64, is_causal=True),
    EntmaxCase("entmax_64", 1, 6, 2048, 2048, D=64, Dv=64, gate="H", closed=0.34),
    EntmaxCase("entmax_128", 1, 4, 2048, 2048, D=128, Dv=128, alpha=(1.1, 2.0), is_causal=True),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@on_kernels(REAL)
def test_real_sizes(case: Case, kernels: str, dtype: torch.dtype) -> None:
    """Accurate, and the same bits again from memory full of NaN."""
    report = check(case, dtype, kernels, device="cuda")
    assert report.ok, report
    inputs = case.make(dtype, "cuda")
    expected = inputs.backward(kernels)
    dirty_allocator(expected[0], 1 << 26)
    assert differences(inputs.backward(kernels), expected) == []
