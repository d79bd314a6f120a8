"""Plans that split the heads of attention modules over the processes of tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from heads_kernels.checks import refuse
from heads_kernels.nn import CollaborativeMultiheadAttention, HardConcrete
from heads_kernels.nn.multihead import Multihead

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def tensor_parallel_plan(module: nn.Module, mesh: DeviceMesh) -> dict[str, ParallelStyle]:
    """A plan for `parallelize_module` that gives every process an equal part of the heads of each attention module.

    Inputs and outputs of the modules are plain tensors that every process has, as those of a `ColwiseParallel` and a
    `RowwiseParallel` layer. What heads share is replicated: the query and key of collaborative attention, and keys and
    values of fewer heads than there are processes. So are gates, and `HardConcrete` gates draw the noise of the first
    process.

        plan = tensor_parallel_plan(model, mesh)
        plan |= {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)

    Attach and prune gates before: what is sharded is neither gated nor pruned.

    Args:
        module: contains `hk.nn.GatedMultiheadAttention` or `hk.nn.CollaborativeMultiheadAttention`, or is one.
        mesh: of one dimension, as `parallelize_module` takes it.

    Returns:
        `{name: style}`, the names relative to `module`.

    Raises:
        ValueError: `module` has no attention of `hk.nn`; a layer's heads cannot be split evenly (the message says how
            many to keep).
    """
    layers = {name: each for name, each in module.named_modules() if isinstance(each, Multihead)}
    if not layers:
        was = f"is a {type(module).__name__} without attention of hk.nn"
        refuse("module", was, "pass the model that contains it")
    plan: dict[str, ParallelStyle] = {}
    for name, layer in layers.items():
        styles = _styles(name or type(layer).__name__, layer, mesh.size())
        plan |= {f"{name}.{part}" if name else part: style for part, style in styles.items()}
    return plan


def _styles(name: str, layer: Multihead, processes: int) -> dict[str, ParallelStyle]:
    H = layer.num_heads
    if H % processes:
        fewer = H - H % processes
        instead = f"keep {fewer} heads" if fewer else "leave the layer out of the plan"
        refuse(name, f"has {H} heads, which {processes} processes cannot share evenly", instead)
    split = ["v_proj", "content_proj", "gate_proj"]
    if not isinstance(layer, CollaborativeMultiheadAttention):
        split += ["q_proj", "k_proj"]
        Hk = getattr(layer, "num_key_heads", H)
        if Hk % processes:
            if processes % Hk:
                was = f"has {Hk} heads of keys, which {processes} processes cannot share evenly"
                refuse(name, was, f"use {Hk} processes, or a multiple or divisor of it")
            split = ["q_proj", "gate_proj"]
    plan: dict[str, ParallelStyle] = {
        part: ColwiseParallel(use_local_output=False)
        for part in split
        if getattr(layer, part, None) is not None
    }
    plan["out_proj"] = RowwiseParallel()
    if isinstance(layer.head_gate, HardConcrete):
        plan["head_gate"] = SharedNoise()
    return plan


class SharedNoise(ParallelStyle):
    """`HardConcrete` gates draw the noise of the first process: every process has all gates, and they must be equal."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, HardConcrete):
            refuse(
                "module",
                f"is a {type(module).__name__}",
                "apply it to HardConcrete gates",
                TypeError,
            )
        module.meshes += (device_mesh,)
        return module
