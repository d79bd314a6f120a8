"""Triton's tiles: the lists of full and partial ones, against the mask itself; those of the support of entmax; full
ones through tensor descriptors; those of GPUs, where the interpreter has smaller ones for all other tests."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from heads_kernels.backends import TRITON_INTERPRETED
from heads_kernels.mask import Mask, as_mask
from heads_kernels.ops import eager, formula
from heads_kernels.ops.attention import Saved, attention_op
from heads_kernels.ops.triton import forward, operands
from heads_kernels.ops.triton.entmax import centers_pass
from heads_kernels.ops.triton.load import describable, tiles_in
from heads_kernels.ops.triton.operands import operands_of
from heads_kernels.ops.triton.rows import first_pass
from heads_kernels.ops.triton.tiles import Tiles, tiles_for
from heads_kernels.ops.triton.visible import with_tile_lists
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, check, find, masks
from tests.ops.calls import assert_ok, on_kind_of_gpu, parsed

interpreted = pytest.mark.skipif(not TRITON_INTERPRETED, reason="kernels are not interpreted (TRITON_INTERPRET)")

B, H, T, S = 2, 3, 150, 215
TILES = Tiles(block_m=32, block_n=64, block_d=0, block_slice=0, num_warps=4, num_stages=1)


def blocks(*shape: int) -> Tensor:
    """A bool mask of hidden, visible and mixed blocks."""
    sizes = masks.Sizes(B, H, T, S)
    mask = masks.dense_blocks(sizes, torch.get_default_device()).expand(B, H, T, S)
    return mask[: shape[0], : shape[1], : shape[2], : shape[3]]


CALLS: dict[str, dict[str, Any]] = {
    "batches": {"attn_mask": blocks(B, 1, T, S)},
    "heads": {"attn_mask": blocks(1, H, T, S) & (torch.arange(H) != 1)[:, None, None]},
    "shared": {"attn_mask": blocks(1, 1, T, S)},
    "keys": {"attn_mask": blocks(B, H, 1, S).clone(), "is_causal": True},
    "causal": {"attn_mask": blocks(B, 1, T, S), "is_causal": True},
    "windows": {
        "attn_mask": as_mask(blocks(B, 1, T, S), (B, H, T, S))
        & Mask(causal=True, window=[(-1, 0), (40, 0), (9, 0)], first_keys=[0, 4, 70])
    },
    "lengths": {"attn_mask": Mask(key_lengths=torch.tensor([70, 210]), query_lengths=torch.tensor([150, 33]))},
    "lengths, causal": {"attn_mask": Mask(causal="lower_right", key_lengths=torch.tensor([0, 192]))},
    "windows of heads": {"attn_mask": Mask(causal=True, window=[(-1, 0), (40, 0), (9, 0)])},
    "no mask": {},
    "hidden whole": {"attn_mask": torch.zeros(T, S, dtype=torch.bool)},
    "visible whole": {"attn_mask": torch.ones(T, S, dtype=torch.bool)},
}


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("name", CALLS)
@interpreted
@pytest.mark.parametrize("backend", ["triton"])
def test_lists(backend: str, name: str, by_keys: bool) -> None:
    call = parsed("gated_attention", *(torch.zeros(B, H, L, 8) for L in (T, S, S)), **CALLS[name])
    seen = call.intervals.to_dense(T, S).expand(B, H, T, S)
    lists = with_tile_lists(call, operands_of(call), TILES, by_keys, listed=True).visible.lists
    M, N = TILES.block_m, TILES.block_n
    row_tiles, key_tiles = -(-T // M), -(-S // N)
    owners, others = (key_tiles, row_tiles) if by_keys else (row_tiles, key_tiles)
    for b, h, owner in [(b, h, o) for b in range(B) for h in range(H) for o in range(owners)]:
        full, partial = [], []
        for other in range(others):
            i, j = (other, owner) if by_keys else (owner, other)
            tile = seen[b, h, i * M : (i + 1) * M, j * N : (j + 1) * N]
            whole = (i + 1) * M <= T if by_keys else (j + 1) * N <= S
            if tile.all() and whole:
                full.append(other)
            elif tile.any():
                partial.append(other)
        number = b * lists.stride_b + h * lists.stride_h + owner
        counts = lists.counts[number].tolist()
        assert counts == [len(full), len(partial)]
        assert lists.tiles[number, 0, : counts[0]].tolist() == full
        assert lists.tiles[number, 1, : counts[1]].tolist() == partial


@pytest.mark.parametrize("name", ["bias_shared", "offsets", "dense_heads"])
@interpreted
@pytest.mark.parametrize("backend", ["triton"])
def test_addresses_of_64_bits(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of biases and masks so large that 32 bits do not count their elements."""
    far = torch.empty_strided((1, 2, 2**16, 2**16), (0, 0, 2**16, 1), device="meta")
    assert operands._far(far) == 1
    assert operands._far(far[..., : 2**14, :]) is None
    monkeypatch.setattr(operands, "_far", lambda pairs: None if pairs is None else 1)
    assert_ok(check(find("gated_attention", name), torch.float32, backend))


