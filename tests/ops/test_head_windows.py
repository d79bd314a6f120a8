"""Windows and first keys by head: each head is a call of its own window, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.ops.statistics import AttentionStatistics
from tests.ops.calls import DIFFERENTIABLE, NAMES, call, tensors
from tests.support.alike import assert_alike

B, H, Hk, T = 2, 4, 2, 150
SCALE = 0.3  # the default depends on the number of heads
#: Heads 0 and 1 share a key head; 0 sees all earlier keys, and the first keys of 2 are more than a tile.
WINDOWS, FIRST = [(-1, 0), (20, 0), (33, 2), (0, -1)], [0, 3, 70, 1]


def mask_of(heads: slice = slice(None), **more: Any) -> hk.Mask:
    """The mask of these heads; causal with the last row at the last key."""
    aligned = {"causal": "lower_right", "window": WINDOWS[heads], "first_keys": FIRST[heads]}
    return hk.Mask(**aligned, **more)


def head_of(operator: str, given: dict[str, Tensor], h: int) -> dict[str, Tensor]:
    """What head h reads."""
    own = slice(h, h + 1)
    if operator == "collaborative_attention":
        of_head = {name: given[name][:, own] for name in ("value", "content_bias")}
        return {**given, **of_head, "mixing": given["mixing"][own]}
    shared = slice(h * Hk // H, h * Hk // H + 1)
    names = {name: own if name == "query" else shared for name in given}
    return {name: given[name][:, heads] for name, heads in names.items()}


OPERATORS = [*DIFFERENTIABLE, *(("entmax_attention", name) for name in NAMES)]


@pytest.mark.parametrize("rows", [1, 5, T])
@pytest.mark.parametrize(("operator", "backend"), OPERATORS)
def test_heads_are_calls_of_one_window_each(operator: str, backend: str, rows: int) -> None:
    """The output, its lse and every gradient; few rows against many keys are decoding."""
    given = tensors(operator, B=B, H=H, Hk=Hk, T=rows, S=T, dtype=torch.float32, grad=True)
    more: dict[str, Any] = {} if operator[0] == "e" else {"return_lse": True}
    real = torch.arange(T) != 7

    def attend(mask: hk.Mask, **given: Tensor) -> tuple[Tensor, ...]:
        results = call(operator, backend, **given, attn_mask=mask, scale=SCALE, **more)
        return results if more else (results,)

    got = attend(mask_of(key_mask=real[None]), **given)
    heads = [
        attend(mask_of(slice(h, h + 1), key_mask=real[None]), **head_of(operator, given, h))
        for h in range(H)
    ]
    want = [torch.cat(results, 1) for results in zip(*heads, strict=True)]
    assert_alike(got, want)
    weights = [torch.randn_like(result) for result in got]
    leaves = list(given.values())
    found, expected = (torch.autograd.grad(results, leaves, weights) for results in (got, want))
    for name, one, other in zip(given, found, expected, strict=True):
        assert_alike(one, other, name=name)


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("backend", NAMES)
def test_statistics_of_heads(backend: str, mixing: bool) -> None:
    operator = "collaborative_attention" if mixing else "gated_attention"
    given = tensors(operator, B=B, H=H, Hk=Hk, T=T, S=T, dtype=torch.float32)

    def measure(mask: hk.Mask, given: dict[str, Tensor]) -> AttentionStatistics:
        scored = {name: each for name, each in given.items() if name != "value"}
        return call(
            "attention_statistics", backend, **scored, attn_mask=mask, scale=SCALE, received=True
        )

    got = measure(mask_of(), given)
    heads = [measure(mask_of(slice(h, h + 1)), head_of(operator, given, h)) for h in range(H)]
    for name, of_heads in zip(got._fields, zip(*heads, strict=True), strict=True):
        assert_alike(getattr(got, name).double(), torch.cat(of_heads, 1).double(), name=name)


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("backend", NAMES)
def test_what_one_head_does_not_see_reaches_another_alone(backend: str, rows: int) -> None:
    """NaN in a key and value that two heads share."""
    given = tensors("gated_attention", B=1, H=2, Hk=1, T=rows, S=100, dtype=torch.float32)
    mask = hk.Mask(causal="lower_right", window=[(-1, 0), (9, 0)], first_keys=[0, 4])
    clean = call("gated_attention", backend, **given, attn_mask=mask)
    for name in ("key", "value"):
        given[name][:, :, 50] = torch.nan
    given = {name: tensor.requires_grad_() for name, tensor in given.items()}
    out = call("gated_attention", backend, **given, attn_mask=mask)
    sees = mask.to_dense(1, 2, rows, 100)[..., 50]
    assert torch.equal(out.isnan().all(3), sees)
    assert torch.equal(out.isnan().any(3), sees)
    assert_alike(out[~sees], clean[~sees])
    (dquery,) = torch.autograd.grad(out, given["query"], torch.ones_like(out))
    assert torch.equal(dquery.isnan().any(3), sees)


def test_a_mask_of_other_heads_is_refused() -> None:
    """As of a layer some of whose heads are pruned: windows never move to other heads."""
    layer = hk.nn.GatedMultiheadAttention(16, 4)
    x = torch.randn(2, 6, 16)
    layer(x, mask=mask_of())
    hk.heads.prune(torch.nn.Sequential(layer), {"0": [1]})
    with pytest.raises(ValueError, match="window is of 4 heads, but H is 3; pass 3, or one"):
        layer(x, mask=mask_of())
