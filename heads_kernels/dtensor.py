"""Helpers for `DTensor`s; `torch.distributed.tensor`, which takes a second, is imported only if there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> bool:
    """Whether it is a `DTensor`."""
    return type(tensor).__name__ == "DTensor"


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has split the parameters of the module or of one of its submodules."""
    return any(kind.__name__ == "FSDPModule" for part in module.modules() for kind in type(part).__mro__)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a `DTensor`, gathered from the processes of its mesh; any other tensor itself.

    Every process has the same gradient of the result, which is counted once.
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def distributed_as(values: Tensor, like: Tensor) -> Tensor:
    """`values`, which every process has, distributed as `like` if that is a `DTensor`."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def replicated(values: Tensor, mesh: DeviceMesh) -> DTensor:
    """`values`, which every process has, as a `DTensor`; they gather its gradient."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)


def local_part(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This process's part, along `dim`, of a tensor that all processes have; they gather its gradient."""
    from torch.distributed.tensor import Shard

    parts = [Shard(dim)] * mesh.ndim
    return replicated(tensor, mesh).redistribute(placements=parts).to_local()


def summed_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """`tensor`, which all processes have; its gradient is the sum of their gradients, each from a part of the work."""
    from torch.distributed.tensor import Partial

    parts = [Partial()] * mesh.ndim
    return replicated(tensor, mesh).to_local(grad_placements=parts)


def of_first(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor of the first process of `mesh`, in all of them."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim).to_local()