# ---------------------------------------------------------------------- the support of entmax
OF_SUPPORT = ("cross", "packed_causal", "closed_batch_heads", "dropout_everything", "bias_hides")


def any_of_tiles(pairs: Tensor, rows: int, keys: int) -> Tensor:
    """bool `[B, H, T, S]` to `[B, H, tiles of rows, tiles of keys]`."""
    T, S = pairs.shape[2:]
    padded = functional.pad(pairs, (0, -S % keys, 0, -T % rows))
    return padded.unflatten(3, (-1, keys)).unflatten(2, (-1, rows)).amax((3, 5))


@interpreted
@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("name", OF_SUPPORT)
def test_tiles_of_the_support(backend: str, name: str) -> None:
    inputs = find("entmax_attention", name).make(torch.float32)
    inputs.tensors["key"] *= 8  # large scores have few keys above 0
    seed = torch.tensor([0, 0, 0, 0, 0]) if inputs.options.get("dropout_p") else None
    call = inputs.parsed()._replace(seed=seed)
    out, attended, lse = attention_op(*call, True, backend)
    nothing = out.new_empty(0)
    saved = Saved(inputs.dout, out if call.gate is None else attended, lse, None)
    first = first_pass(call, saved, inputs.dout, nothing, nothing)
    support = centers_pass(call, first, nothing).support

    above = eager.row_probabilities(call) > 0
    if call.gate is not None and call.gate_activation == "identity" and call.gate.dim() < 3:
        above &= (call.gate != 0).expand(call.sizes[:2])[..., None, None]
    cells = support.ptr != 0
    assert torch.equal(cells, any_of_tiles(above, support.block_m, support.block_n))
    visible = formula.visible_pairs(call)
    seen = torch.ones_like(above) if visible is None else visible.expand_as(above)
    assert (seen & ~above).any()

    # The passes over keys have other tiles.
    of, others = first.operands, Tiles(16, 64, num_warps=4, num_stages=1)
    T, S = call.sizes[2:]
    supported = cells.repeat_interleave(support.block_m, 2)[:, :, :T]
    supported = supported.repeat_interleave(support.block_n, 3)[..., :S]
    visited = any_of_tiles(seen & supported, others.block_m, others.block_n)
    for by_keys in (False, True):
        lists = with_tile_lists(call, of, others, by_keys, support).visible.lists
        assert torch.equal(lists.counts.sum(1).view(*call.sizes[:2], -1), visited.sum(2 if by_keys else 3))


# ---------------------------------------------------------------------- tensor descriptors
SIZES = (2, 3, 300, 64)


def rows(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0)).half()


def projected(*sizes: int) -> Tensor:
    """A view of what a projection gives: rows, then heads, beside other columns."""
    B, H, L, W = sizes
    return rows(B, L, 2 * H, W)[:, :, H:].transpose(1, 2)


LAYOUTS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "contiguous": (rows, True),
    "projected": (projected, True),
    "one batch, odd stride": (lambda B, H, L, W: rows(1, H, L, W).as_strided((1, H, L, W), (7, L * W, W, 1)), True),
    "batch of stride 0": (lambda B, H, L, W: rows(1, H, L, W).expand(B, -1, -1, -1), False),
    "head of stride 0": (lambda B, H, L, W: rows(B, 1, L, W).expand(-1, H, -1, -1), False),
    "rows of an odd stride": (lambda B, H, L, W: rows(B, H, L, W + 1)[..., :W], False),
    "base of 2 bytes": (lambda B, H, L, W: rows(B * H * L * W + 1)[1:].view(B, H, L, W), False),
    "float32": (lambda *sizes: rows(*sizes).float(), False),
    "no rows": (lambda B, H, L, W: rows(B, H, 0, W), False),
}


