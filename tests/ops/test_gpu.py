"""What only a GPU shows: real sizes, graphs, streams. `--device cuda` runs the other tests of operators there too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from heads_kernels.mask import Mask
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, Inputs, check, find, masks
from tests.ops.calls import assert_ok, assert_same_bits, inputs_of
from tests.support.poison import dirty_allocator

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("backend", ["triton", "cuda"])]

#: At most 8 heads of 2048 x 2048 or 4 of 4096 x 4096: 0.5 GiB of float64 a matrix of the oracle, about ten at once.
REAL: tuple[Case, ...] = (
    GatedCase("dense_64", 1, 8, 2048, 2048, D=64, Dv=64, gate="H", layout="transposed"),
    GatedCase("causal_128", 1, 8, 2048, 2048, D=128, Dv=128, gate="H", is_causal=True, layout="transposed"),
    GatedCase("grouped_causal_64", 1, 8, 2048, 2048, D=64, Dv=64, Hk=2, gate="BHT",
        gate_activation="sigmoid", is_causal=True, layout="transposed"),
    GatedCase("elements_128", 1, 4, 4096, 4096, D=128, Dv=128, Hk=2, gate="BHTD",
        gate_activation="sigmoid", is_causal=True, layout="transposed"),
    GatedCase("closed_64", 1, 8, 2048, 2048, D=64, Dv=64, gate="BH", closed=0.5),
    GatedCase("padded_64", 2, 2, 4096, 4096, D=64, Dv=64, gate="H", mask=masks.padded(4096, 1777)),
    GatedCase("padded_causal_128", 2, 2, 4001, 4001, D=128, Dv=128, gate="H",
        mask=masks.padded(4001, 2500, causal=True)),
    GatedCase("window_128", 1, 4, 4096, 4096, D=128, Dv=128, mask=masks.fixed(Mask(causal=True, window=(511, 0)))),
    GatedCase("outliers_64", 1, 4, 2048, 2048, D=64, Dv=64, gate="H", outlier=40.0),
    CollaborativeCase("256", 1, 6, 2048, 2048, Ds=256, Dv=64, gate="H", content_bias=True),
    CollaborativeCase("256_causal", 1, 4, 4096, 4096, Ds=256, Dv=64, is_causal=True),
    CollaborativeCase("512", 1, 6, 2048, 2048, Ds=512, Dv=64, content_bias=True),
    CollaborativeCase("512_ragged", 1, 6, 2048, 2048, Ds=512, Dv=64, mixing="ragged", gate="H", closed=0.34),
    CollaborativeCase("512_padded", 2, 3, 2048, 2048, Ds=512, Dv=64, mask=masks.padded(2048, 1111)),
    CollaborativeCase("768", 1, 4, 2048, 2048, Ds=768, Dv=64, is_causal=True),
)  # fmt: skip
#: Named cases whose gate or mixing may close other heads.
CAPTURED: tuple[Case, ...] = (
    find("gated_attention", "closed_heads"),
    find("gated_attention", "closed_batch_heads"),
    find("gated_attention", "padded"),
    find("gated_attention", "gate_bhtd_sigmoid"),
    find("collaborative_attention", "grouped_zero_chunks"),
    find("collaborative_attention", "ragged"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", REAL)
def test_real_sizes(case: Case, dtype: torch.dtype, backend: str) -> None:
    inputs_of(case, backend, dtype)
    assert_ok(check(case, dtype, backend))


@pytest.mark.parametrize("case", REAL)
def test_the_same_bits_again(case: Case, backend: str) -> None:
    """From memory that is full of NaN, several times: blocks of threads end in another order each time."""
    inputs = inputs_of(case, backend, torch.bfloat16)
    want = inputs.backward(backend)
    for _ in range(3):
        dirty_allocator(want[0], largest=1 << 26)  # bytes of the largest output
        assert_same_bits(backend, inputs.backward(backend), want)


@pytest.mark.parametrize("closed_grad", [True, False])
@pytest.mark.parametrize("case", CAPTURED)
def test_graphs(case: Case, closed_grad: bool, backend: str) -> None:
    """Forward and backward, captured once and replayed with gates that close other heads; nothing synchronises."""
    inputs = inputs_of(case, backend, torch.bfloat16).requires_grad()
    inputs = replace(inputs, options={**inputs.options, "closed_grad": closed_grad})
    inputs.backward(backend)  # compiles
    with no_synchronisation():
        inputs.backward(backend)
    with on_another_stream():
        for _ in range(2):
            inputs.backward(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = inputs.backward(backend)
    for _ in range(3):
        graph.replay()
        assert_same_bits(backend, static, inputs.backward(backend))
        close_others(inputs)


@pytest.mark.parametrize("case", CAPTURED)
def test_kernels_run_on_the_current_stream(case: Case, backend: str) -> None:
    """Behind what was put on it before, and ahead of what reads the results."""
    inputs = inputs_of(case, backend, torch.bfloat16)
    want = inputs.backward(backend)
    late = {name: torch.full_like(tensor, torch.nan) for name, tensor in inputs.tensors.items()}
    with on_another_stream():
        torch.cuda._sleep(10**8)  # cycles, some 50 ms: a kernel on another stream reads NaN
        for name, tensor in late.items():
            tensor.copy_(inputs.tensors[name])
        got = replace(inputs, tensors=late).backward(backend)
    assert_same_bits(backend, got, want)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def on_another_stream() -> Iterator[None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def close_others(inputs: Inputs) -> None:
    """Gate and mixing move on by one head, in place: other heads are closed, other chunks empty."""
    with torch.no_grad():
        for name in inputs.tensors.keys() & {"gate", "mixing"}:
            tensor = inputs.tensors[name]
            tensor.copy_(tensor.roll(1, 0 if name == "mixing" or tensor.dim() == 1 else 1))
