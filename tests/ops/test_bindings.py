"""What csrc/bindings/ and the ops refuse: whoever calls them reads and writes no memory that is not there."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from heads_kernels.call import OPERANDS, Call
from heads_kernels.ops.attention import Results, Saved, attention_op, backward_op
from tests.ops.calls import B, D, Dv, H, S, T

cpu = pytest.importorskip("heads_kernels._cpu", reason="pip install, with a C++ compiler")
try:
    from heads_kernels import _cuda_emulated as cuda
except ImportError:  # python setup.py emulator
    cuda = None

Hk = 2
HERE = (0, 0)
needs_emulator = pytest.mark.skipif(cuda is None, reason="python setup.py emulator")

Tensors = dict[str, Any]


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


def rows(*sizes: int) -> Tensor:
    return empty(*sizes, dtype=torch.float32)


def call(shared: bool) -> Tensors:
    """A valid call of every pass, by the names of its tensors: two parts of gradients, three of results."""
    return {
        "query": empty(B, T, D) if shared else empty(B, H, T, D),
        "key": empty(B, S, D) if shared else empty(B, Hk, S, D),
        "value": empty(B, H if shared else Hk, S, Dv),
        "mixing": empty(H, D) if shared else None,
        "content_bias": empty(B, H, S) if shared else None,
        "k_lo": torch.zeros(B, H, T, dtype=torch.int32),
        "k_hi": torch.full((B, H, T), S, dtype=torch.int32),
        "first_keys": torch.zeros(H, dtype=torch.int32),
        "key_visible": torch.ones(1, S, dtype=torch.bool),
        "dense_mask": torch.ones(1, H, T, S, dtype=torch.bool),
        "dense_cells": torch.full((1, H, 1, 1), 2, dtype=torch.uint8),
        "bias": None if shared else torch.zeros(1, B, 1, T, S),
        "offset_bias": torch.zeros(H, T + S - 1) if shared else None,
        "sinks": torch.zeros(H),
        "exclude_keys": torch.zeros(1, S, dtype=torch.bool),
        "gate": torch.ones(H),
        "seed": torch.zeros(5, dtype=torch.int64),
        **{name: empty(B, H, T, Dv) for name in ("out", "dout", "attended")},
        **{name: rows(B, H, T) for name in ("lse", "dlse", "delta", "max_score", "max_prob", "entropy")},
        **{name: rows(B, H, T) for name in ("dgate", "dsinks")},
        "argmax": torch.zeros(B, H, T, dtype=torch.int64),
        "row_weights": rows(B, 1, T),
        "received": rows(B, H, S),
        "rows": rows(2, B, H, T),
        "dattended": None,
        "dkey": rows(2 * B, S, D) if shared else rows(2 * B, Hk, S, D),
        "dvalue": empty(B, H, S, Dv) if shared else rows(2 * B, Hk, S, Dv),
        "dcontent_bias": rows(B, H, S) if shared else None,
        "dquery": rows(B, T, D) if shared else empty(B, H, T, D),
        "dmixing": rows(B, 1, H, D) if shared else None,
        "dbias": None if shared else rows(2, B, 1, T, S),
        "doffset_bias": rows(2, B, H, 128) if shared else None,
        "alpha": None,
        "dalpha": None,
        "acc": rows(3, B, H, T, Dv),
        **{name: rows(3, B, H, T) for name in ("row_max", "row_sum")},
    }


def of_entmax() -> Tensors:
    """A valid call with `alpha`, which has no sinks and no gradient of lse."""
    absent = dict.fromkeys(("sinks", "dsinks", "dlse"))
    return {
        **of_cpu(shared=False),
        "lse": torch.zeros(2, B, H, T),  # the threshold, in two numbers
        **absent,
        "alpha": torch.full((H,), 1.5),
        "dalpha": rows(B, H, T),
    }


def of_cpu(shared: bool) -> Tensors:
    """The same with gradients as the CPU writes them."""
    c = call(shared)
    like = {f"d{name}": torch.zeros_like(c[name]) for name in ("query", "key", "value")}
    like["dmixing"] = rows(B, H, D) if shared else None
    like["dbias"] = None if shared else rows(1, B, 1, T, S)
    like["doffset_bias"] = rows(B, H, T + S - 1) if shared else None
    return {**c, **like}


def fields(c: Tensors) -> Call:
    numbers = {"band_lo": -S, "band_hi": S, "scale": 0.5, "softcap": 2.0, "dropout_p": 0.5}
    return Call(**numbers | {name: c[name] for name in Call._fields if name in c})


def named(c: Tensors, *names: str) -> tuple[Any, ...]:
    return tuple(c[name] for name in names)


def of_statistics(c: Tensors) -> tuple[Call, tuple[Any, ...]]:
    return fields(c)._replace(value=None), named(c, *_STATISTICS)


_TERMS = ("bias", "offset_bias", "sinks")
_SCORES = ("query", "key", "mixing", "content_bias", *_TERMS, "k_lo", "k_hi", "first_keys", "key_visible", "dense_mask")
_CALL = (*_SCORES, "value", "gate", "seed")
_STATISTICS = ("lse", "max_score", "max_prob", "argmax", "entropy", "received")
_TILED = (*_CALL, "dense_cells")
_PARTS = ("acc", "row_max", "row_sum")
_READ = ("dout", "lse", "delta")
#: Gradients, written only where they are asked for; an empty one is not.
GRADIENTS = [f"d{name}" for name in OPERANDS]


def cpu_forward(c: Tensors) -> None:
    cpu.attention_forward(fields(c), named(c, *Results._fields), c.get("threads", 1))


def cpu_backward(c: Tensors) -> None:
    cpu.attention_backward(fields(c), named(c, *Saved._fields), named(c, *GRADIENTS), 1)


def cuda_forward(c: Tensors, *parts: str) -> None:
    """With the names of parts, keys are split."""
    cuda.attention_forward(fields(c), named(c, *Results._fields), named(c, *parts) or None, c["dense_cells"], HERE)


def over_tiles(name: str, writes: tuple[str, ...], splits: int | None = None) -> Callable[[Tensors], None]:
    """A backward pass of CUDA over tiles; splits of keys are those of a dense bias where they are None."""

    def backward(c: Tensors) -> None:
        parts = (1 if c["dbias"] is None else 2) if splits is None else splits
        getattr(cuda, name)(fields(c), named(c, *_READ), named(c, *writes), parts, c["dense_cells"], HERE)

    return backward


#: Each pass by name: its call, and the tensors that it reads and writes.
CPU_PASSES: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "cpu_forward": (cpu_forward, (*_CALL, "out", "attended", "lse")),
    "cpu_backward": (cpu_backward, (*_CALL, "dout", "attended", "lse", "dlse", *GRADIENTS)),
    "cpu_statistics": (
        lambda c: cpu.attention_statistics(*of_statistics(c), 1),
        (*_SCORES, "exclude_keys", "row_weights", *_STATISTICS),
    ),
    "entmax_forward": (cpu_forward, ("alpha",)),
    "entmax_backward": (cpu_backward, ("alpha", "dalpha")),
}
CUDA_PASSES: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "forward": (cuda_forward, (*_TILED, "out", "attended", "lse")),
    "split_forward": (lambda c: cuda_forward(c, *_PARTS), _PARTS),
    "closed": (
        lambda c: cuda.attention_closed(fields(c), c["dout"], c["dgate"], c["dense_cells"], HERE),
        (*_TILED, "dout", "dgate"),
    ),
    "first": (
        lambda c: cuda.attention_rows(
            fields(c), named(c, *Saved._fields), named(c, "delta", "dgate", "dattended", "dsinks"), HERE
        ),
        (*_CALL, "dout", "attended", "lse", "dlse", "delta", "dgate", "dsinks"),
    ),
    **{
        name: (over_tiles(f"attention_{name}", writes, splits), (*_TILED, *_READ, *writes))
        for name, writes, splits in (
            ("keys", ("dkey", "dvalue", "dcontent_bias"), 2),
            ("queries", ("dquery", "dmixing"), 1),
            ("bias", ("dbias", "doffset_bias"), None),
        )
    },
    "statistics": (
        lambda c: cuda.attention_statistics(*of_statistics(c), c["rows"], c["dense_cells"], HERE),
        (*_SCORES, "exclude_keys", "row_weights", "dense_cells", "rows", *_STATISTICS),
    ),
    "cells": (lambda c: cuda.dense_cells(c["dense_mask"], c["dense_cells"], HERE), ("dense_mask", "dense_cells")),
}
PASSES = CPU_PASSES | CUDA_PASSES


def of_pass(name: str, *more: Any) -> Any:
    """A row of a table; those of CUDA need the emulator."""
    return pytest.param(name, *more, marks=[pytest.mark.check, needs_emulator] if name in CUDA_PASSES else [])


def run_pass(name: str, c: Tensors) -> None:
    PASSES[name][0](c)


#: What may be absent.
OPTIONAL = {
    "content_bias", "first_keys", "key_visible", "dense_mask", "exclude_keys", "gate", "attended", "lse", "dlse",
    "alpha", *_TERMS, *GRADIENTS,
}  # fmt: skip
#: But these passes need it.
NEEDED = {
    "cpu_backward": ("attended", "lse", *_TERMS, "gate", "content_bias"), "cpu_statistics": ("lse",),
    "entmax_forward": ("alpha",), "entmax_backward": ("alpha",), "first": ("attended", "lse", "sinks"),
    "closed": ("gate", "dgate"), "keys": ("lse",), "queries": ("lse",), "bias": ("lse", "bias", "offset_bias"),
    "statistics": ("lse",), "cells": ("dense_mask",),
}  # fmt: skip
#: Outputs of passes that may be empty.
OUTPUTS = {
    **dict.fromkeys(("cpu_forward", "forward"), ("attended", "lse")), "first": ("dgate", "dsinks"),
    **dict.fromkeys(("cpu_backward", "entmax_backward", "keys", "queries", "bias"), GRADIENTS),
}  # fmt: skip


def freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


SPOILED: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda t: None,
    "empty": lambda t: t.new_empty(0),
    "scalar": lambda t: t.flatten()[0],
    "shorter": lambda t: t[..., :-1],
    "longer": lambda t: torch.cat([t, t], -1),
    "another rank": lambda t: t[None, None, None, None],
    "double": lambda t: t.double(),
    "another kind": lambda t: t.to(torch.int16),
    "list": lambda t: t.tolist(),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "freed": freed,
}
#: These are refused by the name of what is wrong; sizes are read off query, key and mixing, and the others blamed.
NAMED = ("None", "scalar", "another rank", "another kind", "list", "meta", "sparse", "freed")


def made(name: str, shared: bool) -> Tensors:
    if name in ("entmax_forward", "entmax_backward"):
        return of_entmax()
    return of_cpu(shared) if name.startswith("cpu") else call(shared)


def is_served(of: str, name: str, how: str) -> bool:
    if how == "None":
        return name in OPTIONAL and name not in NEEDED.get(of, ())
    if how == "empty":
        return name in OUTPUTS.get(of, ())
    if of == "cells" and name == "dense_mask":  # as many cells
        return how in ("shorter", "longer")
    if how == "double":  # beside the query, of the CPU's kernels
        of_saved = ("dout", "attended") if of == "cpu_backward" else ()
        own = ("gate", "mixing", "content_bias", *_TERMS, *of_saved)
        return of.startswith("cpu") and name in own
    return False


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("each", [of_pass(name) for name in PASSES])
def test_every_tensor_of_a_pass(each: str, shared: bool) -> None:
    """A valid call runs; one tensor spoiled, it is served or refused by name."""
    good = made(each, shared)
    run_pass(each, good)
    for name, how in product(PASSES[each][1], SPOILED):
        if good[name] is None:
            continue
        spoiled = made(each, shared)
        spoiled[name] = SPOILED[how](spoiled[name])
        if is_served(each, name, how):
            run_pass(each, spoiled)
            continue
        own = "(dout|dattended)" if name == "dout" else name  # of the last passes of CUDA
        blamed = own if how in NAMED and how != "None" else r"\w+"
        with pytest.raises(ValueError, match=rf"^{blamed} .*does not fit"):
            run_pass(each, spoiled)


def test_tuples_that_are_too_short() -> None:
    c = of_cpu(shared=False)
    results, saved = named(c, *Results._fields), named(c, *Saved._fields)
    passes: list[tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = [
        (cpu.attend, (fields(c),), (False, 1)),
        (cpu.attention_forward, (fields(c), results), (1,)),
        (cpu.attention_backward, (fields(c), saved, named(c, *GRADIENTS)), (1,)),
        (cpu.attention_statistics, of_statistics(c), (1,)),
    ]
    if cuda is not None:
        passes += [
            (cuda.attention_rows, (fields(c), saved, (None,) * 4), (HERE,)),
            (cuda.attention_keys, (fields(c), (), (None,) * 3), (1, c["dense_cells"], HERE)),
        ]
    for function, tuples, rest in passes:
        for at, each in enumerate(tuples):
            given = *tuples[:at], each[:1], *tuples[at + 1 :], *rest
            with pytest.raises(ValueError, match=r"entries.*does not fit"):
                function(*given)


def apart(t: Tensor) -> Tensor:
    """Numbers that are not contiguous."""
    return torch.stack([t] * 2, -1)[..., 0]


SHARED, OWN = call(shared=True), call(shared=False)
_FLOATS, _SPLIT = rows(B, H, T), rows(3, B, H, T, Dv)
#: Of a pass, with a shared query and key or not, what else is in the call, and the words of the refusal.
REFUSED = [
    ("cpu_forward", False, {"threads": 0}, "threads"),
    ("cpu_forward", False, {"band_lo": -(2**40)}, "band"),
    ("cpu_forward", False, {"dropout_p": float("nan")}, "dropout_p"),
    ("cpu_forward", False, {"gate_activation": "relu"}, "activation"),
    ("cpu_forward", False, {"seed": None}, "seed"),
    ("entmax_backward", False, {"dlse": _FLOATS}, "^dlse comes with alpha"),
    ("entmax_backward", False, {"sinks": OWN["sinks"]}, "^sinks comes with alpha"),
    *(
        ("entmax_forward", False, {"alpha": torch.full((H,), value)}, "alpha has the value")
        for value in (1.0, 2.1, float("nan"))
    ),
    ("cpu_forward", True, {"value": apart(SHARED["value"])}, "value.*does not fit"),
    ("cpu_forward", True, {"lse": apart(_FLOATS)}, "lse.*does not fit"),
    ("cpu_backward", True, {"dmixing": apart(rows(B, H, D))}, "dmixing.*does not fit"),
    ("forward", True, {"value": apart(SHARED["value"])}, "value.*does not fit"),
    ("forward", True, {"out": apart(SHARED["out"])}, "out.*does not fit"),
    ("first", True, {"dout": apart(SHARED["dout"])}, "dout.*does not fit"),
    ("keys", True, {"dkey": apart(SHARED["dkey"])}, "dkey.*does not fit"),
    # Parts are as many as splits, and float.
    ("split_forward", True, {"acc": _SPLIT[:1]}, "acc"),
    ("split_forward", False, {"acc": _SPLIT[:0]}, "acc"),
    ("split_forward", False, {"row_max": rows(2, B, H, T)}, "row_max"),
    ("split_forward", False, {"row_sum": empty(3, B, H, T)}, "row_sum"),
    ("keys", False, {"dkey": rows(B, Hk, S, D)}, "dkey"),
    ("keys", False, {"dkey": empty(2 * B, Hk, S, D)}, "dkey"),
    ("queries", True, {"dquery": empty(B, T, D)}, "dquery"),  # adds up in memory
    ("queries", True, {"dmixing": rows(B, 2, H, D)}, "dmixing"),
]


@pytest.mark.parametrize(("each", "shared", "changes", "words"), [of_pass(*row) for row in REFUSED])
def test_what_does_not_fit(each: str, shared: bool, changes: Tensors, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_pass(each, made(each, shared) | changes)


@pytest.mark.check
@needs_emulator
def test_tiles_of_a_kernel_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        cuda.tiles_of("gated_attention.values", torch.bfloat16, D, Dv, False, 0)


# ---------------------------------------------------------------------- the ops
def op_arguments(shared: bool, backward: bool) -> Tensors:
    """Arguments of an op by name, in its order; a valid call."""
    c = of_cpu(shared)
    saved = {name: c[name] for name in Saved._fields} if backward else {}
    rest = {"needs": [True] * len(OPERANDS)} if backward else {"save": True}
    return {**saved, **fields(c)._replace(exclude_keys=None, row_weights=None)._asdict(), **rest}


def is_served_by_op(name: str, how: str, backend: str) -> bool:
    if how == "None":
        return name in OPTIONAL - {"attended", "lse"}
    if how == "double":
        return name in ("gate", "mixing", "content_bias", *_TERMS) or (
            backend == "cpu" and name in ("dout", "attended")
        )
    return False


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_an_op_refuses_by_name(shared: bool, backward: bool, backend: str) -> None:
    op, good = backward_op if backward else attention_op, op_arguments(shared, backward)
    op(*good.values(), backend)
    for name, tensor in good.items():
        for how in SPOILED:
            if not isinstance(tensor, Tensor) or how in ("list", "meta", "sparse", "freed"):
                continue
            spoiled = {**good, name: SPOILED[how](tensor)}
            other_width = name == "value" and how in ("shorter", "longer") and not backward
            if other_width or is_served_by_op(name, how, backend):
                op(*spoiled.values(), backend)
                continue
            blamed = name if how in ("None", "another kind") and "k_" not in name else r"\w+"
            if (name, how) == ("mixing", "None"):  # gated attention then
                blamed = "query"
            with pytest.raises((ValueError, TypeError), match=rf"^{blamed} "):
                op(*spoiled.values(), backend)
    with pytest.raises(ValueError, match=r"^gate_activation is 'relu'"):
        op(*{**good, "gate_activation": "relu"}.values(), backend)