@pytest.mark.parametrize(("layout", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_describable(layout: Callable[..., Tensor], expected: bool) -> None:
    tensor = layout(*SIZES)
    assert describable(tensor) is expected
    if expected:
        descriptor = tiles_in(tensor, 128, 64)  # Triton's own checks
        assert descriptor.block_shape == [1, 1, 128, 64]


@pytest.mark.parametrize("kernel", ["gated_attention.forward", "collaborative_attention.forward"])
@pytest.mark.parametrize("kind", ["sm_100", "sm_90", "sm_80", "other"])
def test_tiles_of_descriptors(kind: str, kernel: str) -> None:
    """They are for sm_90 and newer, without terms, and not for queries of a few rows."""

    def steps(T: int, terms: bool, descriptors: bool) -> int:
        like = torch.empty(1, 1, T, 128, dtype=torch.bfloat16)
        with on_kind_of_gpu(kind):
            return tiles_for(kernel, like, 128, 128, terms, descriptors).full_tiles

    assert steps(512, False, True) == (2 if kind in ("sm_90", "sm_100") and kernel[0] == "g" else 0)
    assert steps(512, True, True) == steps(512, False, False) == steps(1, False, True) == 0


DESCRIBED: tuple[tuple[Case, bool], ...] = (
    (GatedCase("full alone", 1, 2, 40, 128, D=16, Dv=16), True),
    (GatedCase("causal", 2, 4, 140, 300, D=40, Dv=24, Hk=2, is_causal=True, gate="H", closed=0.5), True),
    (GatedCase("odd number of full tiles", 1, 2, 40, 150, D=64, Dv=16, mask=masks.padded(127, queries=False)), True),
    (GatedCase("holes", 1, 2, 33, 300, D=16, Dv=16, mask=masks.holes), True),
    (GatedCase("transposed", 2, 2, 64, 200, D=16, Dv=8, layout="transposed"), True),
    (GatedCase("rows of an odd width", 1, 2, 40, 128, D=20, Dv=16), False),
    (GatedCase("softcap", 1, 2, 40, 128, D=16, Dv=16, softcap=5.0), False),
    (CollaborativeCase("collaborative", 1, 2, 40, 128, Ds=32, Dv=16), False),
)


@pytest.mark.parametrize(("case", "expected"), DESCRIBED, ids=lambda value: str(value))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@interpreted
@pytest.mark.parametrize("backend", ["triton"])
def test_results_of_descriptors(backend: str, dtype: torch.dtype, case: Case, expected: bool) -> None:
    """Interpreted steps over full tiles take two of them, so that loops have steps and tiles that are left over."""
    with (
        mock.patch.object(forward, "FEWEST_KEYS", 0),
        mock.patch.object(forward, "tiles_in", wraps=tiles_in) as described,
    ):
        assert_ok(check(case, dtype, backend))
    assert described.called is expected


# ---------------------------------------------------------------------- sizes on GPUs
CASES: tuple[Case, ...] = (
    GatedCase("grouped", 1, 4, 200, 210, D=64, Dv=64, Hk=2, gate="H", closed=0.5, is_causal=True),
    GatedCase("wide", 1, 1, 140, 150, D=256, Dv=200, gate="BHTD", mask=masks.holes),
    GatedCase("decoding", 2, 4, 1, 300, D=64, Dv=64, Hk=2, gate="BH", mask=masks.holes),
    CollaborativeCase("few rows", 1, 2, 16, 140, Ds=256, Dv=64, content_bias=True),
    CollaborativeCase("chunks", 1, 2, 90, 140, Ds=256, Dv=64, content_bias=True, gate="H", mixing="chunks"),
    CollaborativeCase("slices", 1, 2, 70, 90, Ds=600, Dv=64, content_bias=True, mask=masks.holes),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["sm_90", "sm_80", "other"])
@interpreted
@pytest.mark.parametrize("backend", ["triton"])
def test_tiles_of_a_kind(backend: str, kind: str, case: Case) -> None:
    with on_kind_of_gpu(kind):
        assert_ok(check(case, torch.bfloat16, backend))
