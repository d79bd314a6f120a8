"""Bytes that a process receives, measured against the formulas of docs/scaling.md.

Processes over gloo run one attention call or layer, forward and backward, split in each way. `CommDebugMode` sees the
collectives, and the shapes of their operands give the bytes that each process receives: an all-gather or reduce-scatter
of N bytes in all (W - 1) / W * N, and an all-reduce twice that, as rings do it. A ring receives from one process what
it counts.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import heads_kernels as hk
from benchmarks.results import Found
from benchmarks.settings import Settings

B, T, H, HK, D, DS = 2, 64, 8, 4, 16, 48
E: Final = H * D
SIZE: Final = 4  # bytes of float32
WORLDS: Final = (2, 4)


# ---------------------------------------------------------------------- the formulas of docs/scaling.md
def all_gather(W: int, keys: int) -> int:
    """`keys`: numbers per token of a key and its value. Gathered, and their gradients reduced."""
    return 2 * (W - 1) * B * T * keys * SIZE // W


def ring(W: int, keys: int) -> int:
    """Keys and values pass on twice, and their gradients, in float32, once."""
    return 3 * (W - 1) * B * T * keys * SIZE // W


def tensor_parallel(W: int) -> int:
    """An all-reduce of the output, and one of the gradient of the input for each of three projections."""
    return 4 * 2 * (W - 1) * B * T * E * SIZE // W


def fully_sharded(W: int) -> int:
    """Weights gathered in the forward and backward pass, and gradients reduced; biases are among them."""
    return 3 * (W - 1) * 4 * (E * E + E) * SIZE // W


CASES: Final[dict[str, Callable[[int], int]]] = {
    "all_gather, gated": lambda W: all_gather(W, H * 2 * D),
    "all_gather, grouped": lambda W: all_gather(W, HK * 2 * D),
    "all_gather, collaborative": lambda W: all_gather(W, DS + H * D),
    "ring, gated": lambda W: ring(W, H * 2 * D),
    "ring, grouped": lambda W: ring(W, HK * 2 * D),
    "ring, collaborative": lambda W: ring(W, DS + H * D),
    "tensor parallel layer": tensor_parallel,
    "fully_shard layer": fully_sharded,
}


# ---------------------------------------------------------------------- measured, in every process
def step(case: str, mesh: Any) -> Callable[[], object]:
    """A forward and backward pass, split over `mesh`."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from heads_kernels.integrations.distributed import ContextParallel, tensor_parallel_plan

    torch.manual_seed(0)
    if case.endswith("layer"):
        layer: Any = hk.nn.GatedMultiheadAttention(E, H)
        if case.startswith("tensor"):
            parallelize_module(layer, mesh, tensor_parallel_plan(layer, mesh))
        else:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        x = torch.randn(B, T, E, requires_grad=True)
        return lambda: layer(x)[0].sum().backward()
    method, kind = case.split(", ")
    part = T // mesh.size()
    draw = partial(torch.randn, requires_grad=True)
    given: dict[str, Tensor] = {"value": draw(B, HK if kind == "grouped" else H, part, D)}
    if kind == "collaborative":
        given |= {
            "query": draw(B, part, DS),
            "key": draw(B, part, DS),
            "mixing": torch.randn(H, DS),
        }
        call: Callable[..., Tensor] = hk.collaborative_attention
    else:
        given |= {"query": draw(B, H, part, D), "key": draw(*given["value"].shape)}
        call = hk.gated_attention
    context = ContextParallel(mesh, method)  # type: ignore[arg-type]
    return lambda: context(call, **given).sum().backward()  # type: ignore[no-untyped-call]


def received(do: Callable[[], object], W: int) -> tuple[int, dict[str, int]]:
    """Bytes that this process receives, and how many collectives of each kind ran."""
    from torch.distributed.tensor.debug import CommDebugMode

    share = (W - 1) / W
    total, transfers = 0.0, 0

    class Traffic(CommDebugMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal total, transfers
            out = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            name = str(func)
            if name.startswith(("_c10d_functional.", "c10d.")):
                # Those of c10d have the output first, and then the input.
                if "_allgather_base" in name:
                    total += share * args[0].nbytes
                elif "_reduce_scatter_base" in name:
                    total += share * args[1].nbytes
                elif "all_gather" in name:
                    total += share * out.nbytes
                elif "reduce_scatter" in name:
                    total += share * args[0].nbytes
                elif "all_reduce" in name:
                    total += 2 * share * args[0].nbytes
                elif "recv_" in name:
                    total += sum(tensor.nbytes for tensor in args[0])
                    transfers += 1
            return out

    with Traffic() as seen:  # type: ignore[no-untyped-call]
        do()
    counts = {str(name).split(".")[-1]: n for name, n in seen.get_comm_counts().items() if n}
    return round(total), counts | ({"receive": transfers} if transfers else {})


def serve(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    store = f"file://{folder}/store{world}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    rows = []
    for case, predicted in CASES.items():
        measured, counts = received(step(case, mesh), world)
        rows.append({"what": case, "W": world, "measured": measured, "predicted": predicted(world),
            "collectives": counts})  # fmt: skip
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(rows))
    distributed.destroy_process_group()


def measure(settings: Settings) -> Iterator[Found]:
    """On two processes, and on four."""
    found = Found("scaling", "KiB that a process receives, forward and backward", {
        "": "{what}",
        "W": "{W}",
        "measured": lambda row: f"{row['measured'] / 1024:.1f}",
        "predicted": lambda row: f"{row['predicted'] / 1024:.1f}",
        "collectives": lambda row: ", ".join(f"{n} {name}" for name, n in row["collectives"].items()),
    })  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS[:1] if settings.form == "smoke" else WORLDS:
            spawn(serve, (world, folder), nprocs=world)  # type: ignore[no-untyped-call]
            found.rows += json.loads(Path(folder, f"{world}.json").read_text())
    found.failures += [
        f"scaling: {row['what']} on {row['W']} processes receives {row['measured']} bytes, not {row['predicted']}"
        for row in found.rows
        if row["measured"] != row["predicted"]
    ]
    yield found
