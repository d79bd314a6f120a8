"""What a call costs: FLOPs by closed formulas, by PyTorch's own counter and without what masks and gates leave out;
and memory."""

import pytest
import torch

import heads_kernels as hk
from benchmarks.peak import peak_memory
from heads_kernels.call import backward_flops, forward_flops
from heads_kernels.testing import Case, Inputs, find
from tests.ops.calls import DIFFERENTIABLE, FUSED, NAMES, QUICK, call, counted, parsed, run, tensors
from tests.support.plain import plain

B, H, T, S, D, Dv, Ds = 2, 4, 32, 48, 16, 24, 64


# ---------------------------------------------------------------------- PyTorch's counter
COUNTED = [
    *(find("gated_attention", name) for name in ("small", "transposed_grouped")),
    *(find("collaborative_attention", name) for name in ("small_bias", "grouped")),
    find("entmax_attention", "small_causal"),
]


@pytest.mark.parametrize("case", COUNTED)
def test_dense_count_is_that_of_the_plain_formula(case: Case) -> None:
    """Forward: two matrix products. Backward: four more, and the scores are computed again."""
    inputs = case.make(requires_grad=True)
    problem = inputs.parsed()
    leaves = list(inputs.tensors.values())
    forward = counted(lambda: plain(problem))
    assert problem.flops(dense=True) == forward
    out = plain(problem).out
    backward = counted(lambda: torch.autograd.grad(out, leaves, inputs.dout))
    scores = 2 * problem.B * problem.H * problem.T * problem.S * problem.D
    assert problem.flops(backward=True, dense=True) == backward + scores


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_the_ops_are_counted(operator: str, backend: str) -> None:
    inputs: Inputs = find(operator, "small").make(requires_grad=True)
    problem = inputs.parsed()
    leaves = inputs.tensors
    forward = counted(lambda: call(operator, backend, **leaves))
    assert forward == problem.flops(dense=True) == problem.flops()
    both = counted(lambda: call(operator, backend, **leaves).sum().backward())
    assert both - forward == problem.flops(backward=True, dense=True)


@pytest.mark.parametrize("case", QUICK)
def test_executed_by_asking_every_pair(case: Case) -> None:
    """Visible pairs of open heads, one by one, over the features that are not in a zero chunk."""
    p = case.make(requires_grad=True).parsed()
    visible = p.intervals.to_dense(p.T, p.S).expand(p.B, p.H, p.T, p.S)
    total = 0
    for h in range(p.H):
        width = p.D
        if p.mixing is not None:
            chunks = p.mixing[h].split(16)
            width = sum(len(chunk) for chunk in chunks if bool(chunk.any()))
        for b in range(p.B):
            gate = torch.ones(()) if p.gate is None else p.gate
            gate = gate[None] if gate.dim() == 1 else gate
            closed = gate.dim() >= 2 and gate[0, 0].numel() == 1 and p.gate_activation == "identity"
            if closed and gate.expand(p.B, p.H, *gate.shape[2:])[b, h].item() == 0:
                continue
            total += 2 * int(visible[b, h].sum()) * (width + p.Dv)
    assert p.flops() == total <= p.flops(dense=True)
    # A closed head is computed once more for the gradient of its gate, but not differentiated.
    assert 0 <= p.flops(backward=True) <= p.flops(backward=True, dense=True)


# ---------------------------------------------------------------------- gates and gradients
@pytest.mark.parametrize("closed_grad", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_backward_of_closed_heads(learned: bool, closed_grad: bool) -> None:
    """A closed head is computed once, for the gradient of its gate, where that is asked for."""
    gate = torch.tensor([0.5, 0.0, 1.0, 0.0], requires_grad=learned)
    given = tensors("gated_attention", B=B, H=H, Hk=H, T=T, S=S, D=D, Dv=Dv)
    problem = parsed("gated_attention", **given, gate=gate, closed_grad=closed_grad)
    half = B * H * T * S // 2
    want = backward_flops(half, D, Dv)
    if learned and closed_grad:
        want += forward_flops(half, D, Dv)
    assert problem.flops(backward=True) == want


@pytest.mark.parametrize("closed_grad", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_backward_of_mixing(learned: bool, closed_grad: bool) -> None:
    """The gradient of mixing needs `dS K` at full width, also where mixing is zero."""
    mixing = torch.zeros(H, Ds)
    mixing[:, :16] = 1.0
    shared = torch.empty(B, T, Ds), torch.empty(B, S, Ds), torch.empty(B, H, S, Dv)
    mixing.requires_grad_(learned)
    problem = parsed("collaborative_attention", *shared, mixing, closed_grad=closed_grad)
    wide = Ds if learned and closed_grad else 16
    assert problem.flops(backward=True) == backward_flops(B * H * T * S, 16, Dv, wide)


def test_statistics_count_scores_only() -> None:
    operands = torch.empty(B, H, T, D), torch.empty(B, H, S, D)
    problem = parsed("attention_statistics", *operands)
    assert problem.flops() == problem.flops(dense=True) == 2 * B * H * T * S * D
    assert counted(lambda: hk.attention_statistics(*operands)) == problem.flops()
    received = problem._replace(row_weights=torch.ones(1, 1, 1))
    assert received.flops() == received.flops(dense=True) == 4 * B * H * T * S * D
    with pytest.raises(ValueError, match="attention_statistics has no backward pass"):
        problem.flops(backward=True)


# ---------------------------------------------------------------------- memory
LONG = 4096
MATRIX = 4 * LONG * LONG  # bytes of one head's scores in float32: 64 MiB


@pytest.mark.slow
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("operator", "backend"), [*FUSED, *(("attention_statistics", name) for name in NAMES)])
def test_memory_is_linear_in_length(operator: str, backend: str, offsets: bool) -> None:
    """No fused kernel has a `[T, S]` matrix in memory, in neither pass; nor have statistics on any backend."""
    given = tensors(operator, B=1, H=2, Hk=2, T=LONG, S=LONG, D=16, Dv=16, dtype=torch.float32)
    if offsets:
        given["offset_table"] = torch.randn(2, 65)

    def both() -> object:
        if operator == "attention_statistics":
            return call(operator, backend, **given, received=True)
        return run(operator, backend, **given, is_causal=True)

    both()
    peak = peak_memory(both)
    # Eager has 64 rows of both heads at a time, in several steps: half of what two matrices take.
    most = MATRIX / (1 if backend == "eager" else 8)
    assert peak.extra < most, f"{peak.extra / 2**20:.1f} MiB ({peak.how})"
