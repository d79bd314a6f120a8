"""Models of transformers under tensor parallelism, whose attention gets the heads of its process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.processes import Processes, whole

parallel = pytest.importorskip("torch.distributed.tensor.parallel")
pytest.importorskip("transformers", reason="models of transformers")


def split(model: nn.Module, mesh: Any) -> nn.Module:
    """As `from_pretrained(..., tp_plan="auto")` does for Llama."""
    column, row = parallel.ColwiseParallel, parallel.RowwiseParallel
    plan = {f"layers.*.self_attn.{name}_proj": column() for name in "qkv"}
    plan |= {f"layers.*.mlp.{name}_proj": column() for name in ("gate", "up")}
    plan |= {"layers.*.self_attn.o_proj": row(), "layers.*.mlp.down_proj": row()}
    parallel.parallelize_module(model, mesh, plan)
    return model


def set_gates(model: Any, gates: str) -> dict[str, Tensor]:
    """The same in every process; head masks are arguments of a pass."""
    H, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    if gates == "head mask":
        return {"head_mask": torch.linspace(0, 1, H).expand(layers, H)}
    torch.manual_seed(1)
    hk.heads.gate(model, lambda H: hk.nn.HardConcrete(H, per_sample=gates == "per sample"))
    return {}


def check(gates: str, order: str) -> None:
    from tests.support.tiny_models import small

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    tokens = torch.arange(12).view(2, 6)
    results: list[dict[str, Tensor]] = []
    for parts in (False, True):
        model = small("llama", "heads_kernels")
        hk.integrations.transformers.use(model)
        if parts and order == "split first":
            split(model, mesh)
        options = set_gates(model, gates)
        if parts and order == "gates first":
            split(model, mesh)
            if gates != "head mask":
                with pytest.raises(ValueError, match="head_gate draws noise of its own"):
                    model.train()(tokens)
            for module in model.modules():
                if isinstance(module, hk.nn.HardConcrete):
                    module.meshes = (mesh,)
        torch.manual_seed(4 + (torch.distributed.get_rank() if parts else 0))
        out = model.train()(tokens, **options).last_hidden_state
        out.square().sum().backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        results.append({"out": out.detach(), **grads})
    assert_alike(results[1], results[0])


@pytest.mark.parametrize("order", ["gates first", "split first"])
@pytest.mark.parametrize("gates", ["one sample", "per sample", "head mask"])
def test_gates(gates: str, order: str, ranks: Callable[[int], Processes]) -> None:
    ranks(2).run(check, gates, order)


def check_converted(family: str, gates: str) -> None:
    from tests.support.tiny_models import small, with_gradients

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    results = []
    for parts in (False, True):
        model = small(family, "heads_kernels")
        torch.manual_seed(3)
        hk.convert.collaborate(model, 16, progress=False)
        hk.integrations.transformers.use(model)
        changes = set_gates(model, gates)
        if parts:
            plan = hk.integrations.distributed.tensor_parallel_plan(model, mesh)
            parallel.parallelize_module(model, mesh, plan)
        for part in model.train().modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        found = with_gradients(model, **changes)
        results.append({name: whole(each) for name, each in found.items()})
    assert_alike(results[1], results[0])


@pytest.mark.parametrize("gates", ["gates", "head mask"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_converted_layers(family: str, gates: str, ranks: Callable[[int], Processes]) -> None:
    ranks(2).run(check_converted, family, gates)
