"""All that a model is, for tests that nothing of it changed; and what an attention layer takes in, by brute force."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heads_kernels.convert import Moments
from heads_kernels.heads import attention_layers
from tests.support.alike import assert_alike


def state(model: nn.Module) -> list[Any]:
    """Objects are compared by identity, so that an equal copy of a weight or a config is a change."""
    return [
        (name, type(module), id(module), module.training, _attributes(module), _config(module))
        for name, module in model.named_modules()
    ]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Registries by what is in them, hooks among that."""
    return {
        name: [(key, id(each)) for key, each in value.items()]
        if isinstance(value, dict)
        else id(value)
        for name, value in vars(module).items()
        if not isinstance(value, (bool, int, float))
    }


def _config(module: Any) -> Any:
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None), getattr(config, "heads_kernels", None)


Call = tuple[Tensor, Tensor, Tensor, Tensor, bool]


def calls(model: Any, arguments: dict[str, Tensor]) -> dict[str, list[Call]]:
    """For each run of each layer of a stock model: inputs of queries and keys, which are real, whether causal."""
    found: dict[str, list[Call]] = {}
    real = arguments.get("attention_mask")
    target = arguments.get("decoder_attention_mask", real)

    def keep(layer: Any) -> Any:
        def hook(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = named["hidden_states"] if "hidden_states" in named else positional[0]
            y = named.get("key_value_states")
            y = named.get("encoder_hidden_states") if y is None else y
            y = x if y is None or layer.kind != "cross" else y
            rows, keys = real, real
            if layer.kind != "encoder":
                rows = target
                keys = real if layer.kind == "cross" else target
            rows = torch.ones(x.shape[:2]) if rows is None else rows
            keys = torch.ones(y.shape[:2]) if keys is None else keys
            call = x.detach(), y.detach(), rows.bool(), keys.bool(), layer.kind == "decoder"
            found.setdefault(layer.name, []).append(call)

        return hook

    handles = [
        layer.module.register_forward_pre_hook(keep(layer), with_kwargs=True)
        for layer in attention_layers(model)
    ]
    with torch.no_grad():
        model(**arguments)
    for handle in handles:
        handle.remove()
    return found


def by_hand(runs: list[Call]) -> Moments:
    """Row after row."""
    x, y = runs[0][:2]
    count, total = 0, torch.zeros(x.shape[-1], dtype=torch.float64)
    query_outer = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float64)
    key_outer = torch.zeros(y.shape[-1], y.shape[-1], dtype=torch.float64)
    for x, y, rows, keys, causal in runs:
        for b in range(len(x)):
            for t in rows[b].nonzero().flatten().tolist():
                seen = keys[b].clone()
                if causal:
                    seen[t + 1 :] = False
                row, among = x[b, t].double(), y[b][seen].double()
                count += 1
                total += row
                query_outer += torch.outer(row, row)
                key_outer += torch.cov(among.T, correction=0)
    return Moments(torch.tensor(count), total, query_outer, key_outer)


def assert_moments(found: Moments, expected: Moments) -> None:
    assert int(found.count) == int(expected.count)
    for name in ("query_sum", "query_outer", "key_outer"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == torch.float64
        assert_alike(one, other, dtype=torch.float32)
