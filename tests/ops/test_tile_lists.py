"""The lists of full and partial tiles that Triton kernels run over, against the mask itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from heads_kernels.backends import TRITON_INTERPRETED
from heads_kernels.mask import Mask, as_mask
from heads_kernels.testing import check, find, masks
from tests.ops.calls import parsed

if not TRITON_INTERPRETED:
    pytest.skip("kernels are not interpreted (TRITON_INTERPRET)", allow_module_level=True)

from heads_kernels.ops.triton import operands
from heads_kernels.ops.triton.operands import terms_of, visible_of
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import Tiles

B, H, T, S = 2, 3, 150, 215
TILES = Tiles(block_m=32, block_n=64, block_d=0, block_slice=0, num_warps=4, num_stages=1)


def blocks(*shape: int) -> Tensor:
    """A bool mask of hidden, visible and mixed blocks."""
    sizes = masks.Sizes(B, H, T, S)
    mask = masks.dense_blocks(sizes, torch.device("cpu")).expand(B, H, T, S)
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
    "hidden whole": {"attn_mask": torch.zeros(T, S, dtype=torch.bool)},
    "visible whole": {"attn_mask": torch.ones(T, S, dtype=torch.bool)},
}


@pytest.mark.triton
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_lists(name: str, by_keys: bool) -> None:
    call = parsed("gated_attention", *(torch.zeros(B, H, L, 8) for L in (T, S, S)), **CALLS[name])
    seen = call.intervals.to_dense(T, S).expand(B, H, T, S)
    lists = visible_to_tiles(call, terms_of(call), visible_of(call.intervals), TILES, by_keys).lists
    assert lists is not None
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


@pytest.mark.triton
@pytest.mark.parametrize("name", ["bias_shared", "offsets", "dense_heads"])
def test_addresses_of_64_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of biases and masks so large that 32 bits do not count their elements."""
    far = torch.empty_strided((1, 2, 2**16, 2**16), (0, 0, 2**16, 1), device="meta")
    assert operands._far(far) == 1
    assert operands._far(far[..., : 2**14, :]) is None
    monkeypatch.setattr(operands, "_far", lambda pairs: None if pairs is None else 1)
    report = check(find("gated_attention", name), torch.float32, "triton")
    assert report.ok, str(report)
