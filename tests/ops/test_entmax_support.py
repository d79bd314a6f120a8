"""Triton's backward pass of entmax visits the tiles with a probability above 0, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from heads_kernels.ops import eager, scores
from heads_kernels.ops.attention import Saved, attention_op
from heads_kernels.ops.philox import seed_of
from heads_kernels.ops.triton.entmax_centers import centers_pass
from heads_kernels.ops.triton.rows import first_pass
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import Tiles
from heads_kernels.testing import find

NAMES = ("cross", "packed_causal", "closed_batch_heads", "dropout", "bias_hides")


def any_of_tiles(pairs: Tensor, rows: int, keys: int) -> Tensor:
    """bool `[B, H, T, S]` to `[B, H, tiles of rows, tiles of keys]`."""
    T, S = pairs.shape[2:]
    padded = functional.pad(pairs, (0, -S % keys, 0, -T % rows))
    return padded.unflatten(3, (-1, keys)).unflatten(2, (-1, rows)).amax((3, 5))


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_the_support(backend: str, name: str) -> None:
    inputs = find("entmax_attention", name).make(torch.float32)
    inputs.tensors["key"] *= 8  # large scores have few keys above 0
    seed = seed_of(0) if inputs.options.get("dropout_p") else None
    call = inputs.parsed()._replace(seed=seed)
    out, attended, lse = attention_op(*call, True, backend)
    nothing = out.new_empty(0)
    saved = Saved(inputs.dout, out if call.gate is None else attended, lse, None)
    first = first_pass(call, saved, inputs.dout, nothing, nothing)
    support = centers_pass(call, first, nothing).support
    assert support is not None

    above = eager.row_probabilities(call) > 0
    if call.gate is not None and call.gate_activation == "identity" and call.gate.dim() < 3:
        above &= (call.gate != 0).expand(call.sizes[:2])[..., None, None]
    cells = support.ptr != 0
    assert torch.equal(cells, any_of_tiles(above, support.block_m, support.block_n))
    visible = scores.visible_pairs(call)
    seen = torch.ones_like(above) if visible is None else visible.expand_as(above)
    assert (seen & ~above).any()

    # The passes over keys have other tiles.
    of, tiles = first.operands, Tiles(16, 64, num_warps=4, num_stages=1)
    T, S = call.sizes[2:]
    supported = cells.repeat_interleave(support.block_m, 2)[:, :, :T]
    supported = supported.repeat_interleave(support.block_n, 3)[..., :S]
    visited = any_of_tiles(seen & supported, tiles.block_m, tiles.block_n)
    for by_keys in (False, True):
        lists = visible_to_tiles(call, of.terms, of.visible, tiles, by_keys, support).lists
        assert lists is not None
        assert torch.equal(
            lists.counts.sum(1).view(*call.sizes[:2], -1), visited.sum(2 if by_keys else 3)
        )
