"""Modules put in the place of others, wherever a model holds them: PyTorch's own attention as the package's."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import nn

from heads_kernels.errors import refuse
from heads_kernels.nn import GatedMultiheadAttention


def put(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> None:
    """Put modules in the place of others (`{old: new}`), under every name that the model has for them.

    A `torch.nn.TransformerEncoder` looks at its first layer alone before it makes nested tensors of padded inputs,
    which no other attention than PyTorch's takes: one with a new module in it makes none from then on.
    """
    for part in list(model.modules()):
        for name, child in list(part._modules.items()):
            if child is not None and child in made:
                setattr(part, name, made[child])
    new = set(made.values())
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder) and not new.isdisjoint(part.modules()):
            part.use_nested_tensor = False


def torch_attention(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """The modules of a model whose attention is PyTorch's own, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
    }


def replace_torch(model: nn.Module, names: Container[str]) -> None:
    """Put a `GatedMultiheadAttention` in the place of each `torch.nn.MultiheadAttention` of these names.

    Raises:
        ValueError: one that is the model itself, or has batch_first=False, add_bias_kv or add_zero_attn.
    """
    chosen = {name: each for name, each in torch_attention(model).items() if name in names}
    for name, module in chosen.items():
        if module is model:
            was = "is a MultiheadAttention itself"
            refuse("model", was, "pass a module that holds it: nn.Sequential(model)")
        if not module.batch_first:
            instead = "make it with batch_first=True: converted attention takes [B, T, embed_dim]"
            refuse(f"layer {name!r}", "has batch_first=False", instead)
        if argument := _unserved(module):
            refuse(f"layer {name!r}", f"has {argument}", "leave it out, by layers")
    put(model, {each: GatedMultiheadAttention.from_torch(each) for each in chosen.values()})


def replaceable(model: nn.Module) -> list[str]:
    """The names of those that `replace_torch` takes."""
    return [
        name
        for name, module in torch_attention(model).items()
        if module is not model and module.batch_first and not _unserved(module)
    ]


def _unserved(module: nn.MultiheadAttention) -> str:
    """The argument with which a module was made that the package's have not; "" where there is none."""
    if module.bias_k is not None:
        return "add_bias_kv"
    return "add_zero_attn" if module.add_zero_attn else ""
