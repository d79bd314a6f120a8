"""`return_lse`: the log-sum-exp of the operators and its gradient, and partial results that it merges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import heads_kernels as hk
from heads_kernels.call import OPERANDS, compute_dtype
from heads_kernels.ops.attention import attention_op, backward_op
from heads_kernels.testing import CASES, Case
from heads_kernels.testing.accuracy import compare, reference
from tests.ops.calls import (
    DIFFERENTIABLE,
    NAMES,
    OPERATORS,
    call,
    inputs_of,
    parsed,
    serve,
    tensors,
)
from tests.support.alike import assert_alike

B, H, T, S, D, Dv = 2, 4, 5, 7, 8, 6
NEG_INF = float("-inf")
#: The first pass over rows reads the gradient of lse, and no loop over tiles knows of it. These and all tiny cases
#: differ in what that pass tells apart: gates, rows that see nothing, closed heads, sinks, dropout, strides, widths,
#: and which sizes are 0 or 1.
FIRST_PASS = {
    "closed_batch_heads", "closed_all", "lower_right_blind_rows", "padded", "bias_hides", "dropout", "sinks",
    "sinks_all", "sinks_no_keys", "zero_keys", "zero_rows", "empty_batch", "one_row", "one_key", "grouped",
    "grouped_closed", "ragged", "zero_head", "gate_strided_elements", "transposed", "width_72_40", "width_7",
    "multi_value", "scale_negative",
}  # fmt: skip
QUICK = [
    pytest.param(case, name, id=f"{case.operator}-{case}-{name}")
    for case in CASES
    if "model" not in case.tags
    for name in NAMES
    if "tiny" in case.tags or case.name in FIRST_PASS
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("case", "backend"), QUICK)
def test_accuracy(case: Case, backend: str, dtype: torch.dtype) -> None:
    """Started from gradients of the output and of lse."""
    if dtype not in case.dtypes:
        pytest.skip(f"not a case of {dtype}")
    inputs = inputs_of(case, backend, dtype)
    problem = inputs.parsed()
    dlse = torch.randn(problem.B, problem.H, problem.T, dtype=compute_dtype(dtype))
    report = compare(reference(replace(inputs, dlse=dlse)), backend, case.name)
    assert report.ok, str(report)


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_nothing_reaches_rows_that_see_nothing(operator: str, backend: str) -> None:
    """Their gradients are 0, whatever starts the backward pass there; a closed head is 0 whatever it sees."""
    arguments = tensors(operator, dtype=torch.float32)
    arguments["value"][0, -1, 0] = float("nan")
    arguments["gate"] = torch.tensor([1.0, 0.5, 0.0, 0.0])
    leaves = [t.requires_grad_() for t in arguments.values()]
    mask = hk.Mask(key_lengths=[S, 0])
    out, lse = call(operator, backend, **arguments, attn_mask=mask, return_lse=True)
    assert not out[0, -1].any()
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dout[1] = dlse[1] = float("nan")
    for tensor, grad in zip(
        leaves, torch.autograd.grad((out, lse), leaves, (dout, dlse)), strict=True
    ):
        if tensor.dim() > 2:
            assert not grad[1].any()


@pytest.mark.parametrize("gate", [None, (H,)])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_in_torch(operator: str, backend: str, gate: tuple[int, ...] | None) -> None:
    """The op under opcheck, torch.compile, the FLOP counter and on meta tensors."""
    arguments = tensors(operator, dtype=torch.float32, grad=True)
    if gate is not None:
        arguments["gate"] = torch.randn(gate, requires_grad=True)
    serve(operator, backend, **arguments)
    fields = parsed(operator, **arguments)
    packed = [t.detach() if isinstance(t, Tensor) else t for t in fields]
    out, attended, lse = attention_op(*packed, True, backend)
    torch.library.opcheck(attention_op, (*packed, True, backend))
    saved = torch.randn_like(out), attended if gate else out, lse, torch.randn_like(lse)
    needs = [operand in arguments for operand in OPERANDS]
    torch.library.opcheck(backward_op, (*saved, *packed, needs, backend))

    names, leaves = list(arguments), list(arguments.values())

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, values, strict=True))
        return getattr(hk, operator)(**given, is_causal=True, return_lse=True, backend=backend)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    starts = torch.randn(B, H, T, Dv), torch.randn(B, H, T)
    results = []
    for function in (run, compiled):
        pair = function(*leaves)
        results.append((*pair, *torch.autograd.grad(pair, leaves, starts)))
    assert_alike(results[1], results[0])

    with FlopCounterMode(display=False) as counted:
        out, lse = run(*leaves)
        (out.sum() + lse.sum()).backward()
    assert counted.get_total_flops() == 2 * B * H * T * S * (4 * D + 3 * Dv)

    if backend == "eager":
        out, lse = run(*(t.detach().to("meta") for t in leaves))
        assert (out.shape, lse.shape) == ((B, H, T, Dv), (B, H, T))


@pytest.mark.parametrize("operator", OPERATORS)
def test_leading_dimensions(operator: str) -> None:
    given = {
        name: t if name == "mixing" else t.unflatten(0, (1, B))
        for name, t in tensors(operator).items()
    }
    out, lse = getattr(hk, operator)(**given, return_lse=True)
    assert (out.shape, lse.shape) == ((1, B, H, T, Dv), (1, B, H, T))
    assert lse.dtype == torch.float64
    assert hk.explain(operator, **given, return_lse=True).backend is not None
    with pytest.raises(TypeError, match="return_lse is a str"):
        getattr(hk, operator)(**given, return_lse="yes")


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
    for first, last in ((0, 3), (3, 4), (4, S)):
        part = {name: t for name, t in leaves.items() if name != "sinks"}
        for name, dim in {"key": -2, "value": -2, "content_bias": -1}.items():
            if name in part:
                part[name] = part[name].narrow(dim, first, last - first)
        mask = visible[..., first:last]
        out, lse = call(operator, backend, **part, attn_mask=mask, return_lse=True)
        outs.append(out)
        lses.append(lse)
    if sinks:
        outs.append(torch.zeros_like(outs[0]))
        lses.append(leaves["sinks"][:, None].expand_as(lses[0]))
    merged = hk.merge_attention(outs, lses)
    assert_alike(merged[0], whole[0])
    assert_alike(merged[1], whole[1])
    starts = torch.randn_like(whole[0]), torch.randn_like(whole[1])
    tensors_ = list(leaves.values())
    got = torch.autograd.grad(merged, tensors_, starts)
    for name, a, b in zip(leaves, got, torch.autograd.grad(whole, tensors_, starts), strict=True):
        assert_alike(a, b, name=name)


def test_merge_reads_nothing_of_hidden_parts() -> None:
    out = torch.tensor([[1.0, 2.0], [float("nan"), 3.0]], requires_grad=True)
    lse = torch.tensor([0.5, NEG_INF], requires_grad=True)
    merged, total = hk.merge_attention([out, out.detach()], [lse, lse.detach()])
    assert torch.equal(merged.detach()[1], torch.zeros(2))
    assert total[1] == NEG_INF
    (merged.sum() + total[0]).backward()
    assert out.grad is not None
    assert lse.grad is not None
    assert not out.grad[1].any()
    assert lse.grad.isfinite().all()
    one, same = hk.merge_attention([out.detach()[:1]], [lse.detach()[:1]])
    assert torch.equal(one, out.detach()[:1])
    assert torch.equal(same, lse.detach()[:1])


def test_merge_refusals() -> None:
    out, lse = torch.randn(2, 3), torch.randn(2)
    with pytest.raises(ValueError, match="outs is empty"):
        hk.merge_attention([], [])
    with pytest.raises(ValueError, match="lses has 1 parts, outs 2"):
        hk.merge_attention([out, out], [lse])
    with pytest.raises(ValueError, match=r"lses has a part of shape \[3\]; pass \[2\]"):
        hk.merge_attention([out, out], [lse, torch.randn(3)])
    with pytest.raises(TypeError, match=r"outs is a int; pass a torch\.Tensor"):
        hk.merge_attention([1], [lse])
    with pytest.raises(TypeError, match=r"lses is a float"):
        hk.merge_attention([out], [1.0])
    with pytest.raises(ValueError, match=r"outs has a part of shape \[\]; pass \[\.\.\., Dv\]"):
        hk.merge_attention([out[0, 0]], [out[0, 0]])
    for outs, lses, name in (
        ([out, out.to("meta")], [lse, lse], "outs"),
        ([out], [lse.to("meta")], "lses"),
    ):
        with pytest.raises(
            ValueError, match=f"{name} has a part on meta, but the first of outs is on cpu"
        ):
            hk.merge_attention(outs, lses)
    with pytest.raises(ValueError, match=r"outs has parts of torch.float64"):
        hk.merge_attention([out, out.double()], [lse, lse])
