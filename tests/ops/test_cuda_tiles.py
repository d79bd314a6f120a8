"""Sizes of blocks that the CUDA kernels choose by the shared memory of a GPU; the emulator stands for several."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

import heads_kernels as hk
from heads_kernels.backends import CUDA_EMULATED, BackendName
from heads_kernels.testing import check, masks
from heads_kernels.testing.case import Case, CollaborativeCase, GatedCase
from tests.ops.calls import assert_ok, tensors

pytestmark = [
    pytest.mark.parametrize("backend", ["cuda"]),
    pytest.mark.skipif(not CUDA_EMULATED, reason="needs HEADS_KERNELS_EMULATE_CUDA=1"),
]

KIB = 1 << 10
OF_BLOCK = KIB  # that CUDA takes of every block
#: Shared memory of a block and of a multiprocessor: CUDA C++ Programming Guide, "Compute Capabilities".
PARTS = {"sm_80": (163, 164), "sm_86": (99, 100), "sm_90": (227, 228)}


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a part that the emulator stands for meanwhile."""
    tiles_of = import_module("heads_kernels.ops.cuda")._tiles_of
    emulated = emulator()
    emulated.use_shared_bytes(*(number * KIB for number in PARTS[request.param]))
    tiles_of.cache_clear()
    yield request.param
    emulated.use_shared_bytes(*(number * KIB for number in PARTS["sm_86"]))
    tiles_of.cache_clear()


def emulator() -> Any:
    return import_module("heads_kernels._cuda_emulated")


@pytest.mark.parametrize("D", [64, 96, 128])
def test_a_multiprocessor_holds_two_blocks_of_the_gated_forward(D: int, part: str, backend: BackendName) -> None:
    B, H, T = 1, 2, 130
    query, key, value = torch.randn(3, B, H, T, D, dtype=torch.bfloat16)
    hk.gated_attention(query, key, value, is_causal=True, backend=backend)
    blocks, threads, shared = emulator().last_launch()
    of_block, of_multiprocessor = (number * KIB for number in PARTS[part])
    assert shared <= of_block
    assert 2 * (shared + OF_BLOCK) <= of_multiprocessor
    rows = 64 if part == "sm_86" and D > 64 else 128
    assert (blocks, threads) == (B * H * -(-T // rows), 128)


def test_blocks_of_keys_are_wide_where_their_memory_is_there(part: str, backend: BackendName) -> None:
    query, key, value = torch.randn(3, 1, 2, 130, 128, dtype=torch.bfloat16)
    key.requires_grad_()
    hk.gated_attention(query, key, value, is_causal=True, backend=backend).sum().backward()
    blocks, threads, shared = emulator().last_launch()
    assert shared <= PARTS[part][0] * KIB
    assert (blocks, threads) == ((2 * 3, 128) if part == "sm_86" else (2 * 2, 256))


#: Kernels whose tiles the host asks for: the operand with a gradient for which they run, query rows and keys.
ASKED = {
    "gated_attention.keys": ("key", 20, 145),
    "gated_attention.queries": ("query", 145, 20),
    "gated_attention.bias": ("bias", 145, 145),
    "collaborative_attention.forward": ("value", 145, 20),
    "collaborative_attention.keys": ("key", 20, 145),
    "collaborative_attention.queries": ("query", 145, 20),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kernel", ASKED)
def test_the_host_knows_the_tiles_of_a_kernel(
    kernel: str, width: int, dtype: torch.dtype, part: str, backend: BackendName
) -> None:
    """For one head, as many blocks are launched as tiles of the size that the host reads."""
    operand, T, S = ASKED[kernel]
    operator, _, name = kernel.partition(".")
    sizes = {"B": 1, "H": 1, "Hk": 1, "T": T, "S": S, "D": width, "Dv": width}
    given = tensors(operator, **sizes, dtype=dtype)
    if name == "bias":
        given["bias"] = torch.randn(1, 1, T, S)
    given[operand].requires_grad_()
    out = getattr(hk, operator)(**given, backend=backend)
    if name != "forward":
        out.sum().backward()
    tile = emulator().tiles_of(kernel, dtype, width, width, name == "bias", 0)
    rows, keys = -(-T // tile[0]), -(-S // tile[1])
    blocks = {"forward": rows, "keys": keys, "queries": rows, "bias": rows * keys}[name]
    if operator == "collaborative_attention" and name != "forward":
        blocks *= -(-width // tile[2])
    assert emulator().last_launch()[0] == blocks


CASES: tuple[Case, ...] = (
    GatedCase("causal", 1, 2, 130, 200, D=128, Dv=128, is_causal=True, gate="BHT"),
    GatedCase("lengths", 2, 1, 70, 150, D=96, Dv=72, mask=masks.holes, gate="H", dropout_p=0.25),
    GatedCase("grouped", 1, 4, 90, 200, D=128, Dv=104, Hk=2, mask=masks.holes, gate="BHT", dropout_p=0.25),
    CollaborativeCase("causal", 1, 2, 70, 70, Ds=256, Dv=64, is_causal=True, gate="H"),
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_part_computes_the_same(case: Case, dtype: torch.dtype, part: str, backend: str) -> None:
    assert_ok(check(case, dtype, backend))
