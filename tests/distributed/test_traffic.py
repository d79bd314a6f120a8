"""The bytes that a process receives are those of the formulas in docs/scaling.md, forward and backward, in float32.

An all-gather or reduce-scatter of N bytes in all brings `(W - 1) / W * N`, and an all-reduce twice that, as rings do
it. A ring receives from one process what it counts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.tensor import debug, parallel

import heads_kernels as hk
from heads_kernels.integrations import distributed
from tests.support.processes import mesh_of

B, T, H, HK, D, DS = 2, 64, 8, 4, 16, 48
E = H * D
#: Numbers that a token's key and value have.
KEYS = {"gated": H * 2 * D, "grouped": HK * 2 * D, "collaborative": DS + H * D}
#: By way of splitting: numbers that all processes receive, divided by W - 1.
NUMBERS = {
    # Keys and values are gathered, and their gradients reduced.
    **{f"all_gather, {kind}": 2 * B * T * keys for kind, keys in KEYS.items()},
    # Keys and values are passed on twice, and their gradients once.
    **{f"ring, {kind}": 3 * B * T * keys for kind, keys in KEYS.items()},
    # An all-reduce of the output, and one of the gradient of the input of each of three projections.
    "tensor parallel": 4 * 2 * B * T * E,
    # Weights and biases are gathered in the forward and the backward pass, and their gradients reduced.
    "fully sharded": 3 * 4 * (E * E + E),
}


def pass_of_layer(how: str, mesh: Any) -> Callable[[], object]:
    layer = hk.nn.GatedMultiheadAttention(E, H)
    if how == "tensor parallel":
        parallel.parallelize_module(layer, mesh, distributed.tensor_parallel_plan(layer, mesh))
    else:
        fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    x = torch.randn(B, T, E, requires_grad=True)
    return lambda: layer(x)[0].sum().backward()


def pass_of_call(how: str, mesh: Any) -> Callable[[], object]:
    method, kind = how.split(", ")
    part, draw = T // mesh.size(), partial(torch.randn, requires_grad=True)
    heads = HK if kind == "grouped" else H
    given: dict[str, Tensor] = {"value": draw(B, heads, part, D)}
    if kind == "collaborative":
        call = hk.collaborative_attention
        given |= {name: draw(B, part, DS) for name in ("query", "key")}
        given["mixing"] = torch.randn(H, DS)
    else:
        call = hk.gated_attention
        given |= {"query": draw(B, H, part, D), "key": draw(B, heads, part, D)}
    context = distributed.ContextParallel(mesh, method)
    return lambda: context(call, **given).sum().backward()


def received(do: Callable[[], object], W: int) -> int:
    """Bytes that the collectives of this process bring it, by the shapes of their operands."""
    gathered = transferred = 0

    class Traffic(debug.CommDebugMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal gathered, transferred
            out = super().__torch_dispatch__(func, types, args, kwargs)
            name = str(func)
            # Those of c10d have the output first, and then the input.
            if name.startswith("c10d._allgather_base"):
                gathered += args[0].nbytes
            elif name.startswith("c10d._reduce_scatter_base"):
                gathered += args[1].nbytes
            elif name.startswith("_c10d_functional.all_gather"):
                gathered += out.nbytes
            elif name.startswith("_c10d_functional.reduce_scatter"):
                gathered += args[0].nbytes
            elif name.startswith("_c10d_functional.all_reduce"):
                gathered += 2 * args[0].nbytes
            elif name.startswith("c10d.recv_"):
                transferred += sum(tensor.nbytes for tensor in args[0])
            return out

    with Traffic():
        do()
    return gathered * (W - 1) // W + transferred


@pytest.mark.processes("W")
@pytest.mark.parametrize("W", [2, 4])
def test_bytes_received(W: int) -> None:
    mesh = mesh_of(W)
    for how, numbers in NUMBERS.items():
        make = pass_of_call if "," in how else pass_of_layer
        assert received(make(how, mesh), W) == 4 * numbers * (W - 1) // W, how
