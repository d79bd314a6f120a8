"""CUDA graphs: forward and backward, captured once, replayed with gates that close other heads.

A kernel that reads its gate on the host, or waits for the GPU, cannot do that. Every item also runs
forward and backward where PyTorch raises at anything that synchronises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu.determinism import Result, differences
from benchmarks.gpu.settings import FAILED, PASSED, Items, Row, Settings, Skipped, must_serve
from heads_kernels.testing import Case, CollaborativeCase, EntmaxCase, GatedCase, Inputs, masks

_CASES: Final[tuple[Case, ...]] = (
    GatedCase("heads", 2, 8, 300, 300, D=64, Dv=64, gate="H", closed=0.5, is_causal=True),
    GatedCase("batch_heads", 3, 8, 200, 257, D=64, Dv=64, Hk=2, gate="BH", closed=0.5),
    GatedCase("padded", 3, 4, 256, 256, D=128, Dv=128, gate="H", closed=0.25,
        mask=masks.padded(256, 77, 130)),
    GatedCase("elements", 1, 4, 256, 256, D=128, Dv=128, gate="BHTD", gate_activation="sigmoid"),
    EntmaxCase("entmax", 2, 4, 256, 256, D=64, Dv=64, gate="H", closed=0.5, is_causal=True),
    CollaborativeCase("mixing", 2, 6, 200, 200, Ds=256, Dv=64, gate="H", closed=0.5,
        mixing="chunks", content_bias=True),
    CollaborativeCase("ragged", 1, 6, 200, 200, Ds=256, Dv=64, mixing="ragged", is_causal=True),
)  # fmt: skip


def items(settings: Settings) -> Items:
    return {
        f"{case.operator}/{case}/closed_grad={closed_grad}/{backend}": partial(
            _replayed, settings, case, closed_grad, backend
        )
        for case in _CASES
        for closed_grad in (True, False)
        for backend in settings.backends(case.operator)
    }


def _replayed(settings: Settings, case: Case, closed_grad: bool, backend: str) -> Row:
    if not settings.on_gpu:
        raise Skipped("CUDA graphs need a CUDA device")
    drawn = case.make(torch.bfloat16, settings.device)
    inputs = replace(drawn, options={**drawn.options, "closed_grad": closed_grad}).requires_grad()
    must_serve(inputs, backend)
    inputs.backward(backend)  # compiles
    with _no_synchronisation():
        inputs.backward(backend)
    graph, static = _capture(inputs, backend)
    wrong = []
    for step in range(3):
        graph.replay()
        torch.cuda.synchronize()
        wrong += [
            f"replay {step}: {text}" for text in differences(static, inputs.backward(backend))
        ]
        _close_others(inputs)
    return {"verdict": FAILED if wrong else PASSED, "detail": "; ".join(wrong)}


@contextlib.contextmanager
def _no_synchronisation() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _capture(inputs: Inputs, backend: str) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of one forward and backward pass, and the tensors that a replay writes."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            inputs.backward(backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = inputs.backward(backend)
    return graph, static


def _close_others(inputs: Inputs) -> None:
    """Gate and mixing move on by one head, in place: other heads are closed, other chunks empty."""
    with torch.no_grad():
        for name in ("gate", "mixing"):
            tensor: Tensor | None = inputs.tensors.get(name)
            if tensor is not None:
                heads = 0 if name == "mixing" or tensor.dim() == 1 else 1
                tensor.copy_(tensor.roll(1, heads))
