"""What csrc/bindings/ and the ops refuse: whoever calls them reads and writes no memory that is not there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from heads_kernels.call import OPERANDS
from tests.ops.calls import OPERATORS

cpu = pytest.importorskip("heads_kernels._cpu", reason="pip install, with a C++ compiler")
try:
    from heads_kernels import _cuda_emulated as cuda
except ImportError:  # python setup.py emulator
    cuda = None

pytestmark = pytest.mark.check

B, H, Hk, T, S, D, Dv = 2, 4, 2, 5, 7, 8, 6
HERE = (0, 0)
NAMES = {False: "gated_attention", True: "collaborative_attention"}
needs_emulator = pytest.mark.skipif(cuda is None, reason="python setup.py emulator")

Call = dict[str, Any]


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


def rows(*sizes: int) -> Tensor:
    return empty(*sizes, dtype=torch.float32)


def call(shared: bool, splits: int = 2) -> Call:
    """A valid call of every pass, by the names of its tensors; parts of gradients by `splits`."""
    return {
        "query": empty(B, T, D) if shared else empty(B, H, T, D),
        "key": empty(B, S, D) if shared else empty(B, Hk, S, D),
        "value": empty(B, H if shared else Hk, S, Dv),
        "mixing": empty(H, D) if shared else None,
        "content_bias": empty(B, H, S) if shared else None,
        "k_lo": torch.zeros(B, T, dtype=torch.int32),
        "k_hi": torch.full((B, T), S, dtype=torch.int32),
        "key_visible": torch.ones(1, S, dtype=torch.bool),
        "dense_mask": torch.ones(1, H, T, S, dtype=torch.bool),
        "dense_cells": torch.full((1, H, 1, 1), 2, dtype=torch.uint8),
        "bias": None if shared else torch.zeros(1, B, 1, T, S),
        "offset_bias": torch.zeros(H, T + S - 1) if shared else None,
        "sinks": torch.zeros(H),
        "excluded": torch.zeros(1, S, dtype=torch.bool),
        "gate": torch.ones(H),
        "seed": torch.zeros(5, dtype=torch.int64),
        "out": empty(B, H, T, Dv),
        "dout": empty(B, H, T, Dv),
        "attended": empty(B, H, T, Dv),
        "lse": rows(B, H, T),
        "dlse": rows(B, H, T),
        "delta": rows(B, H, T),
        "max_prob": rows(B, H, T),
        "entropy": rows(B, H, T),
        "argmax": torch.zeros(B, H, T, dtype=torch.int64),
        "dgate": rows(B, H, T),
        "dattended": None,
        "dkey": rows(splits * B, S, D) if shared else rows(splits * B, Hk, S, D),
        "dvalue": empty(B, H, S, Dv) if shared else rows(splits * B, Hk, S, Dv),
        "dcontent_bias": rows(B, H, S) if shared else None,
        "dquery": rows(B, T, D) if shared else empty(B, H, T, D),
        "dmixing": rows(B, 1, H, D) if shared else None,
        "dbias": None if shared else rows(splits, B, 1, T, S),
        "doffset_bias": rows(2, B, H, 128) if shared else None,
        "dsinks": rows(B, H, T),
        "alpha": None,
        "dalpha": None,
    }


def of_entmax() -> Call:
    """A valid call with `alpha`, which has no sinks and no gradient of lse."""
    absent = dict.fromkeys(("sinks", "dsinks", "dlse"))
    return {
        **of_cpu(shared=False),
        "lse": torch.zeros(2, B, H, T),  # the threshold, in two numbers
        **absent,
        "alpha": torch.full((H,), 1.5),
        "dalpha": rows(B, H, T),
    }


def of_cpu(shared: bool) -> Call:
    """The same with gradients as the CPU writes them."""
    c = call(shared)
    like = {f"d{name}": torch.zeros_like(c[name]) for name in ("query", "key", "value")}
    like["dmixing"] = rows(B, H, D) if shared else None
    like["dbias"] = None if shared else rows(1, B, 1, T, S)
    like["doffset_bias"] = rows(B, H, T + S - 1) if shared else None
    return {**c, **like}


def arguments(c: Call) -> tuple[Any, ...]:
    terms = c["bias"], c["offset_bias"], c["sinks"], 2.0
    scores = c["query"], c["key"], c["mixing"], c["content_bias"], 0.5, terms
    mask = c["k_lo"], c["k_hi"], c["key_visible"], c["dense_mask"], -S, S
    return scores, c["value"], mask, (c["gate"], "identity", c["seed"], 0.5)


def cuda_arguments(c: Call) -> tuple[Any, ...]:
    scores, value, mask, options = arguments(c)
    return scores, value, (*mask, c["dense_cells"]), options


def cpu_forward(c: Call) -> None:
    cpu.attention_forward(*arguments(c), (c["out"], c["attended"], c["lse"]), 1, c["alpha"])


def cpu_backward(c: Call) -> None:
    names = [f"d{name}" for name in OPERANDS]
    saved = c["dout"], c["attended"], c["lse"], c["dlse"]
    gradients = tuple(c[name] for name in names)
    cpu.attention_backward(*arguments(c), True, saved, gradients, 1, c["alpha"])


def entmax_forward(c: Call) -> None:
    cpu_forward(c)


def entmax_backward(c: Call) -> None:
    cpu_backward(c)


def cpu_statistics(c: Call) -> None:
    scores, _, mask, _ = arguments(c)
    outputs = tuple(c[name] for name in ("lse", "max_prob", "argmax", "entropy"))
    cpu.attention_statistics(scores, c["excluded"], mask, outputs, 1)


def forward(c: Call) -> None:
    cuda.attention_forward(*cuda_arguments(c), (c["out"], c["attended"], c["lse"]), None, HERE)


def closed(c: Call) -> None:
    cuda.attention_closed(*cuda_arguments(c), c["dout"], c["dgate"], HERE)


def first(c: Call) -> None:
    read = c["dout"], c["attended"], c["lse"], c["dlse"]
    written = c["delta"], c["dgate"], c["dattended"], c["dsinks"]
    cuda.attention_rows(*cuda_arguments(c), read, written, HERE)


def keys(c: Call) -> None:
    read = c["dout"], c["lse"], c["delta"]
    gradients = c["dkey"], c["dvalue"], c["dcontent_bias"]
    cuda.attention_keys(*cuda_arguments(c), read, gradients, 2, HERE)


def queries(c: Call) -> None:
    read, gradients = (c["dout"], c["lse"], c["delta"]), (c["dquery"], c["dmixing"])
    cuda.attention_queries(*cuda_arguments(c), read, gradients, 1, True, HERE)


def of_bias(c: Call) -> None:
    read, gradients = (c["dout"], c["lse"], c["delta"]), (c["dbias"], c["doffset_bias"])
    cuda.attention_bias(*cuda_arguments(c), read, gradients, 1 if c["dbias"] is None else 2, HERE)


def cells(c: Call) -> None:
    cuda.dense_cells(c["dense_mask"], c["dense_cells"], HERE)


Pass = Callable[[Call], None]
_TERMS = ("bias", "offset_bias", "sinks")
_SCORES = (
    "query",
    "key",
    "mixing",
    "content_bias",
    *_TERMS,
    "k_lo",
    "k_hi",
    "key_visible",
    "dense_mask",
)
_CALL = (*_SCORES, "value", "gate", "seed")
_TILED = (*_CALL, "dense_cells")
_READ = ("dout", "lse", "delta")
#: Gradients, written only where they are asked for; an empty one is not.
GRADIENTS = [f"d{name}" for name in OPERANDS]
#: Each pass with the tensors that it reads and writes.
PASSES: dict[Pass, tuple[str, ...]] = {
    cpu_forward: (*_CALL, "out", "attended", "lse"),
    cpu_backward: (*_CALL, "dout", "attended", "lse", "dlse", *GRADIENTS),
    cpu_statistics: (*_SCORES, "excluded", "lse", "max_prob", "argmax", "entropy"),
    entmax_forward: ("alpha",),
    entmax_backward: ("alpha", "dalpha"),
}  # fmt: skip
CUDA_PASSES: dict[Pass, tuple[str, ...]] = {
    forward: (*_TILED, "out", "attended", "lse"),
    closed: (*_TILED, "dout", "dgate"),
    first: (*_CALL, "dout", "attended", "lse", "dlse", "delta", "dgate", "dsinks"),
    keys: (*_TILED, *_READ, "dkey", "dvalue", "dcontent_bias"),
    queries: (*_TILED, *_READ, "dquery", "dmixing"),
    of_bias: (*_TILED, *_READ, "dbias", "doffset_bias"),
    cells: ("dense_mask", "dense_cells"),
}
if cuda is not None:
    PASSES |= CUDA_PASSES

#: What may be absent.
OPTIONAL = {
    "content_bias",
    "key_visible",
    "dense_mask",
    "excluded",
    "gate",
    "attended",
    "lse",
    "dlse",
    "alpha",
    *_TERMS,
    *GRADIENTS,
}
#: But these passes need it.
NEEDED = {
    (cpu_backward, "attended"), (cpu_backward, "lse"), (cpu_statistics, "lse"), (first, "attended"), (first, "lse"),
    (entmax_forward, "alpha"), (entmax_backward, "alpha"),
    (closed, "gate"), (closed, "dgate"), (keys, "lse"), (queries, "lse"), (of_bias, "lse"),
    (first, "sinks"), (cells, "dense_mask"), *((cpu_backward, name) for name in _TERMS), (of_bias, "bias"),
    (of_bias, "offset_bias"),
}  # fmt: skip
#: Outputs of passes that may be empty.
OUTPUTS = {
    cpu_forward: {"attended", "lse"}, forward: {"attended", "lse"},
    cpu_backward: GRADIENTS, entmax_backward: GRADIENTS, keys: GRADIENTS, queries: GRADIENTS, of_bias: GRADIENTS,
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


def made(run: Pass, shared: bool) -> Call:
    if run in (entmax_forward, entmax_backward):
        return of_entmax()
    return of_cpu(shared) if run.__name__.startswith("cpu") else call(shared)


def is_served(run: Pass, name: str, how: str) -> bool:
    if how == "None":
        return name in OPTIONAL and (run, name) not in NEEDED
    if how == "empty":
        return name in OUTPUTS.get(run, ())
    if run is cells and name == "dense_mask":  # as many cells
        return how in ("shorter", "longer")
    if how == "double":  # beside the query, of the CPU's kernels
        own = (
            "gate",
            "mixing",
            "content_bias",
            *_TERMS,
            *(("dout", "attended") if run is cpu_backward else ()),
        )
        return run.__name__.startswith("cpu") and name in own
    return False


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("run", PASSES, ids=lambda run: run.__name__)
def test_every_tensor_of_a_pass(run: Pass, shared: bool) -> None:
    """A valid call runs; one tensor spoiled, it is served or refused by name."""
    good = made(run, shared)
    run(good)
    for name, how in product(PASSES[run], SPOILED):
        if good[name] is None:
            continue
        spoiled = made(run, shared)
        spoiled[name] = SPOILED[how](spoiled[name])
        if is_served(run, name, how):
            run(spoiled)
            continue
        own = "(dout|dattended)" if name == "dout" else name  # of the last passes of CUDA
        blamed = own if how in NAMED and how != "None" else r"\w+"
        with pytest.raises(ValueError, match=rf"^{blamed} .*does not fit"):
            run(spoiled)


def cpu_attend(c: Call) -> None:
    cpu.attend(*arguments(c), False, 1)


@pytest.mark.parametrize("run", [*PASSES, cpu_attend], ids=lambda run: run.__name__)
def test_tuples_that_are_too_short(run: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    class Recorder:
        def __init__(self, module: Any) -> None:
            self.module = module

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *given: calls.append((getattr(self.module, name), given))

    for name in ("cpu", "cuda"):
        monkeypatch.setitem(globals(), name, Recorder(globals()[name]))
    run(made(run, shared=False))
    ((function, given),) = calls
    for at, each in enumerate(given):
        if not isinstance(each, tuple):
            continue
        spoiled = [((), "entries"), (each[:1], "entries")]
        if at == 0 and len(each) == 6:  # scores
            terms = each[5]
            spoiled += [((*each[:5], t), "entries") for t in ((), terms[:3])]
            spoiled += [((*each[:5], list(terms)), "terms is no tuple")]
        for short, words in spoiled:
            with pytest.raises(ValueError, match=rf"{words}.*does not fit"):
                function(*given[:at], short, *given[at + 1 :])


@pytest.mark.parametrize("how", ["threads", "band", "dropout_p", "activation", "seed"])
def test_numbers_that_do_not_fit(how: str) -> None:
    c = of_cpu(shared=False)
    scores, value, mask, options = arguments(c)
    threads = 0 if how == "threads" else 1
    if how == "band":
        mask = (*mask[:4], -(2**40), S)
    if how == "dropout_p":
        options = (*options[:3], float("nan"))
    if how == "activation":
        options = (options[0], "relu", *options[2:])
    if how == "seed":
        options = (*options[:2], None, options[3])
    outputs = c["out"], c["attended"], c["lse"]
    with pytest.raises(ValueError, match=how):
        cpu.attention_forward(scores, value, mask, options, outputs, threads, None)


@pytest.mark.parametrize("name", ["dlse", "sinks"])
def test_what_entmax_has_not(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} comes with alpha"):
        entmax_backward({**of_entmax(), name: of_cpu(shared=False)[name]})


@pytest.mark.parametrize("value", [1.0, 2.1, float("nan")])
def test_alpha_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match="alpha has the value"):
        entmax_forward({**of_entmax(), "alpha": torch.full((H,), value)})


def test_rows_that_are_not_contiguous() -> None:
    for run, name in ((cpu_forward, "value"), (cpu_forward, "lse"), (cpu_backward, "dmixing")):
        spoiled = of_cpu(shared=True)
        spoiled[name] = torch.stack([spoiled[name]] * 2, -1)[..., 0]
        with pytest.raises(ValueError, match="does not fit"):
            run(spoiled)


@needs_emulator
def test_rows_that_are_not_contiguous_for_cuda() -> None:
    for run, name in ((forward, "value"), (forward, "out"), (first, "dout"), (keys, "dkey")):
        spoiled = call(shared=False)
        spoiled[name] = torch.stack([spoiled[name]] * 2, -1)[..., 0]
        with pytest.raises(ValueError, match="does not fit"):
            run(spoiled)


@needs_emulator
@pytest.mark.parametrize("shared", [False, True])
def test_parts_of_split_keys(shared: bool) -> None:
    def run(c: Call, **changes: Any) -> None:
        heads = c["out"].shape[:3]
        given = {"acc": rows(3, *c["out"].shape), "row_max": rows(3, *heads)}
        given |= {"row_sum": rows(3, *heads), **changes}
        outputs = c["out"], c["attended"], c["lse"]
        cuda.attention_forward(*cuda_arguments(c), outputs, tuple(given.values()), HERE)

    c = call(shared=shared)
    run(c)
    assert c["out"].isfinite().all()
    for name, wrong in {
        "acc": rows(1 if shared else 0, *c["out"].shape),
        "row_max": rows(2, *c["out"].shape[:3]),
        "row_sum": empty(3, *c["out"].shape[:3]),
    }.items():
        with pytest.raises(ValueError, match=name):
            run(c, **{name: wrong})


@needs_emulator
def test_parts_are_as_many_as_splits_and_float() -> None:
    for wrong in (rows(B, Hk, S, D), empty(2 * B, Hk, S, D)):
        with pytest.raises(ValueError, match="dkey"):
            keys({**call(shared=False), "dkey": wrong})
    with pytest.raises(ValueError, match="dquery"):  # adds up in memory
        queries({**call(shared=True), "dquery": empty(B, T, D)})
    with pytest.raises(ValueError, match="dmixing"):
        queries({**call(shared=True), "dmixing": rows(B, 2, H, D)})


@needs_emulator
def test_tiles_of_a_kernel_that_is_not_there() -> None:
    for terms in (False, True):
        assert min(cuda.tiles_of("gated_attention.keys", torch.float32, D, Dv, terms, 0)[:2]) > 0
    for name in ("gated_attention.values", "keys", ""):
        with pytest.raises(ValueError, match="no kernel"):
            cuda.tiles_of(name, torch.float32, D, Dv, False, 0)


# ---------------------------------------------------------------------- the ops
def op_arguments(shared: bool, backward: bool) -> Call:
    """Arguments of an op by name, in its order; a valid call."""
    c = {**of_cpu(shared), "band_lo": -S, "band_hi": S, "scale": 0.5, "softcap": 2.0}
    c |= {"gate_activation": "identity", "dropout_p": 0.5, "save": True, "closed_grad": True}
    c["needs"] = [True] * len(OPERATORS[NAMES[shared]].operands)
    names = (
        *OPERATORS[NAMES[shared]].types,
        *(("closed_grad", "needs") if backward else ("save",)),
    )
    saved = ("dout", "attended", "lse", "dlse") if backward else ()
    return {n: c[n] for n in (*saved, *names)}


def op_of(shared: bool, backward: bool) -> Any:
    return OPERATORS[NAMES[shared]].backward_op if backward else OPERATORS[NAMES[shared]].forward_op


def is_served_by_op(name: str, how: str, backend: str) -> bool:
    if how == "None":
        return name in ("content_bias", "key_visible", "dense_mask", "gate", "dlse", *_TERMS) or (
            name == "seed" and backend != "cpu"
        )
    if how == "double":
        return name in ("gate", "mixing", "content_bias", *_TERMS) or (
            backend == "cpu" and name in ("dout", "attended")
        )
    return False


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_an_op_refuses_by_name(shared: bool, backward: bool, backend: str) -> None:
    op, good = op_of(shared, backward), op_arguments(shared, backward)
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
            with pytest.raises((ValueError, TypeError), match=rf"^{blamed} "):
                op(*spoiled.values(), backend)
    with pytest.raises(ValueError, match=r"^gate_activation is 'relu'"):
        op(*{**good, "gate_activation": "relu"}.values(), backend)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_fake_refuses_by_name(shared: bool, backward: bool) -> None:
    op = op_of(shared, backward)
    with FakeTensorMode() as mode:
        good = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in op_arguments(shared, backward).items()
        }
        op(*good.values(), "cpu")
        for name in ("lse", "attended") if backward else ("key", "value"):
            for how in ("None", "another rank", "another kind"):
                with pytest.raises((ValueError, TypeError), match=rf"^{name} "):
                    op(*{**good, name: SPOILED[how](good[name])}.values(), "cpu")
