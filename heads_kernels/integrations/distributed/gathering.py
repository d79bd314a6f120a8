"""Sharded models as whole ones, for changes of their structure."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from heads_kernels.checks import refuse

Module = TypeVar("Module", bound=nn.Module)


def gather(model: nn.Module, into: Module) -> Module:
    """Copy the weights of a sharded model into a whole one, in every process.

    A sharded model cannot be pruned, converted or gated: its parameters keep their sizes. So gather it, change the
    whole model as in one process, and shard that one:

        whole = gather(model, into=make_model())
        hk.heads.prune(whole, hk.heads.closed(whole))
        shard(whole)  # fully_shard, parallelize_module, ...

    Every process must call, and needs memory for the whole model.

    Args:
        model: sharded by `fully_shard` or `parallelize_module`, or wrapped in `DistributedDataParallel`.
        into: a model of the same structure, gates included, that is not sharded; its weights are overwritten.

    Returns:
        `into`.

    Raises:
        ValueError: the models have other weights, or weights of other sizes; the message names them, and nothing is
            changed.
    """
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True)
    )
    own = into.state_dict()
    if different := sorted(state.keys() ^ own.keys()):
        was = f"has other weights than model: {', '.join(different)}"
        refuse("into", was, "make it as model was made, with its gates")
    for name, weight in own.items():
        if weight.shape != state[name].shape:
            was = f"has {name} of shape {list(weight.shape)}, model {list(state[name].shape)}"
            refuse(
                "into",
                was,
                "make it as model was made; hk.heads.apply_shapes prunes and converts it",
            )
    into.load_state_dict(state)
    return into
