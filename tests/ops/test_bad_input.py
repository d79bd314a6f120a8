"""Bad input raises before anything runs, and so do sizes that int32 can't hold; the message names the argument, its
value and what would work. Also: what a backend refuses, and unusual calls that are served."""

import re
from functools import partial
from typing import Any

import pytest
import torch

import heads_kernels as hk
from heads_kernels import checks
from heads_kernels.call import Call
from heads_kernels.mask import UNBOUNDED, Intervals
from heads_kernels.mask.terms import QueryLengths
from heads_kernels.ops.attention import Results, attention_op
from heads_kernels.ops.library import load
from heads_kernels.ops.statistics import statistics_op
from tests.ops import calls
from tests.ops.calls import NAMES, B, D, Dv, H, S, T, parsed, serve, tensors

Hk = 2
Bad = dict[str, Any]
f32 = torch.zeros

GATED, COLLABORATIVE, STATISTICS, ENTMAX = (
    ("gated_attention",),
    ("collaborative_attention",),
    ("attention_statistics",),
    ("entmax_attention",),
)
BOTH = GATED + COLLABORATIVE
EVERY = BOTH + STATISTICS
#: Two batch dimensions.
SEVERAL: Bad = {"query": f32(2, 3, H, T, D), "key": f32(2, 3, H, S, D), "value": f32(2, 3, H, S, D)}
#: Operators, an argument that they refuse, and how the refusal starts: the name and what it was.
BAD: list[tuple[tuple[str, ...], type[Exception], Bad, str]] = [
    (GATED, ValueError, {"query": f32(T, D)}, "query has 2 dimensions (shape [5, 8])"),
    (COLLABORATIVE, ValueError, {"query": f32(D)}, "query has 1 dimensions (shape [8])"),
    (GATED, ValueError, {"key": f32(3, Hk, S, D)}, "query, key, value have batch dimensions [2], [3], [2]"),
    (GATED, ValueError, SEVERAL | {"key": f32(3, 3, H, S, D)},
        "query, key, value have batch dimensions [2, 3], [3, 3], [2, 3]; make every size equal"),
    (GATED, ValueError, SEVERAL | {"gate": f32(1, H)},
        "gate has 2 dimensions, but the call has 2 batch dimensions; pass [H], [..., H], [..., H, T] or"),
    (GATED, ValueError, SEVERAL | {"gate": f32(3, 2, H)},
        "gate has shape [3, 2, 4], but the batch dimensions of the call are [2, 3]; pass [2, 3, H]"),
    (GATED, ValueError, SEVERAL | {"attn_mask": f32(3, 2, H, T, S).bool()},
        "attn_mask has shape [3, 2, 4, 5, 7], but the batch dimensions of the call are [2, 3];"),
    (GATED, ValueError, {"key": f32(B, Hk, S, 9)}, "key has shape [2, 2, 7, 9]"),
    (COLLABORATIVE, ValueError, {"key": f32(B, S, 9)}, "key has shape [2, 7, 9]"),
    (GATED, ValueError, {"key": f32(B, 3, S, D)}, "key has 3 heads"),
    (GATED, ValueError, {"key": f32(B, 0, S, D)}, "key has 0 heads"),
    (GATED, ValueError, {"value": f32(B, Hk, 6, Dv)}, "value has shape [2, 2, 6, 6]"),
    (GATED, ValueError, {"value": f32(B, 1, S, Dv)}, "value has shape [2, 1, 7, 6]"),
    (COLLABORATIVE, ValueError, {"value": f32(B, 3, S, Dv)}, "value has 3 heads"),
    (COLLABORATIVE, ValueError, {"mixing": f32(D)}, "mixing has shape [8]"),
    (COLLABORATIVE, ValueError, {"mixing": f32(())}, "mixing has shape []"),
    (COLLABORATIVE, ValueError, {"mixing": f32(H, 9)}, "mixing has shape [4, 9]"),
    (COLLABORATIVE, ValueError, {"content_bias": f32(B, S)}, "content_bias has shape [2, 7]"),
    (STATISTICS, ValueError, {"content_bias": f32(B, H, S)}, "content_bias is given without mixing"),
    (BOTH, ValueError, {"gate": f32(1, 1, 1, 1, 1)}, "gate has shape [1, 1, 1, 1, 1]"),
    (BOTH, ValueError, {"gate": f32(3)}, "gate has shape [3]"),
    (BOTH, ValueError, {"gate": f32(B, H, S)}, "gate has shape [2, 4, 7]"),
    (BOTH, TypeError, {"gate": f32(H).long()}, "gate has dtype torch.int64"),
    (BOTH, ValueError, {"gate": f32(H).to("meta")}, "gate is on meta"),
    (BOTH, TypeError, {"gate": [1.0] * H}, "gate is a list"),
    (BOTH, ValueError, {"gate_activation": "relu"}, "gate_activation is 'relu'"),
    (BOTH, ValueError, {"dropout_p": 1.0}, "dropout_p is 1.0"),
    (BOTH, ValueError, {"dropout_p": -0.1}, "dropout_p is -0.1"),
    (BOTH, TypeError, {"dropout_p": "0.1"}, "dropout_p is a str"),
    (BOTH, ValueError, {"gate_activation": "sigmoid"}, "gate_activation is 'sigmoid'"),
    (BOTH, TypeError, {"is_causal": "no"}, "is_causal is a str"),
    (BOTH, TypeError, {"closed_grad": 1}, "closed_grad is a int"),
    (BOTH, TypeError, {"return_lse": "yes"}, "return_lse is a str"),
    (BOTH, ValueError, {"query": f32(B, H, T, D).to_sparse()}, "query has layout sparse_coo"),
    (BOTH, ValueError, {"gate": f32(H).to_sparse()}, "gate has layout sparse_coo"),
    (BOTH, ValueError, {"gate": torch.nested.nested_tensor([f32(H)] * B)}, "gate has layout nested"),
    (BOTH, TypeError, {"scale": torch.tensor(1.0)}, "scale is a Tensor"),
    (BOTH, ValueError, {"scale": float("nan")}, "scale is nan"),
    (BOTH, ValueError, {"scale": 1e39}, "scale is 1e+39"),
    (BOTH, ValueError, {"scale": -(10**5000)}, "scale is about -2**16609"),
    (BOTH, ValueError, {"backend": "flash"}, "backend is 'flash'"),
    (BOTH, TypeError, {"query": [1.0]}, "query is a list"),
    (BOTH, ValueError, {"value": f32(B, H, S, Dv).to("meta")}, "value is on meta"),
    (BOTH, TypeError, {"value": f32(B, H, S, Dv).bfloat16()}, "value has dtype torch.bfloat16"),
    (BOTH, TypeError, {"key": f32(B, H, S, D).int()}, "key has dtype torch.int32"),
    (BOTH, TypeError, {"query": f32(B, H, T, D).to(torch.complex64)}, "query has dtype torch.complex64"),
    (COLLABORATIVE, TypeError, {"mixing": f32(H, D).long()}, "mixing has dtype torch.int64"),
    (COLLABORATIVE, ValueError, {"mixing": f32(H, D).to("meta")}, "mixing is on meta"),
    (COLLABORATIVE, TypeError, {"mixing": [[1.0]]}, "mixing is a list"),
    (COLLABORATIVE, ValueError, {"content_bias": f32(B, H, S).to_sparse()}, "content_bias has layout sparse_coo"),
    (COLLABORATIVE, ValueError, {"content_bias": f32(B, H, S).to("meta")}, "content_bias is on meta"),
    (COLLABORATIVE, TypeError, {"content_bias": f32(B, H, S).bool()}, "content_bias has dtype torch.bool"),
    (EVERY, ValueError, {"bias": f32(T, S + 1)}, "bias has shape"),
    (EVERY, TypeError, {"bias": f32(T, S).int()}, "bias has dtype torch.int32"),
    (EVERY, TypeError, {"bias": [0.0]}, "bias is a list"),
    (EVERY, ValueError, {"bias": f32(T, S).to("meta")}, "bias is on meta"),
    (EVERY, ValueError, {"bias": f32(T, S).to_sparse()}, "bias has layout"),
    (EVERY, ValueError, {"bias": f32(T, S), "attn_mask": f32(T, S)}, "attn_mask is a float tensor"),
    (EVERY, ValueError, {"bias": hk.OffsetBias(torch.zeros(3, 5))}, "bias has 3 heads"),
    (EVERY, ValueError, {"sinks": torch.zeros(3)}, "sinks has shape [3]"),
    (EVERY, TypeError, {"sinks": 1.0}, "sinks is a float"),
    (EVERY, ValueError, {"softcap": -1.0}, "softcap is -1.0"),
    (EVERY, ValueError, {"softcap": float("nan")}, "softcap is nan"),
    (EVERY, TypeError, {"softcap": torch.ones(())}, "softcap is a Tensor"),
    (ENTMAX, ValueError, {"alpha": 1.0}, "alpha is 1.0"),
    (ENTMAX, ValueError, {"alpha": 2.1}, "alpha is 2.1"),
    (ENTMAX, ValueError, {"alpha": float("nan")}, "alpha is nan"),
    (ENTMAX, ValueError, {"alpha": 10**400}, "alpha is about 2**1328"),
    (ENTMAX, ValueError, {"alpha": -(10**5000)}, "alpha is about -2**16609"),
    (ENTMAX, TypeError, {"alpha": "1.5"}, "alpha is a str"),
    (ENTMAX, TypeError, {"alpha": None}, "alpha is a NoneType"),
    (ENTMAX, ValueError, {"alpha": torch.full((H + 1,), 1.5)}, "alpha has shape [5]"),
    (ENTMAX, TypeError, {"alpha": torch.full((H,), 2)}, "alpha has dtype torch.int64"),
    (EVERY, ValueError, {"attn_mask": hk.Mask(key_lengths=[3, 8])}, "key_lengths is [3, 8]"),
    (EVERY, ValueError, {"attn_mask": f32(T, S + 1)}, "attn_mask has shape [5, 8]"),
    (EVERY, TypeError, {"attn_mask": f32(T, S).long()}, "attn_mask has dtype torch.int64"),
    (EVERY, ValueError, {"attn_mask": f32(B, S).bool()}, "attn_mask has shape [2, 7]"),
    (EVERY, ValueError, {"attn_mask": f32(1, 1, 1, T, S).bool()}, "attn_mask has shape [1, 1, 1, 5, 7]"),
    (EVERY, ValueError, {"attn_mask": f32(T, S).bool().to_sparse()}, "attn_mask has layout sparse_coo"),
    (EVERY, ValueError, {"attn_mask": torch.nested.nested_tensor([f32(S).bool()] * T)}, "attn_mask has layout nested"),
    (EVERY, TypeError, {"attn_mask": "causal"}, "attn_mask is a str"),
    (EVERY, ValueError, {"attn_mask": f32(T, S).bool().to("meta")}, "attn_mask is on meta"),
    (STATISTICS, TypeError, {"received": 1}, "received is a int; pass True, or float weights of rows that broadcast"),
    (STATISTICS, TypeError, {"received": f32(T).bool()}, "received has dtype torch.bool"),
    (STATISTICS, ValueError, {"received": f32(S)}, "received has shape [7]"),
    (STATISTICS, ValueError, {"received": f32(T).to_sparse()}, "received has layout sparse_coo"),
    (STATISTICS, ValueError, {"received": f32(T).to("meta")}, "received is on meta"),
    (STATISTICS, TypeError, {"exclude_keys": [0]}, "exclude_keys is a list"),
    (STATISTICS, TypeError, {"exclude_keys": f32(S)}, "exclude_keys has dtype torch.float32"),
    (STATISTICS, ValueError, {"exclude_keys": f32(S).bool().to_sparse()}, "exclude_keys has layout sparse_coo"),
    (STATISTICS, ValueError, {"exclude_keys": f32(T).bool()}, "exclude_keys has shape [5]"),
    (STATISTICS, ValueError, {"exclude_keys": f32(S).bool().to("meta")}, "exclude_keys is on meta"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "kind", "bad", "start"),
    [pytest.param(operator, *row, id=f"{operator}-{row[-1]}") for operators, *row in BAD for operator in operators],
)
def test_refusals(operator: str, kind: type[Exception], bad: Bad, start: str) -> None:
    """By the call and by `explain`; what follows says what would work."""
    arguments = {**tensors(operator, dtype=torch.float32), **bad}
    for run in (partial(getattr(hk, operator)), partial(hk.explain, operator)):
        with pytest.raises(kind, match=f"^{re.escape(start)}.*[;,.] "):
            run(**arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scale_is_judged_in_the_compute_dtype(dtype: torch.dtype) -> None:
    query, key, value = torch.zeros(3, 1, 1, 4, 8, dtype=dtype)
    if dtype == torch.float64:
        assert hk.gated_attention(query, key, value, scale=1e39).isfinite().all()
    else:
        with pytest.raises(ValueError, match=r"^scale is 1e\+39; .*torch\.float32"):
            hk.gated_attention(query, key, value, scale=1e39)
    assert hk.gated_attention(query, key, value, scale=1.7e38).isfinite().all()


@pytest.mark.parametrize("rank", [1, 3, 4])
@pytest.mark.parametrize("backend", NAMES)
def test_no_backend_takes_an_unknown_activation(backend: str, rank: int) -> None:
    """Its own code: behind what checks the call."""
    sizes = (H,) if rank == 1 else (B, H, T, Dv)[:rank]
    given = tensors("gated_attention", dtype=torch.float32)
    serve("gated_attention", backend, **given)
    made = parsed("gated_attention", **given, gate=torch.ones(sizes))._replace(gate_activation="relu")
    results = Results(torch.empty(B, H, T, Dv), torch.empty(0), torch.empty(0))
    with pytest.raises(Exception) as raised:  # noqa: PT011 (a compiler's own; the words are compared below)
        load(backend).forward(made, results)
    error: BaseException | None = raised.value
    words = ""
    while error is not None:  # Triton's compiler raises one for each call around the line
        words, error = words + str(error), error.__cause__
    assert "gate_activation" in words


# ---------------------------------------------------------------------- sizes that int32 can't hold
def long(operator: str, B: int = 1, H: int = 2, T: int = 1, S: int = 1) -> dict[str, Any]:
    """Arguments of these sizes, by stride 0."""
    one = tensors(operator, B=1, H=1, Hk=1, T=1, S=1, D=8, dtype=torch.float32)
    sizes = {"query": (H, T, 8), "key": (H, S, 8), "value": (H, S, 6), "content_bias": (H, S)}
    if "mixing" in one:
        sizes |= {"query": (T, 8), "key": (S, 8)}
    shapes = {name: (B, *size) for name, size in sizes.items()} | {"mixing": (H, 8)}
    return {name: tensor.expand(shapes[name]) for name, tensor in one.items()}


@pytest.mark.parametrize("operator", EVERY)
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
def test_sizes_that_int32_can_not_hold(
    operator: str, sizes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a mask is computed, which would take 17 GB for 2**30 rows."""
    compute = QueryLengths.intervals

    def intervals(self: QueryLengths, B: int, H: int, T: int, *rest: Any) -> Intervals:
        assert T <= checks.MAX_LENGTH
        return compute(self, B, H, T, *rest)

    monkeypatch.setattr(QueryLengths, "intervals", intervals)
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
    for rows, keys in ((most, 1), (1, most)):
        arguments = long("gated_attention", T=rows, S=keys)
        problem = parsed("gated_attention", **arguments, attn_mask=windows)
        lo, hi = problem.intervals.band_lo, problem.intervals.band_hi
        assert -UNBOUNDED <= lo <= hi <= UNBOUNDED
        assert most + 1024 + UNBOUNDED <= 2**31
        assert problem.intervals.band_hi == keys - rows + 1


@pytest.mark.parametrize("operator", EVERY)
def test_the_op_itself_refuses_them(operator: str) -> None:
    """Where sizes are symbolic the call cannot judge them."""
    arguments = long(operator, S=2**31)
    call = Call(**arguments, band_lo=-9, band_hi=9)
    for backend in ("cpu", "eager"):
        op, save = (attention_op, [False])
        if operator == "attention_statistics":
            op, save = (statistics_op, [])
        with pytest.raises(ValueError, match=r"^key (has S = 2147483648|is too long)"):
            op(*call, *save, backend)


@pytest.mark.parametrize("entries", [(2, 2), (1, 4), (4, 1), (5, 5)])
def test_the_op_refuses_a_bias_of_other_batches(entries: tuple[int, int]) -> None:
    """Batch b reads entry `(b // inner, b % inner)`; there are 5."""
    operands = f32(5, 1, T, D), f32(5, 1, S, D), f32(5, 1, S, Dv)
    for fits in ((1, 1), (1, 5), (5, 1)):
        attention_op(*Call(*operands, bias=f32(*fits, 1, 1, 1)), False, "eager")
    with pytest.raises(ValueError, match=r"^bias has shape"):
        attention_op(*Call(*operands, bias=f32(*entries, 1, 1, 1)), False, "eager")


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_op_refuses_keys_and_values_of_other_batches(name: str, shared: bool) -> None:
    """Kernels would read past their end."""
    operands = {"query": f32(B, T, D), "key": f32(B, S, D), "value": f32(B, H, S, Dv), "mixing": f32(H, D)}
    if not shared:
        operands = {"query": f32(B, H, T, D), "key": f32(B, H, S, D), "value": f32(B, H, S, Dv)}
    operands[name] = operands[name][:1]
    with pytest.raises(ValueError, match=rf"^{name} has shape"):
        attention_op(*Call(**operands), False, "eager")


def test_explain_refuses_what_it_can_not_read() -> None:
    arguments = tensors("gated_attention", dtype=torch.float32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gates'"):
        hk.explain("gated_attention", **arguments, gates=1)
    with pytest.raises(ValueError, match="operator is a Tensor; use one of 'gated_attention', "):
        hk.explain(*arguments.values())


# ---------------------------------------------------------------------- refusals of a backend
@pytest.mark.parametrize(("operator", "backend"), calls.EVERY)
def test_an_explicit_backend_never_falls_back(operator: str, backend: str) -> None:
    """Dense masks, strided rows: served, or refused with the reasons that `explain` gives."""
    given: dict[str, Any] = dict(tensors(operator, dtype=torch.float32))
    strided = {
        name: torch.stack([t, t], -1)[..., 0] if name in ("query", "key", "value") else t for name, t in given.items()
    }
    for arguments in (given | {"attn_mask": torch.rand(H, T, S) > 0.5}, strided):
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
