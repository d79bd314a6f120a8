"""Bad input raises before anything runs and names the argument, what it was and what would do."""

from __future__ import annotations

import math

import pytest
import torch

import heads_kernels as hk
from heads_kernels.ops import gate as gates
from heads_kernels.ops.library import load
from heads_kernels.ops.operator import Results
from heads_kernels.problem import Problem
from tests.ops.bad_calls import (
    BOTH,
    COLLABORATIVE,
    GATED,
    B,
    Bad,
    D,
    Dv,
    H,
    Hk,
    S,
    T,
    f32,
    good,
    refused,
)
from tests.ops.calls import OPERATORS, TABLES, serve

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
            " pass [..., Hv, S, Dv], H a multiple of Hv (grouped value heads)."
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
        "content_bias is given without mixing; pass mixing [H, Ds] too, or leave it out.",
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
        "query has layout sparse_coo; pass a dense tensor; for packed sequences use hk.Mask.",
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
