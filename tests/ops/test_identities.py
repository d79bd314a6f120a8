"""Identities that tie features together: two ways to say the same thing give the same numbers.

Also the log-sum-exp of calls without values, and what `merge_attention` refuses.
"""

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.ops import buffers
from heads_kernels.ops.attention import attend_with_lse
from tests.ops.calls import DIFFERENTIABLE, B, H, S, T, assert_same_bits, call, parsed, run, tensors
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused


# ---------------------------------------------------------------------- zeros of gates and of mixing
@pytest.mark.parametrize(
    ("operator", "backend", "name"),
    [
        (operator, backend, name)
        for operator, backend in DIFFERENTIABLE
        for name in ("gate", "mixing")
        if name == "gate" or operator == "collaborative_attention"
    ],
)
def test_zeros_have_no_slope_without_closed_grad(operator: str, backend: str, name: str) -> None:
    """Judged in their own dtype: a number that float64 holds and float32 does not closes nothing beside float32."""
    arguments = tensors(operator, Hk=4, D=64, dtype=torch.float32)
    small = torch.tensor([1e-50, 0.0, -1e-50, 1.0], dtype=torch.float64)
    if name == "mixing":
        arguments["mixing"] = arguments["mixing"].double()
        arguments["mixing"][0, :32] = 0.0
        arguments["mixing"][2, ::2] = 0.0
        arguments["mixing"][3] = small.repeat_interleave(16)  # a chunk each
    else:
        arguments["gate"] = small
    full, less = (run(operator, backend, **arguments, closed_grad=closed_grad) for closed_grad in (True, False))
    zero = arguments[name] == 0
    assert full[name].all()
    assert not less[name][zero].any()
    assert_alike(less, full | {name: full[name].masked_fill(zero, 0.0)})


# ---------------------------------------------------------------------- padding and batches
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_growing_the_padding_changes_no_valid_bit(
    monkeypatch: pytest.MonkeyPatch, operator: str, backend: str, dtype: torch.dtype, causal: bool
) -> None:
    """Of the output and of every gradient that a kernel writes; bits for fused kernels.

    On a GPU the heads of a sum are split over blocks by how many tiles there are; here they are not.
    """
    monkeypatch.setattr(buffers, "programs_wanted", lambda device: 1)
    B, H, T, S, more = 2, 2, 40, 45, 70
    given = tensors(operator, B=B, H=H, T=T, S=S, D=32, Dv=24, dtype=dtype) | {"gate": torch.rand(B, H, T)}
    dout = torch.randn(B, H, T, 24, dtype=dtype)
    mask = hk.Mask(causal=causal, key_lengths=[S, 20], query_lengths=[T, 33])
    want = run(operator, backend, dout, **given, attn_mask=mask)
    axis = {"query": -2, "key": -2, "value": -2, "content_bias": 2, "gate": 2, "out": 2}

    def grow(name: str, t: Tensor) -> Tensor:
        if name not in axis:
            return t
        size = list(t.shape)
        size[axis[name]] = more
        return torch.cat([t, torch.full(size, 7.0, dtype=t.dtype)], axis[name])

    grown = {name: grow(name, t) for name, t in given.items()}
    got = run(operator, backend, grow("out", dout), **grown, attn_mask=mask)
    for name in axis.keys() & got.keys():
        size = want[name].shape[axis[name]]
        assert not got[name].narrow(axis[name], size, more).any(), f"{name} in the padding"
        got[name] = got[name].narrow(axis[name], 0, size)
    assert_same_bits(backend, got, want)


@pytest.mark.parametrize(("T", "S"), [(3, 700), (33, 35)])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_a_batch_is_its_elements(operator: str, backend: str, T: int, S: int) -> None:
    """Bit for bit in fused kernels, of few rows against many keys too: nothing of one batch element enters another."""
    given = tensors(operator, B=3, H=2, T=T, S=S, dtype=torch.float32)
    whole = call(operator, backend, **given, is_causal=True)
    for b in range(3):
        one = {n: t if n == "mixing" else t[b : b + 1] for n, t in given.items()}
        alone = call(operator, backend, **one, is_causal=True)
        assert_same_bits(backend, alone[0], whole[b])


# ---------------------------------------------------------------------- log-sum-exp, and partial results that it merges
@pytest.mark.parametrize("T", [5, 40])
@pytest.mark.parametrize("backend", ["cpu"])
def test_lse_without_values(backend: str, T: int) -> None:
    query, key = torch.randn(2, 4, T, 8), torch.randn(2, 2, 6, 8)
    problem = parsed("gated_attention", query, key, torch.empty(2, 2, 6, 0))
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    assert_alike(attend_with_lse(problem, backend)[1], torch.logsumexp(scores, -1))


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
