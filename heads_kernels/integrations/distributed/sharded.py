"""Sharded models: plans of tensor parallelism that split heads, and whole copies for changes of the structure."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from heads_kernels.checks import refuse
from heads_kernels.heads.layers import find_layers
from heads_kernels.heads.projected import with_projections
from heads_kernels.heads.shared import FusedProjection
from heads_kernels.heads.weights import ProjectedLayer
from heads_kernels.nn import HardConcrete
from heads_kernels.nn.multihead import Multihead

Module = TypeVar("Module", bound=nn.Module)


def gather(model: nn.Module, into: Module) -> Module:
    """Copy the weights of a sharded model into a whole one, in every process; returns that one.

    A sharded model cannot be pruned, converted or gated: its parameters keep their sizes. So gather it, change the
    whole model as in one process, and shard that one:

        whole = gather(model, into=make_model())
        hk.heads.prune(whole, hk.heads.closed(whole))
        shard(whole)  # fully_shard, parallelize_module, ...

    Every process must call, and needs memory for the whole model.

    Args:
        model: sharded by `fully_shard` or `parallelize_module`, or wrapped in `DistributedDataParallel`.
        into: a model of the same structure, gates included, that is not sharded; its weights are overwritten.

    Raises:
        ValueError: the models have other weights, or weights of other sizes; the message names them, and nothing is
            changed.
    """
    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    own = into.state_dict()
    if different := sorted(state.keys() ^ own.keys()):
        was = f"has other weights than model: {', '.join(different)}"
        refuse("into", was, "make it as model was made, with its gates")
    for name, weight in own.items():
        if weight.shape != state[name].shape:
            was = f"has {name} of shape {list(weight.shape)}, model {list(state[name].shape)}"
            refuse("into", was, "make it as model was made; hk.heads.apply_shapes prunes and converts it")
    into.load_state_dict(state)
    return into


# ---------------------------------------------------------------------- tensor parallelism
def tensor_parallel_plan(module: nn.Module, mesh: DeviceMesh) -> dict[str, ParallelStyle]:
    """A plan for `parallelize_module` that gives every process an equal part of the heads of each attention module.

    Inputs and outputs of the modules are plain tensors that every process has, as those of a `ColwiseParallel` and a
    `RowwiseParallel` layer. What heads share is replicated: the query and key of collaborative attention, and keys and
    values of `GatedMultiheadAttention` where they have fewer heads than there are processes; collaborative attention
    needs value heads that the processes share evenly. Gates are replicated too, and `HardConcrete` gates draw the noise
    of the first process.

        plan = tensor_parallel_plan(model, mesh)
        plan |= {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)

    Attach and prune gates before: what is sharded is neither gated nor pruned.

    In a model of transformers these are the layers that `hk.convert.collaborate` converted; for others the model has a
    plan of its own.

    Args:
        module: contains `hk.nn.GatedMultiheadAttention`, `hk.nn.CollaborativeMultiheadAttention` or converted layers of
            transformers, or is one.
        mesh: of one dimension, as `parallelize_module` takes it.

    Returns:
        `{name: style}`, the names relative to `module`.

    Raises:
        ValueError: `module` has no such layers; a layer's heads cannot be split evenly (the message says how many to
            keep); its values come from a projection with other roles; a layer does not have the layout of its class,
            or a module of the model does not say how many heads it has.
    """
    found = find_layers(module)
    layers = [each for each in found if isinstance(each.module, Multihead) or hasattr(each.module, "mixing")]
    if not layers:
        refuse("module", f"is a {type(module).__name__} without attention of hk.nn", "pass the model that contains it")
    names = {part: name for name, part in module.named_modules()}
    plan: dict[str, ParallelStyle] = {}
    for layer in with_projections(module, layers):
        plan |= _styles(layer, names, mesh.size())
    return plan


def _styles(layer: ProjectedLayer, names: dict[nn.Module, str], processes: int) -> dict[str, ParallelStyle]:
    """The plan of a layer. A module of transformers gets the values of the heads of its process as plain tensors."""
    H, shared, is_ours = layer.num_heads, layer.layout.shared, isinstance(layer.module, Multihead)
    name = layer.name or type(layer.module).__name__ if is_ours else str(layer)
    _check_even(name, H, layer.value.heads if shared else H, processes)
    if getattr(layer.module, "alpha_logits", None) is not None:
        refuse(name, "has entmax, which serves no DTensors", "leave the layer out of the plan")
    fused = [part for part in layer.module.modules() if isinstance(part, FusedProjection)]
    if any(layer.value.linear in part.children() for part in fused):
        was = "projects values together with other roles, which cannot be split by heads"
        refuse(name, was, "leave the layer whole")
    split = [layer.value, *layer.beside] if is_ours else [layer.value]
    if not shared:
        split += [layer.query, layer.key]
        Hk = layer.num_key_heads
        if Hk % processes:
            if processes % Hk:
                was = f"has {Hk} heads of keys, which {processes} processes cannot share evenly"
                refuse(name, was, f"use {Hk} processes, or a multiple or divisor of it")
            split = [layer.query, *layer.beside]
    plan: dict[str, ParallelStyle] = {
        names[each.linear]: ColwiseParallel(use_local_output=not is_ours) for each in split
    }
    plan[names[layer.output.linear]] = RowwiseParallel()
    if isinstance(layer.gate, HardConcrete):
        plan[names[layer.gate]] = SharedNoise()
    return plan


def _check_even(name: str, H: int, Hv: int, processes: int) -> None:
    """Refuse H heads, or Hv heads of values, that processes cannot share evenly."""
    fewer = H - H % processes
    fewer_heads = f"keep {fewer} heads" if fewer else "leave the layer out of the plan"
    fewer_processes = f"use a number of processes that divides {Hv}"
    for count, heads, instead in ((H, "heads", fewer_heads), (Hv, "heads of values", fewer_processes)):
        if count % processes:
            refuse(name, f"has {count} {heads}, which {processes} processes cannot share evenly", instead)


class SharedNoise(ParallelStyle):
    """`HardConcrete` gates draw the noise of the first process: every process has all gates, and they must be equal."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, HardConcrete):
            refuse("module", f"is a {type(module).__name__}", "apply it to HardConcrete gates", TypeError)
        module.meshes += (device_mesh,)
        return module
