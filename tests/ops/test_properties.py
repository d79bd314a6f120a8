"""Hypothesis over shapes, layouts, masks, gates and options: what no table of cases thinks of.

Every example is a case as the named ones are, and held to the same rule.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import heads_kernels as hk
from heads_kernels.backends import choose
from heads_kernels.mask import as_mask
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, Inputs, compare, reference
from heads_kernels.testing.masks import MaskBuilder, Sizes, padded
from tests.ops.calls import DIFFERENTIABLE, NAMES, OPERATORS, assert_ok, case_of, serve, threads
from tests.support.alike import assert_alike

LENGTH = st.one_of(st.integers(0, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 96, 130]))
WIDTH = st.one_of(st.integers(1, 20), st.sampled_from([32, 40, 64, 72, 80]))
DTYPE = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
LAYOUT = st.sampled_from(["heads_first", "transposed", "sliced"])
ACTIVATION = st.sampled_from(["identity", "sigmoid", "softplus"])
#: Parts of a mask.
PARTS = ("causal", "window", "head_windows", "first_keys", "lengths", "key_mask", "query_mask", "documents", "dense")


@st.composite
def masks(draw: st.DrawFn) -> MaskBuilder:
    """Any part of `hk.Mask` with any other; sizes are known when the case is made."""
    parts = draw(st.lists(st.sampled_from(PARTS), unique=True))
    causal = draw(st.sampled_from([True, "lower_right"])) if "causal" in parts else False
    window = (draw(st.integers(-1, 40)), draw(st.integers(-1, 40)))
    seed = draw(st.integers(0, 1 << 30))

    def build(sizes: Sizes, device: torch.device) -> hk.Mask:
        drawn: dict[str, Any] = {"generator": torch.Generator("cpu").manual_seed(seed), "device": "cpu"}

        def lengths(limit: int) -> Tensor:
            return torch.randint(0, limit + 1, (sizes.B,), **drawn).to(device)

        def share(part: float, *shape: int) -> Tensor:
            return (torch.rand(shape, **drawn) < part).to(device)

        arguments: dict[str, Any] = {"causal": causal}
        if "window" in parts:
            arguments["window"] = window
        if "head_windows" in parts:
            arguments["window"] = torch.randint(-1, 40, (sizes.H, 2), **drawn).to(device)
        if "first_keys" in parts and "window" in arguments:
            arguments["first_keys"] = torch.randint(0, 40, (sizes.H,), **drawn).to(device)
        if "lengths" in parts:
            arguments |= {"key_lengths": lengths(sizes.S), "query_lengths": lengths(sizes.T)}
        if "key_mask" in parts:
            arguments["key_mask"] = share(0.7, sizes.B, sizes.S)
        if "query_mask" in parts:
            arguments["query_mask"] = share(0.7, 1, sizes.T)
        if "documents" in parts:
            ids = [torch.randint(0, 4, (1, n), **drawn).to(device) for n in (sizes.T, sizes.S)]
            arguments["document_ids"] = (ids[0], ids[1].sort(1).values)
        mask = hk.Mask(**arguments)
        if "dense" in parts:
            pairs = share(0.6, 1, sizes.H, sizes.T, sizes.S)
            return as_mask(pairs, sizes) & mask
        return mask

    return build


@st.composite
def gates(draw: st.DrawFn) -> str | None:
    """The sizes of a gate in the letters of a case; any of them may be 1 instead."""
    rank = draw(st.integers(0, 4))
    full = ("", "H", "BH", "BHT", "BHTD")[rank]
    return "".join(draw(st.sampled_from([letter, letter, "1"])) for letter in full) or None


@st.composite
def biases(draw: st.DrawFn) -> dict[str, Any]:
    """No bias, a dense one of any rank and sizes of 1, or a table of offsets."""
    kind = draw(st.sampled_from(["none", "none", "dense", "offsets"]))
    if kind == "none":
        return {}
    if kind == "offsets":
        return {"offsets": draw(st.integers(1, 80))}
    full = "BHTS"[draw(st.integers(0, 3)) :]
    return {
        "bias": "".join(draw(st.sampled_from([letter, letter, "1"])) for letter in full),
        "bias_dtype": draw(st.sampled_from([None, torch.float32])),
        "bias_hides": draw(st.booleans()),
    }


@st.composite
def cases(draw: st.DrawFn, operator: str) -> Case:
    gate = draw(gates())
    shared: dict[str, Any] = {
        "Dv": draw(WIDTH),
        "gate": gate,
        "gate_activation": draw(ACTIVATION) if gate else "identity",
        "gate_strided": draw(st.booleans()),
        "gate_dtype": draw(st.sampled_from([None, torch.float32])),
        "closed": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "mask": draw(masks()),
        "scale": draw(st.sampled_from([None, 0.4, -0.2, 1.0, 5.0])),  # 5: scores of a few tens
        "outlier": draw(st.sampled_from([1.0, 1.0, 20.0])),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.25])),
        "layout": draw(LAYOUT),
        "softcap": draw(st.sampled_from([None, None, 1.0, 30.0])),
        "sinks": draw(st.booleans()),
        **draw(biases()),
    }
    B, Hk, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    T, S = draw(LENGTH), draw(LENGTH)
    if operator == "gated_attention":
        return GatedCase("drawn", B, Hk * group, T, S, D=draw(WIDTH), Hk=Hk, **shared)
    mixing = draw(st.sampled_from(["dense", "blocks", "ragged", "unaligned", "chunks", "zero_head"]))
    bias = draw(st.booleans())
    return CollaborativeCase("drawn", B, Hk, T, S, Ds=draw(WIDTH), mixing=mixing, content_bias=bias, **shared)


@pytest.mark.parametrize(
    ("operator", "backend"),
    [pytest.param(*row, marks=pytest.mark.check if row[1] == "eager" else ()) for row in DIFFERENTIABLE],
)
@given(data=st.data(), dtype=DTYPE, seed=st.integers(0, 1000))
def test_any_call_is_accurate(operator: str, backend: str, data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    """The error of eager is part of its own bound."""
    inputs = data.draw(cases(operator)).make(dtype, seed=seed)
    choice = choose(inputs.parsed(), backend)
    assume(choice.backend is not None)
    assert_ok(compare(reference(inputs), backend))


@pytest.mark.parametrize("backend", NAMES)
def test_a_key_with_nearly_all_weight(backend: str) -> None:
    """Errors that all scores of a row share do not show in its weights, if both passes round mixed queries alike."""
    made = torch.Generator().manual_seed(1)
    direction = (torch.arange(64) < 16).float()
    lengths = 1 + 0.2 * torch.randn(1, 128, 1, generator=made)
    key = 0.3 * torch.randn(1, 128, 64, generator=made)
    key[:, 0] = 3 * direction
    given = {
        "query": 0.5 * torch.randn(1, 128, 64, generator=made) + 2 * lengths * direction,
        "key": key,
        "value": torch.randn(1, 4, 128, 16, generator=made),
        "mixing": 1 + 0.3 * torch.randn(4, 64, generator=made),
    }
    inputs = Inputs(
        "collaborative_attention",
        {name: tensor.bfloat16() for name, tensor in given.items()},
        {"is_causal": True},
        torch.randn(1, 4, 128, 16, generator=made).bfloat16(),
    )
    assert_ok(compare(reference(inputs), backend))


@pytest.mark.parametrize("operator", OPERATORS)
@given(
    data=st.data(),
    T=st.integers(1, 12),  # kFewRows in csrc/cpu/decode.h is 10
    # Around the ends of words of 64 keys and of parts of 256.
    S=st.sampled_from([1, 15, 17, 63, 65, 255, 256, 257, 300, 513, 600]),
    dtype=DTYPE,
)
def test_few_rows_are_accurate(operator: str, data: st.DataObject, T: int, S: int, dtype: torch.dtype) -> None:
    """Few query rows have a way of their own on the CPU."""
    inputs = replace(data.draw(cases(operator)), T=T, S=S).make(dtype)
    assert_ok(compare(reference(inputs, backward=False), "cpu"))


#: Of this one `make test` runs one row.
QUICK = {("collaborative_attention", torch.bfloat16)}


@pytest.mark.parametrize(
    ("operator", "dtype"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.check)
        for each in product(OPERATORS, (torch.float32, torch.bfloat16, torch.float16, torch.float64))
    ],
)
def test_few_rows_with_tokens_first(operator: str, dtype: torch.dtype) -> None:
    """A cache whose heads are next to each other, some of them closed; a task reads several of its heads."""
    layout = {"D": 256, "Hk": 5} if operator == "gated_attention" else {"D": 96}
    mask = padded(600, 255, queries=False)
    case = case_of(operator, 2, 10, 3, 600, Dv=256, gate="H", closed=0.3, mask=mask, layout="transposed", **layout)
    with threads(1):  # several have a head each
        assert_ok(compare(reference(case.make(dtype), backward=False), "cpu"))


def test_no_heads_whose_tokens_are_first_in_memory() -> None:
    query, key = (torch.empty(2, n, 4, 8)[:, :, :0].transpose(1, 2) for n in (1, 5))
    assert hk.gated_attention(query, key, key, backend="cpu").shape == (2, 0, 1, 8)


def spread(t: Tensor) -> Tensor:
    """The same values with a stride of 2 in every dimension but the last."""
    for axis in range(t.dim() - 1):
        t = torch.stack([t, torch.full_like(t, torch.nan)], axis + 1).select(axis + 1, 0)
    return t


STRIDES = {
    "spread": spread,
    "reversed": lambda t: t.movedim(0, -2).contiguous().movedim(-2, 0),
    "last dimension apart": lambda t: torch.stack([t, t], -1)[..., 0],
    "one number": lambda t: t.new_full((), 0.5).expand_as(t),
}


@pytest.mark.check
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize(
    "argument", ["query", "key", "value", "gate", "mixing", "content_bias", "bias", "sinks", "dout"]
)
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_any_strides(operator: str, backend: str, argument: str, strides: str) -> None:
    """Views give what their contiguous copies give; gradients arrive for views too. test_batch.py has expanded ones."""
    case = case_of(operator, 2, 4, 33, 35, D=16, Dv=24, gate="BHTD", bias="BHTS", sinks=True)
    inputs = case.make()
    tensors = {**inputs.tensors, "dout": inputs.dout}
    if argument not in tensors or (tensors[argument].dim() < 2 and strides == "reversed"):
        pytest.skip(f"{operator} has no such {argument}")
    view = STRIDES[strides](tensors[argument])

    def run(t: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        changed = {**tensors, argument: t}
        call = replace(inputs, dout=changed.pop("dout"), tensors=changed)
        serve(operator, backend, **call.arguments())
        return call.backward(backend)

    assert_alike(run(view), run(view.contiguous()))
