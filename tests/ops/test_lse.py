"""`return_lse`: the log-sum-exp of the operators without values, and partial results that it merges.

tests/ops/test_cases.py has its numbers and gradients.
"""

from __future__ import annotations

import pytest
import torch

import heads_kernels as hk
from heads_kernels.ops.attention import attend_with_lse
from tests.ops.calls import DIFFERENTIABLE, B, H, S, T, call, parsed, tensors
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused


@pytest.mark.parametrize("T", [5, 40])
@pytest.mark.parametrize("backend", ["cpu"])
def test_lse_without_values(backend: str, T: int) -> None:
    query, key = torch.randn(2, 4, T, 8), torch.randn(2, 2, 6, 8)
    problem = parsed("gated_attention", query, key, torch.empty(2, 2, 6, 0))
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    assert_alike(attend_with_lse(problem, backend)[1], torch.logsumexp(scores, -1))


# ---------------------------------------------------------------------- merging
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_merged_parts_are_the_whole(operator: str, backend: str, sinks: bool) -> None:
    """Outputs and all gradients, also where a part, or all, is hidden from a row, and of closed heads."""
    arguments = tensors(operator, dtype=torch.float32)
    arguments["gate"] = torch.tensor([0.7, 0.0, -1.0, 1.0])
    visible = torch.rand(B, 1, T, S) < 0.6
    visible[..., 0, :] = False
    visible[..., 1, 3:] = False
    leaves = {name: t.requires_grad_() for name, t in arguments.items()}
    if sinks:
        leaves["sinks"] = torch.randn(H, requires_grad=True)
    whole = call(operator, backend, **leaves, attn_mask=visible, return_lse=True)

    outs, lses = [], []
    dims = {"key": -2, "value": -2, "content_bias": -1}
    for first, last in ((0, 3), (3, 4), (4, S)):
        part = {
            name: t.narrow(dims[name], first, last - first) if name in dims else t
            for name, t in leaves.items()
            if name != "sinks"
        }
        mask = visible[..., first:last]
        out, lse = call(operator, backend, **part, attn_mask=mask, return_lse=True)
        outs.append(out)
        lses.append(lse)
    if sinks:
        outs.append(torch.zeros_like(outs[0]))
        lses.append(leaves["sinks"][:, None].expand_as(lses[0]))
    merged = hk.merge_attention(outs, lses)
    assert_alike(merged, whole)
    starts = torch.randn_like(whole[0]), torch.randn_like(whole[1])
    assert_alike(*(torch.autograd.grad(each, list(leaves.values()), starts) for each in (merged, whole)))


def test_merge_reads_nothing_of_hidden_parts() -> None:
    out = torch.tensor([[1.0, 2.0], [torch.nan, 3.0]], requires_grad=True)
    lse = torch.tensor([0.5, -torch.inf], requires_grad=True)
    merged, total = hk.merge_attention([out, out.detach()], [lse, lse.detach()])
    assert torch.equal(merged.detach()[1], torch.zeros(2))
    assert total[1] == -torch.inf
    of_out, of_lse = torch.autograd.grad(merged.sum() + total[0], (out, lse))
    assert not of_out[1].any()
    assert of_lse.isfinite().all()


def test_merge_refusals() -> None:
    out, lse = torch.randn(2, 3), torch.randn(2)
    assert_refused(
        (([], []), "outs is empty"),
        (([out, out], [lse]), "lses has 1 parts, outs 2"),
        (([out, out], [lse, torch.randn(3)]), r"lses has a part of shape \[3\]; pass \[2\]"),
        (([1], [lse]), TypeError, "outs is a int"),
        (([out], [1.0]), TypeError, "lses is a float"),
        (([out[0, 0]], [out[0, 0]]), r"outs has a part of shape \[\]"),
        (([out, out.to("meta")], [lse, lse]), "outs has a part on meta"),
        (([out], [lse.to("meta")]), "lses has a part on meta"),
        (([out, out.double()], [lse, lse]), "outs has parts of torch.float64"),
        of=hk.merge_attention,
    )
