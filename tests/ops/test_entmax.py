"""What is particular to entmax: its limits, its support, `alpha`; its cases are in test_cases.py."""

import functools

import pytest
import torch

import heads_kernels as hk
from heads_kernels.ops.attention import attention_op
from heads_kernels.testing import ENTMAX, check
from tests.ops.calls import NAMES, call, parsed
from tests.support.alike import assert_alike

B, H, T, S, D, DV = 2, 4, 7, 9, 5, 6


def operands(dtype=torch.float64, heads=H, requires_grad=False, sizes=(T, S, D, DV)):
    torch.manual_seed(0)
    t, s, d, dv = sizes
    shapes = (B, H, t, d), (B, heads, s, d), (B, heads, s, dv)
    return [torch.randn(x, dtype=dtype).mul(1.5).requires_grad_(requires_grad) for x in shapes]


@pytest.fixture(params=["cpu", "eager"])
def attend(request):
    """The operator on a backend that serves float64."""
    return functools.partial(hk.entmax_attention, backend=request.param)


def sparsemax(scores):
    """By sorting (Martins and Astudillo 2016)."""
    ordered = scores.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    counts = torch.arange(1, scores.shape[-1] + 1)
    size = (ordered * counts > sums).sum(-1, keepdim=True)
    return (scores - sums.gather(-1, size - 1) / size).clamp(min=0)


def scores_of(query, key):
    return query @ key.repeat_interleave(H // key.shape[1], 1).mT * D**-0.5


def test_alpha_2_is_sparsemax_and_near_1_softmax(attend):
    query, key, value = operands()
    p = scores_of(query, key)
    torch.testing.assert_close(attend(query, key, value, alpha=2), sparsemax(p) @ value)
    near = attend(query, key, value, alpha=1 + 1e-12)
    torch.testing.assert_close(near, p.softmax(-1) @ value)


def test_gradient_of_alpha_is_exact_near_1(attend):
    """In the limit it is `p / 2 * (sum p ln^2 p - ln^2 p)`, which the paper's form loses to cancellation."""
    query, key, value = operands()
    alpha = torch.full((H,), 1 + 1e-9, dtype=torch.float64, requires_grad=True)
    out = attend(query, key, value, alpha=alpha)
    out.sum().backward()
    p = scores_of(query, key).softmax(-1)
    squares = p.log().square()
    change = p / 2 * ((p * squares).sum(-1, keepdim=True) - squares)
    expected = (change @ value).sum((0, 2, 3))
    torch.testing.assert_close(alpha.grad, expected)


@pytest.mark.parametrize("backend", NAMES)
def test_values_outside_of_the_support_reach_nothing(backend):
    query, key, value = operands(torch.float32)
    attend = functools.partial(call, "entmax_attention", backend)
    p = sparsemax(scores_of(query, key))
    unused = (p == 0).all(2)  # [B, H, S]
    assert unused.any()
    clean = [t.clone().requires_grad_() for t in (query, key, value)]
    poisoned = value.masked_fill(unused[..., None], float("nan"))
    dirty = [t.clone().requires_grad_() for t in (query, key, poisoned)]
    outs = [
        attend(query=query, key=key, value=value, alpha=2.0) for query, key, value in (clean, dirty)
    ]
    assert torch.equal(*outs)
    for out in outs:
        out.square().sum().backward()
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.slow
def test_opcheck(attend):
    query, key, value = operands()
    given = parsed("entmax_attention", query, key, value, is_causal=True, alpha=1.5)
    torch.library.opcheck(attention_op, (*given, True, attend.keywords["backend"]))


@pytest.mark.parametrize(
    ("alpha", "kind"),
    [
        (1.0, ValueError),
        (0.5, ValueError),
        (2.1, ValueError),
        (10**400, ValueError),
        pytest.param(-(10**5000), ValueError, id="more than Python prints"),
        (float("nan"), ValueError),
        ("1.5", TypeError),
        (None, TypeError),
        (torch.full((H + 1,), 1.5), ValueError),
        (torch.full((H,), 1.0), ValueError),
        (torch.full((H,), float("nan")), ValueError),
        (torch.full((H,), 2), TypeError),
    ],
)
def test_bad_alpha(attend, alpha, kind):
    with pytest.raises(kind, match="alpha"):
        attend(*operands(), alpha=alpha)


def test_distributed_tensors_are_refused(attend):
    query, key, value = operands()
    DTensor = type("DTensor", (torch.Tensor,), {})
    gate = torch.ones(H, dtype=torch.float64).as_subclass(DTensor)
    with pytest.raises(ValueError, match="gate is a DTensor"):
        attend(query, key, value, gate=gate)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_other_backends_are_refused_by_name(backend):
    with pytest.raises(ValueError, match=backend):
        hk.entmax_attention(*operands(), backend=backend)
    assert hk.explain(hk.entmax_attention, *operands()).backend == "cpu"


def test_compiled(attend):
    """One graph, with the gradient of alpha."""
    query, key, value = operands(torch.float32, requires_grad=True)
    logits = torch.zeros(H, requires_grad=True)

    def run(query, key, value, logits):
        return attend(query, key, value, is_causal=True, alpha=1 + logits.sigmoid())

    leaves = query, key, value, logits
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_alike(compiled(*leaves), run(*leaves))
    grads = [torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (compiled, run)]
    assert_alike(*grads)


@pytest.mark.parametrize("case", ENTMAX, ids=str)
def test_every_level(case):
    cpu = pytest.importorskip("heads_kernels._cpu")
    before = cpu.level()
    try:
        for level in cpu.available_levels():
            cpu.use_level(level)
            for dtype in (torch.float32, torch.bfloat16):
                report = check(case, dtype, "cpu")
                assert report.ok, f"{level}: {report}"
    finally:
        cpu.use_level(before)
