"""What csrc/bindings/ refuse: whoever calls an extension itself reads and writes no memory that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

cuda = pytest.importorskip("heads_kernels._cuda_emulated", reason="python setup.py emulator")

B, H, Hk, T, S, D, Dv = 2, 4, 2, 5, 7, 8, 6
HERE = (0, 0)

Call = dict[str, Any]


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


def rows(*sizes: int) -> Tensor:
    return empty(*sizes, dtype=torch.float32)


def call(shared: bool) -> Call:
    """A valid call of every pass, by the names of its tensors."""
    return {
        "query": empty(B, T, D) if shared else empty(B, H, T, D),
        "key": empty(B, S, D) if shared else empty(B, Hk, S, D),
        "value": empty(B, H if shared else Hk, S, Dv),
        "mixing": empty(H, D) if shared else None,
        "content_bias": empty(B, H, S) if shared else None,
        "k_lo": None,
        "k_hi": None,
        "key_visible": torch.ones(1, S, dtype=torch.bool),
        "gate": torch.ones(H),
        "seed": torch.zeros(1, dtype=torch.int64),
        "dout": empty(B, H, T, Dv),
        "attended": empty(B, H, T, Dv),
        "lse": rows(B, H, T),
        "delta": rows(B, H, T),
        "dgate": rows(B, H, T),
        "dattended": None,
        "dkey": rows(2 * B, S, D) if shared else rows(2 * B, Hk, S, D),
        "dvalue": empty(B, H, S, Dv) if shared else rows(2 * B, Hk, S, Dv),
        "dcontent_bias": rows(B, H, S) if shared else None,
        "dquery": rows(B, T, D) if shared else empty(B, H, T, D),
        "dmixing": rows(B, 1, H, D) if shared else None,
    }


def told(c: Call) -> tuple[Any, ...]:
    scores = c["query"], c["key"], c["mixing"], c["content_bias"], 0.5
    mask = c["k_lo"], c["k_hi"], c["key_visible"], -S, S
    return scores, c["value"], mask, (c["gate"], "identity", c["seed"], 0.5)


def forward(c: Call) -> None:
    cuda.attention_forward(*told(c), (c["dout"], c["attended"], c["lse"]), HERE)


def closed(c: Call) -> None:
    cuda.attention_closed(*told(c), c["dout"], c["dgate"], HERE)


def first(c: Call) -> None:
    read, written = (c["dout"], c["attended"], c["lse"]), (c["delta"], c["dgate"], c["dattended"])
    cuda.attention_rows((c["gate"], "identity"), read, written, HERE)


def keys(c: Call) -> None:
    read, gradients = (
        (c["dout"], c["lse"], c["delta"]),
        (c["dkey"], c["dvalue"], c["dcontent_bias"]),
    )
    cuda.attention_keys(*told(c), read, gradients, 2, HERE)


def queries(c: Call) -> None:
    read, gradients = (c["dout"], c["lse"], c["delta"]), (c["dquery"], c["dmixing"])
    cuda.attention_queries(*told(c), read, gradients, 1, True, HERE)


#: Each pass with the tensors that it alone reads or writes.
PASSES: dict[Callable[[Call], None], tuple[str, ...]] = {
    forward: ("query", "key", "value", "mixing", "content_bias", "gate", "key_visible", "seed", "dout", "lse"),
    closed: ("dout", "dgate", "gate"),
    first: ("dout", "attended", "lse", "delta", "dgate", "gate"),
    keys: ("dout", "lse", "delta", "dkey", "dvalue", "dcontent_bias"),
    queries: ("dout", "lse", "delta", "dquery", "dmixing"),
}  # fmt: skip

SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "shorter": lambda t: t[..., :-1],
    "another rank": lambda t: t[None, None, None],
    "double": lambda t: t.double(),
    "another kind": lambda t: t.to(torch.int32),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("run", PASSES, ids=lambda run: run.__name__)
def test_a_valid_call_runs(run: Callable[[Call], None], shared: bool) -> None:
    run(call(shared))


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize(
    ("run", "name", "shared"),
    [
        (run, name, shared)
        for run, names in PASSES.items()
        for name in names
        for shared in (False, True)
        if call(shared)[name] is not None
    ],
)
def test_a_tensor_that_does_not_fit(
    run: Callable[[Call], None], name: str, shared: bool, how: str
) -> None:
    spoiled = call(shared)
    spoiled[name] = SPOILED[how](spoiled[name])
    with pytest.raises(ValueError, match=r"does not fit|reached the kernels"):
        run(spoiled)


def test_rows_that_do_not_lie_contiguous() -> None:
    for run, name in ((forward, "value"), (forward, "dout"), (first, "dout"), (keys, "dkey")):
        spoiled = call(shared=False)
        spoiled[name] = torch.stack([spoiled[name]] * 2, -1)[..., 0]
        with pytest.raises(ValueError, match="does not fit"):
            run(spoiled)


def test_parts_are_as_many_as_splits_and_float() -> None:
    for wrong in (rows(B, Hk, S, D), empty(2 * B, Hk, S, D)):
        with pytest.raises(ValueError, match="dkey"):
            keys({**call(shared=False), "dkey": wrong})
    with pytest.raises(ValueError, match="dquery"):  # adds up in memory
        queries({**call(shared=True), "dquery": empty(B, T, D)})
    with pytest.raises(ValueError, match="dmixing"):
        queries({**call(shared=True), "dmixing": rows(B, 2, H, D)})


def test_tiles_of_a_kernel_that_is_not_there() -> None:
    assert min(cuda.tiles_of("gated_attention.keys", torch.float32, D, Dv)[:2]) > 0
    for name in ("gated_attention.values", "keys", ""):
        with pytest.raises(ValueError, match="no kernel"):
            cuda.tiles_of(name, torch.float32, D, Dv)
