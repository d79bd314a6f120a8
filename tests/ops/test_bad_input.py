"""Bad input raises before anything runs and names the argument, what it was and what would do."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels import checks
from heads_kernels.mask import UNBOUNDED
from heads_kernels.ops import gate as gates
from heads_kernels.ops.attention_statistics import SIGNATURE
from heads_kernels.ops.library import load
from heads_kernels.ops.operator import Results
from heads_kernels.problem import Problem
from tests.ops.calls import DIFFERENTIABLE, EVERY, OPERATORS, TABLES, call, serve, tensors

B, H, Hk, T, S, D, Dv = 2, 4, 2, 5, 7, 8, 6
GATED, COLLABORATIVE = "gated_attention", "collaborative_attention"
BOTH = (GATED, COLLABORATIVE)
Bad = dict[str, Any]


def f32(*shape: int) -> Tensor:
    return torch.zeros(shape)


def good(operator: str) -> dict[str, Any]:
    """Arguments that are served, made anew."""
    return dict(tensors(operator, dtype=torch.float32))


def refused(operator: str, kind: type[Exception], message: str, **bad: Any) -> None:
    """The call raises `kind` with a text that starts with `message`, and so does `explain`."""
    arguments = {**good(operator), **bad}
    run = getattr(hk, operator)
    with pytest.raises(kind, match="^" + re.escape(message)):
        run(**arguments)
    with pytest.raises(kind, match="^" + re.escape(message)):
        hk.explain(run, **arguments)


# name -> (operator, what is wrong, exception, message)
SHAPES: dict[str, tuple[str, Bad, str]] = {
    "query rank": (
        GATED,
        {"query": f32(T, D)},
        "query has 2 dimensions (shape [5, 8]); pass [..., H, T, D].",
    ),
    "shared query rank": (
        COLLABORATIVE,
        {"query": f32(D)},
        "query has 1 dimensions (shape [8]); pass [..., T, Ds].",
    ),
    "key rank": (
        GATED,
        {"key": f32(S, D)},
        "key has 2 dimensions (shape [7, 8]); pass [..., Hk, S, D].",
    ),
    "shared key rank": (
        COLLABORATIVE,
        {"key": f32(D)},
        "key has 1 dimensions (shape [8]); pass [..., S, Ds].",
    ),
    "value rank": (
        GATED,
        {"value": f32(S, Dv)},
        "value has 2 dimensions (shape [7, 6]); pass [..., Hk, S, Dv].",
    ),
    "key batch": (
        GATED,
        {"key": f32(3, Hk, S, D)},
        "query, key, value have batch dimensions [2], [3], [2]; make every size equal, or 1.",
    ),
    "shared key batch": (
        COLLABORATIVE,
        {"key": f32(3, S, D)},
        "query, key, value have batch dimensions [2], [3], [2]; make every size equal, or 1.",
    ),
    "key width": (
        GATED,
        {"key": f32(B, Hk, S, 9)},
        "key has width 9, but query has width 8; make D equal.",
    ),
    "shared key width": (
        COLLABORATIVE,
        {"key": f32(B, S, 9)},
        "key has width 9, but query has width 8; make Ds equal.",
    ),
    "heads": (
        GATED,
        {"key": f32(B, 3, S, D)},
        "key has 3 heads, but query has 4; H must be a multiple of Hk (grouped-query heads).",
    ),
    "no key heads": (
        GATED,
        {"key": f32(B, 0, S, D)},
        "key has 0 heads, but query has 4; H must be a multiple of Hk (grouped-query heads).",
    ),
    "value keys": (
        GATED,
        {"value": f32(B, Hk, 6, Dv)},
        "value has shape [2, 2, 6, 6], but key is [2, 2, 7, 8]; make heads and S of value",
    ),
    "value heads": (
        COLLABORATIVE,
        {"value": f32(B, 3, S, Dv)},
        (
            "value has shape [2, 3, 7, 6], but mixing has 4 heads and key has S = 7;"
            " pass [..., H, S, Dv]."
        ),
    ),
    "mixing rank": (
        COLLABORATIVE,
        {"mixing": f32(D)},
        "mixing has shape [8], but query has width 8; pass [H, Ds].",
    ),
    "mixing width": (
        COLLABORATIVE,
        {"mixing": f32(H, 9)},
        "mixing has shape [4, 9], but query has width 8; pass [H, Ds].",
    ),
    "content_bias": (
        COLLABORATIVE,
        {"content_bias": f32(B, S)},
        "content_bias has shape [2, 7]; pass [B, H, S] = [2, 4, 7].",
    ),
    "content_bias without mixing": (
        "attention_statistics",
        {"content_bias": f32(B, H, S)},
        "content_bias comes without mixing; pass mixing [H, Ds] too, or leave it out.",
    ),
    "statistics width": (
        "attention_statistics",
        {"key": f32(B, Hk, S, 9)},
        "key has width 9, but query has width 8; make D equal.",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    operator, bad, message = SHAPES[name]
    refused(operator, ValueError, message, **bad)


SHARED: dict[str, tuple[Bad, type[Exception], str]] = {
    "gate rank 5": (
        {"gate": f32(1, 1, 1, 1, 1)},
        ValueError,
        "gate has 5 dimensions; pass [H], [..., H], [..., H, T] or [..., H, T, Dv].",
    ),
    "gate rank 0": (
        {"gate": torch.tensor(1.0)},
        ValueError,
        "gate has 0 dimensions; pass [H], [..., H], [..., H, T] or [..., H, T, Dv].",
    ),
    "gate heads": (
        {"gate": f32(3)},
        ValueError,
        "gate has shape [3]; a gate of 1 dimensions is [H] = [4], or 1 where it broadcasts.",
    ),
    "gate rows": (
        {"gate": f32(B, H, S)},
        ValueError,
        "gate has shape [2, 4, 7]; a gate of 3 dimensions is [B, H, T] = [2, 4, 5], or 1 where it",
    ),
    "gate integers": (
        {"gate": torch.ones(H, dtype=torch.int64)},
        TypeError,
        "gate has dtype torch.int64; pass float32, bfloat16, float16 or float64.",
    ),
    "gate device": (
        {"gate": torch.ones(H, device="meta")},
        ValueError,
        "gate is on meta, but query is on cpu; move it there.",
    ),
    "gate list": (
        {"gate": [1.0] * H},
        TypeError,
        "gate is a list; pass a torch.Tensor.",
    ),
    "gate_activation": (
        {"gate_activation": "relu"},
        ValueError,
        "gate_activation is 'relu'; use one of 'identity', 'sigmoid', 'softplus'.",
    ),
    "dropout_p of 1": (
        {"dropout_p": 1.0},
        ValueError,
        "dropout_p is 1.0; pass a probability in [0, 1).",
    ),
    "dropout_p below 0": (
        {"dropout_p": -0.1},
        ValueError,
        "dropout_p is -0.1; pass a probability in [0, 1).",
    ),
    "dropout_p nan": (
        {"dropout_p": float("nan")},
        ValueError,
        "dropout_p is nan; pass a probability in [0, 1).",
    ),
    "dropout_p string": (
        {"dropout_p": "0.1"},
        TypeError,
        "dropout_p is a str; pass a float: a probability in [0, 1).",
    ),
    "activation without a gate": (
        {"gate_activation": "sigmoid"},
        ValueError,
        "gate_activation is 'sigmoid', but gate is None; pass the logits as gate.",
    ),
    "is_causal string": (
        {"is_causal": "no"},
        TypeError,
        "is_causal is a str; pass True or False.",
    ),
    "closed_grad number": (
        {"closed_grad": 1},
        TypeError,
        "closed_grad is a int; pass True or False.",
    ),
    "sparse": (
        {"query": torch.zeros(B, H, T, D).to_sparse()},
        ValueError,
        "query has layout sparse_coo; pass a dense tensor; packed sequences go with hk.Mask.",
    ),
    "sparse gate": (
        {"gate": torch.ones(H).to_sparse()},
        ValueError,
        "gate has layout sparse_coo; pass a dense tensor.",
    ),
    "csr gate": (
        {"gate": torch.ones(B, H).to_sparse_csr()},
        ValueError,
        "gate has layout sparse_csr; pass a dense tensor.",
    ),
    "mkldnn gate": (
        {"gate": torch.ones(B, H).to_mkldnn()},
        ValueError,
        "gate has layout _mkldnn; pass a dense tensor.",
    ),
    "nested gate": (
        {"gate": torch.nested.nested_tensor([torch.ones(H)] * B)},
        ValueError,
        "gate has layout nested; pass a dense tensor.",
    ),
    "scale tensor": (
        {"scale": torch.tensor(1.0)},
        TypeError,
        "scale is a tensor; pass a float (scale.item()), or None.",
    ),
    "scale nan": (
        {"scale": float("nan")},
        ValueError,
        "scale is nan; pass a finite float of at most 1.7e+38: scores are torch.float32.",
    ),
    "scale infinite": (
        {"scale": -math.inf},
        ValueError,
        "scale is -inf; pass a finite float of at most 1.7e+38",
    ),
    "scale beyond float32": (
        {"scale": 1e39},
        ValueError,
        "scale is 1e+39; pass a finite float of at most 1.7e+38: scores are torch.float32.",
    ),
    "scale beyond every float": (
        {"scale": 10**400},
        ValueError,
        "scale is about 2**1328; pass a finite float of at most 1.7e+38",
    ),
    "scale beyond what Python prints": (
        {"scale": -(10**5000)},
        ValueError,
        "scale is about -2**16609; pass a finite float",
    ),
    "backend": (
        {"backend": "flash"},
        ValueError,
        "backend is 'flash'; use one of ",
    ),
    "query list": (
        {"query": [1.0]},
        TypeError,
        "query is a list; pass a torch.Tensor.",
    ),
    "value device": (
        {"value": torch.zeros(B, H, S, Dv, device="meta")},
        ValueError,
        "value is on meta, but query is on cpu; move them to one device.",
    ),
    "value dtype": (
        {"value": torch.zeros(B, H, S, Dv, dtype=torch.bfloat16)},
        TypeError,
        "value has dtype torch.bfloat16, but query has torch.float32; cast them to one dtype.",
    ),
    "integers": (
        {"key": torch.zeros(B, H, S, D, dtype=torch.int32)},
        TypeError,
        "key has dtype torch.int32; pass float32, bfloat16, float16 or float64.",
    ),
    "complex": (
        {"query": torch.zeros(B, H, T, D, dtype=torch.complex64)},
        TypeError,
        "query has dtype torch.complex64; pass float32, bfloat16, float16 or float64.",
    ),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("operator", BOTH)
def test_both_operators(operator: str, name: str) -> None:
    bad, kind, message = SHARED[name]
    refused(operator, kind, message, **bad)


COMPANIONS: dict[str, tuple[Bad, type[Exception], str]] = {
    "mixing integers": (
        {"mixing": torch.ones(H, D, dtype=torch.int64)},
        TypeError,
        "mixing has dtype torch.int64; pass float32, bfloat16, float16 or float64.",
    ),
    "mixing device": (
        {"mixing": torch.ones(H, D, device="meta")},
        ValueError,
        "mixing is on meta, but query is on cpu; move it there.",
    ),
    "mixing list": (
        {"mixing": [[1.0]]},
        TypeError,
        "mixing is a list; pass a torch.Tensor.",
    ),
    "sparse mixing": (
        {"mixing": torch.ones(H, D).to_sparse_csr()},
        ValueError,
        "mixing has layout sparse_csr; pass a dense tensor.",
    ),
    "sparse content_bias": (
        {"content_bias": torch.ones(B, H, S).to_sparse()},
        ValueError,
        "content_bias has layout sparse_coo; pass a dense tensor.",
    ),
    "content_bias device": (
        {"content_bias": torch.ones(B, H, S, device="meta")},
        ValueError,
        "content_bias is on meta, but query is on cpu; move it there.",
    ),
    "content_bias bool": (
        {"content_bias": torch.ones(B, H, S, dtype=torch.bool)},
        TypeError,
        "content_bias has dtype torch.bool; pass float32, bfloat16, float16 or float64.",
    ),
}


@pytest.mark.parametrize("name", COMPANIONS)
def test_mixing_and_content_bias(name: str) -> None:
    bad, kind, message = COMPANIONS[name]
    refused(COLLABORATIVE, kind, message, **bad)


MASKS: dict[str, tuple[Any, type[Exception], str]] = {
    "too long": (
        lambda: hk.Mask(key_lengths=[3, 8]),
        ValueError,
        "key_lengths is [3, 8]; lengths go from 0 to S = 7.",
    ),
    "negative": (
        lambda: hk.Mask(query_lengths=torch.tensor([-1, 5])),
        ValueError,
        "query_lengths is [-1, 5]; lengths go from 0 to T = 5.",
    ),
    "prefix too long": (
        lambda: hk.Mask(causal=True, prefix_lengths=[9, 1]),
        ValueError,
        "prefix_lengths is [9, 1]; lengths go from 0 to S = 7.",
    ),
    "count of lengths": (
        lambda: hk.Mask(key_lengths=[1, 2, 3]),
        ValueError,
        "key_lengths holds 3 lengths, but B is 2; pass 2, or 1 for all.",
    ),
    "size of key_mask": (
        lambda: hk.Mask(key_mask=torch.ones(B, T, dtype=torch.bool)),
        ValueError,
        "key_mask has shape [2, 5], but B is 2 and S is 7; pass [2 or 1, 7].",
    ),
    "float mask of another shape": (
        lambda: f32(T, S + 1),
        ValueError,
        "attn_mask has shape [5, 8], but scores are",
    ),
    "mask of numbers": (
        lambda: torch.ones(T, S, dtype=torch.int64),
        TypeError,
        "attn_mask has dtype torch.int64; pass a hk.Mask, or a bool tensor with True = may",
    ),
    "padding in two dimensions": (
        lambda: torch.ones(B, S, dtype=torch.bool),
        ValueError,
        (
            "attn_mask has shape [2, 7], but [B, H, T, S] is [2, 4, 5, 7]; 2-D is [T, S]; a"
            " padding mask [B, S] goes as hk.Mask(key_mask=...)."
        ),
    ),
    "five dimensions": (
        lambda: torch.ones(1, 1, 1, T, S, dtype=torch.bool),
        ValueError,
        "attn_mask has shape [1, 1, 1, 5, 7]; pass a hk.Mask, or a bool tensor",
    ),
    "sparse": (
        lambda: torch.ones(T, S, dtype=torch.bool).to_sparse(),
        ValueError,
        "attn_mask has layout sparse_coo; pass a hk.Mask, or a bool tensor with True = may attend (a float",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(S, dtype=torch.bool)] * T),
        ValueError,
        "attn_mask has layout nested; pass a hk.Mask, or a bool tensor with True = may attend (a float",
    ),
    "string": (
        lambda: "causal",
        TypeError,
        "attn_mask is a str; pass a hk.Mask, or a bool tensor with True = may attend (a float",
    ),
    "device": (
        lambda: torch.ones(T, S, dtype=torch.bool, device="meta"),
        ValueError,
        "attn_mask is on meta, but query is on cpu; move it there once, before the call.",
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("operator", [*BOTH, "attention_statistics"])
def test_masks(operator: str, name: str) -> None:
    make, kind, message = MASKS[name]
    refused(operator, kind, message, attn_mask=make())


def test_mask_arguments() -> None:
    """What a mask can tell before it meets a call."""
    with pytest.raises(ValueError, match=r"causal is 'diagonal'; use False, True .*lower_right"):
        hk.Mask(causal="diagonal")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"key_mask has dtype torch.int64; pass a bool tensor \[B, S\]"
    ):
        hk.Mask(key_mask=torch.ones(B, S, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"key_lengths has dtype torch.float32; pass an integer"):
        hk.Mask(key_lengths=torch.ones(B))
    with pytest.raises(ValueError, match=r"window is \(1, -2\); pass \(left, right\)"):
        hk.Mask(window=(1, -2))


EXCLUDED: dict[str, tuple[Any, type[Exception], str]] = {
    "list": ([0], TypeError, "exclude_keys is a list; pass bool [S] = [7] or [B, S] = [2, 7], "),
    "dtype": (f32(S), TypeError, "exclude_keys has dtype torch.float32; pass bool [S] = [7] or "),
    "sparse": (
        torch.ones(S, dtype=torch.bool).to_sparse(),
        ValueError,
        "exclude_keys has layout sparse_coo; pass a dense tensor.",
    ),
    "size": (
        torch.ones(T, dtype=torch.bool),
        ValueError,
        "exclude_keys has shape [5]; pass bool [S] = [7] or [B, S] = [2, 7], ",
    ),
    "device": (
        torch.ones(S, dtype=torch.bool, device="meta"),
        ValueError,
        "exclude_keys is on meta; move it to cpu.",
    ),
}


@pytest.mark.parametrize("name", EXCLUDED)
def test_exclude_keys(name: str) -> None:
    exclude, kind, message = EXCLUDED[name]
    with pytest.raises(kind, match="^" + re.escape(message)):
        hk.attention_statistics(**good("attention_statistics"), exclude_keys=exclude)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scale_is_judged_in_the_compute_dtype(dtype: torch.dtype) -> None:
    query, key, value = torch.zeros(3, 1, 1, 4, 8, dtype=dtype)
    if dtype == torch.float64:
        assert hk.gated_attention(query, key, value, scale=1e39).isfinite().all()
    else:
        with pytest.raises(ValueError, match=r"^scale is 1e\+39; .*torch\.float32"):
            hk.gated_attention(query, key, value, scale=1e39)
    assert hk.gated_attention(query, key, value, scale=1.7e38).isfinite().all()


def test_an_unknown_activation_is_no_identity() -> None:
    """Whoever gets past the checks of a call: eager, the gradient of a gate."""
    gate = torch.ones(H)
    for run in (
        lambda: gates.activate(gate, "relu"),
        lambda: gates.gate_gradient(torch.ones(B, H, T), gate, "relu", True),
    ):
        with pytest.raises(
            ValueError, match=r"^gate_activation is 'relu'; use one of 'identity', "
        ):
            run()


@pytest.mark.parametrize("rank", [1, 3, 4])
@pytest.mark.parametrize("backend", [row.name for row in TABLES[GATED]])
def test_no_backend_takes_an_unknown_activation(backend: str, rank: int) -> None:
    """Its own code: behind what checks the call."""
    sizes = (H,) if rank == 1 else (B, H, T, Dv)[:rank]
    problem = Problem.gated(**good(GATED), gate=torch.ones(sizes))
    serve(GATED, backend, **good(GATED))
    operator = OPERATORS[GATED]
    packed = dict(zip(operator.types, operator.pack(problem, None), strict=True))
    made = operator.unpack([*{**packed, "gate_activation": "relu"}.values()])
    results = Results(torch.empty(B, H, T, Dv), torch.empty(0), torch.empty(0))
    with pytest.raises(Exception, match="gate_activation"):
        load(operator.backends, backend).forward(made, results)


# ---------------------------------------------------------------------- sizes that int32 can't hold
def long(operator: str, **sizes: int) -> Bad:
    """Arguments of these sizes, by stride 0."""
    wanted = {"B": 1, "H": 2, "T": 1, "S": 1} | sizes
    one = tensors(operator, **dict.fromkeys(wanted, 1), Hk=1, D=8, dtype=torch.float32)
    b, h, t, s = wanted.values()
    shapes = {
        "gated_attention": {"query": (b, h, t, 8), "key": (b, h, s, 8), "value": (b, h, s, 6)},
        "attention_statistics": {"query": (b, h, t, 8), "key": (b, h, s, 8)},
        "collaborative_attention": {"query": (b, t, 8), "key": (b, s, 8), "value": (b, h, s, 6),
            "mixing": (h, 8), "content_bias": (b, h, s)},
    }[operator]  # fmt: skip
    return {name: one[name].expand(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("operator", [*BOTH, "attention_statistics"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"S": 2**31 - 1}, "key has S = 2147483647; split the call: S is at most 1073740800."),
        ({"S": 2**32 + 5}, "key has S = 4294967301; split the call: S is at most 1073740800."),
        ({"T": 2**30 + 256}, "query has T = 1073742080; split the call: T is at most 1073740800."),
        ({"T": checks.MAX_LENGTH + 1}, "query has T = 1073740801; "),
        ({"B": 2**31}, "query has B = 2147483648; split the call: B is at most 2147483647."),
        ({"H": 2**31}, "query has H = 2147483648; split the call: H is at most 2147483647."),
    ],
)
def test_sizes_that_int32_can_not_hold(operator: str, sizes: dict[str, int], message: str) -> None:
    """Before a mask is worked out, which would take memory."""
    mask = hk.Mask(causal="lower_right", key_lengths=[1], query_lengths=[1])
    arguments = {**long(operator, **sizes), "attn_mask": mask}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        getattr(hk, operator)(**arguments)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        hk.explain(operator, **arguments)


def test_the_longest_call_that_is_served() -> None:
    """Its band limits and its last rows stay within int32; nothing is computed here."""
    most = checks.MAX_LENGTH
    windows = hk.Mask(causal="lower_right", window=(UNBOUNDED - 1, UNBOUNDED - 1))
    for T, S in ((most, 1), (1, most)):
        problem = Problem.gated(**long(GATED, T=T, S=S), attn_mask=windows)
        lo, hi = problem.intervals.band_lo, problem.intervals.band_hi
        assert -UNBOUNDED <= lo <= hi <= UNBOUNDED
        assert most + 1024 + UNBOUNDED <= 2**31
        assert problem.intervals.band_hi == S - T + 1


@pytest.mark.parametrize("operator", [*BOTH, "attention_statistics"])
def test_the_op_itself_refuses_them(operator: str) -> None:
    """Where sizes are symbolic a `Problem` can not judge them."""
    arguments = long(operator, S=2**31)
    signature = OPERATORS.get(operator, SIGNATURE)
    values = {**dict.fromkeys(signature.types), **arguments, "band_lo": -9, "band_hi": 9}
    values |= {"scale": 1.0, "softcap": 0.0}
    if operator == "attention_statistics":
        given = [*values.values(), None]
    else:
        values |= {"dropout_p": 0.0, "gate_activation": "identity"}
        given = [*values.values(), False]
    for backend in ("cpu", "eager"):
        with pytest.raises(ValueError, match=r"^key (has S = 2147483648|is too long)"):
            getattr(torch.ops.heads_kernels, operator)(*given, backend)


def test_explain_refuses_as_the_call_does() -> None:
    arguments = good("gated_attention")
    with pytest.raises(TypeError, match="unexpected keyword argument 'gates'"):
        hk.explain("gated_attention", **arguments, gates=1)
    with pytest.raises(ValueError, match="operator is a Tensor; use one of 'gated_attention', "):
        hk.explain(*arguments.values())
    with pytest.raises(TypeError, match="exclude_keys is a str; pass bool"):
        hk.explain("attention_statistics", **good("attention_statistics"), exclude_keys="all")


def test_explain_of_an_unknown_operator() -> None:
    with pytest.raises(
        ValueError, match=r"operator is 'attention'; use one of 'gated_attention', "
    ):
        hk.explain("attention")


# ---------------------------------------------------------------------- refusals of a backend
@pytest.mark.parametrize(("operator", "backend"), EVERY)
def test_an_explicit_backend_never_falls_back(operator: str, backend: str) -> None:
    """Dense masks, strided rows: served, or refused with the reasons that `explain` gives."""
    strided = {
        name: torch.stack([t, t], -1)[..., 0] if name in ("query", "key", "value") else t
        for name, t in good(operator).items()
    }
    for arguments in ({**good(operator), "attn_mask": torch.rand(H, T, S) > 0.5}, strided):
        run = getattr(hk, operator)
        choice = hk.explain(run, **arguments, backend=backend)
        if choice.backend == backend:
            run(**arguments, backend=backend)
            continue
        (reasons,) = choice.refusals.values()
        assert reasons
        with pytest.raises(ValueError, match=f"^{operator}: ") as raised:
            run(**arguments, backend=backend)
        assert all(reason in str(raised.value) for reason in reasons)
        run(**arguments)  # somebody serves it


@pytest.mark.parametrize("operator", TABLES)
def test_no_fused_kernel_takes_strided_rows_silently(operator: str) -> None:
    """The reason names the tensor, its stride and what would do."""
    arguments = good(operator)
    arguments["key"] = torch.stack([arguments["key"]] * 2, -1)[..., 0]
    for name, reasons in hk.explain(operator, **arguments).refusals.items():
        if name == "cpu" and "not built" not in reasons[0]:
            assert reasons == ["key has stride 2 in its last dimension; it needs 1 (.contiguous())"]


# ---------------------------------------------------------------------- served, though it looks bad
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_empty_batch_and_no_keys_are_served(operator: str, backend: str) -> None:
    nobody = call(operator, backend, **tensors(operator, B=0, dtype=torch.float32))
    assert nobody.shape == (0, H, T, Dv)
    arguments = tensors(operator, S=0, dtype=torch.float32, grad=True)
    out = call(operator, backend, **arguments)
    assert torch.equal(out, torch.zeros(B, H, T, Dv))
    for name, grad in zip(
        arguments, torch.autograd.grad(out.sum(), list(arguments.values())), strict=True
    ):
        assert torch.equal(grad, torch.zeros_like(arguments[name])), name


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_nan_is_served_and_stays_where_it_is_seen(operator: str, backend: str) -> None:
    arguments = good(operator)
    arguments["value"][0, :, 4] = float("nan")
    out = call(operator, backend, **arguments, is_causal=True)
    assert out[0, :, 4:].isnan().all()
    assert out[0, :, :4].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("operator", BOTH)
def test_a_bool_mask_is_data_beside_inputs_that_want_gradients(operator: str) -> None:
    arguments = tensors(operator, dtype=torch.float32, grad=True)
    out = getattr(hk, operator)(**arguments, attn_mask=torch.rand(T, S) > 0.3)
    out.sum().backward()
    assert all(tensor.grad is not None for tensor in arguments.values())
