"""Adaptively sparse attention against an independent oracle: bisection of the threshold in float64."""

import functools

import pytest
import torch

import heads_kernels as hk
from heads_kernels import OffsetBias
from heads_kernels.ops.entmax_attention import BACKENDS
from heads_kernels.testing import ENTMAX, Inputs, check, compare, find, reference
from tests.ops.calls import call
from tests.support.alike import assert_alike

B, H, T, S, D, DV = 2, 4, 7, 9, 5, 6
ALPHAS = (1.02, 1.3, 1.5, 1.9, 2.0)


def operands(dtype=torch.float64, heads=H, requires_grad=False, sizes=(T, S, D, DV)):
    torch.manual_seed(0)
    t, s, d, dv = sizes
    shapes = (B, H, t, d), (B, heads, s, d), (B, heads, s, dv)
    return [torch.randn(x, dtype=dtype).mul(1.5).requires_grad_(requires_grad) for x in shapes]


@pytest.fixture(params=["cpu", "eager"])
def attend(request):
    """The operator on a backend that serves float64."""
    return functools.partial(hk.entmax_attention, backend=request.param)


def bisected(scores, alpha):
    """entmax of rows by bisection: `scores` `[..., H, T, S]` with -inf where hidden, `alpha` `[H]`."""
    order = (alpha.double() - 1)[:, None, None]
    z = order * scores.double()
    low = z.amax(-1, keepdim=True) - 1
    high = low + 1
    for _ in range(200):
        middle = (low + high) / 2
        above = (z - middle).clamp(min=0).pow(1 / order).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    p = (z - low).clamp(min=0).pow(1 / order)
    return (p / p.sum(-1, keepdim=True)).nan_to_num(0.0)


def sparsemax(scores):
    """By sorting (Martins and Astudillo 2016)."""
    ordered = scores.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    counts = torch.arange(1, scores.shape[-1] + 1)
    size = (ordered * counts > sums).sum(-1, keepdim=True)
    return (scores - sums.gather(-1, size - 1) / size).clamp(min=0)


def scores_of(query, key):
    return query @ key.repeat_interleave(H // key.shape[1], 1).mT * D**-0.5


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("masked", [False, True])
def test_against_bisection(attend, alpha, masked):
    query, key, value = operands()
    visible = torch.rand(B, H, T, S) < 0.5 if masked else torch.ones(B, H, T, S, dtype=torch.bool)
    visible[0, 0, 0] = not masked
    out = attend(query, key, value, visible, alpha=alpha)
    scores = scores_of(query, key).masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(out, bisected(scores, torch.full((H,), alpha)) @ value)
    if masked:
        assert not out[0, 0, 0].any()


def test_alpha_2_is_sparsemax_and_near_1_softmax(attend):
    query, key, value = operands()
    p = scores_of(query, key)
    torch.testing.assert_close(attend(query, key, value, alpha=2), sparsemax(p) @ value)
    near = attend(query, key, value, alpha=1 + 1e-12)
    torch.testing.assert_close(near, p.softmax(-1) @ value)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients(attend, alpha):
    t, s = 5, 6  # gradcheck calls the operator twice for each number of its inputs
    query, key, value = operands(heads=2, requires_grad=True, sizes=(t, s, 3, 2))
    alphas = torch.full((H,), alpha - 0.005, dtype=torch.float64, requires_grad=True)
    gate = torch.tensor([0.5, 0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    bias = torch.randn(H, t, s, dtype=torch.float64, requires_grad=True)

    def call(query, key, value, alphas, gate, bias):
        return attend(query, key, value, is_causal=True, alpha=alphas, gate=gate, bias=bias)

    assert torch.autograd.gradcheck(call, (query, key, value, alphas, gate, bias))


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


def test_offset_bias_softcap_and_dropout(attend):
    query, key, value = operands()
    table = OffsetBias.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64))
    dense = table.table(T, S)
    out = attend(query, key, value, bias=table, softcap=2.0)
    i, j = torch.arange(T)[:, None], torch.arange(S)
    scores = 2 * torch.tanh(scores_of(query, key) / 2) + dense[:, j - i + T - 1]
    torch.testing.assert_close(out, bisected(scores, torch.full((H,), 1.5)) @ value)
    torch.manual_seed(3)
    dropped = attend(query, key, value, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(dropped, attend(query, key, value, dropout_p=0.5))
    assert not torch.equal(dropped, attend(query, key, value))


def test_hidden_nan_reaches_nothing(attend):
    query, key, value = operands()
    visible = torch.ones(S, dtype=torch.bool)
    visible[3] = False
    clean = [t.clone().requires_grad_() for t in (query, key, value)]
    dirty = [t.clone() for t in (query, key, value)]
    dirty[1][:, :, 3] = dirty[2][:, :, 3] = float("nan")
    dirty = [t.requires_grad_() for t in dirty]
    outs = [attend(*each, visible.expand(T, S)) for each in (clean, dirty)]
    assert torch.equal(*outs)
    for out in outs:
        out.sum().backward()
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("backend", [row.name for row in BACKENDS])
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


def test_closed_heads(attend):
    query, key, value = operands()
    gate = torch.tensor([1.0, 0.0, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    out = attend(query, key, value, gate=gate)
    assert not out[:, [1, 3]].any()
    out.sum().backward()
    opened = attend(query, key, value)
    torch.testing.assert_close(gate.grad, opened.sum((0, 2, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(attend, dtype):
    """By the accuracy rule: some ISA levels round the probabilities to bfloat16 as well."""
    query, key, value = (t.to(dtype) for t in operands())
    tensors = {"query": query, "key": key, "value": value, "alpha": torch.full((H,), 1.5)}
    inputs = Inputs("entmax_attention", tensors, {}, torch.randn(B, H, T, DV).to(dtype))
    report = compare(reference(inputs), attend.keywords["backend"])
    assert report.ok, report


@pytest.mark.slow
def test_opcheck(attend):
    query, key, value = operands()
    arguments = (
        *(query, key, value, None, None, None, torch.full((H,), 1.5, dtype=torch.float64)),
        *hk.Mask(causal=True).intervals(B, H, T, S, device=query.device),
        *(D**-0.5, 0.0, None, "identity", 0.0, True, attend.keywords["backend"]),
    )
    torch.library.opcheck(torch.ops.heads_kernels.entmax_attention.default, arguments)


def test_empty_keys_and_batches(attend):
    query, key, value = operands()
    assert not attend(query, key[:, :, :0], value[:, :, :0]).any()
    assert attend(query[:0], key[:0], value[:0]).shape == (0, H, T, DV)


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


def test_batch_dimensions(attend):
    query, key, value = (t.unflatten(0, (1, B)) for t in operands())
    assert torch.equal(attend(query, key, value)[0], attend(query[0], key[0], value[0]))


@pytest.mark.parametrize("name", ["closed_batch_heads", "bias_shared", "length_1000"])
def test_bits_do_not_depend_on_threads(name):
    inputs = find("entmax_attention", name).make(torch.float32)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            out, grads = inputs.backward("cpu")
            results.append([out, *grads.values()])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


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
