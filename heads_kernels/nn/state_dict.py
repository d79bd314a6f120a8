"""Load weights of `torch.nn.MultiheadAttention` into modules of this package."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from heads_kernels.checks import refuse


def split_projections(state: dict[str, Tensor], prefix: str = "") -> None:
    """Rename the packed or separate projections of a `torch.nn.MultiheadAttention` in `state`, in place.

    `in_proj_weight` `[3 * E, E]`, or `q_proj_weight`, `k_proj_weight`, `v_proj_weight`, and `in_proj_bias`
    `[3 * E]` become `q_proj.weight`, `q_proj.bias` and so on, copies of the parts. Other names do not change.

    Raises:
        ValueError: `state` has `bias_k` or `bias_v` (`add_bias_kv`), which is not supported.
    """
    for name in ("bias_k", "bias_v"):
        if state.get(prefix + name) is not None:
            instead = "append that key and value to the source, or use a module without add_bias_kv"
            refuse(prefix + name, "is in the state dict", instead)
    for kind in ("weight", "bias"):
        packed = state.pop(f"{prefix}in_proj_{kind}", None)
        parts = (None,) * 3 if packed is None else [part.clone() for part in packed.tensor_split(3)]
        for letter, part in zip("qkv", parts, strict=True):
            part = state.pop(f"{prefix}{letter}_proj_{kind}", part)
            if part is not None:
                state[f"{prefix}{letter}_proj.{kind}"] = part


def load_torch_projections(
    module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any
) -> None:
    """`split_projections` as a hook that runs before `load_state_dict`."""
    split_projections(state, prefix)
