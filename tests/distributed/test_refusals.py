"""What no process may compute alone is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk

tensor = pytest.importorskip("torch.distributed.tensor", reason="PyTorch without distributed")
parallel = pytest.importorskip("torch.distributed.tensor.parallel")
fsdp = pytest.importorskip("torch.distributed.fsdp")
dist = torch.distributed

E, H, T = 16, 4, 6


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """One process, which is all that refusals need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def operands(operator: str) -> dict[str, Tensor]:
    if operator == "gated_attention":
        return {name: torch.randn(2, H, T, 8) for name in ("query", "key", "value")}
    shared = {name: torch.randn(2, T, 8) for name in ("query", "key")}
    return {**shared, "value": torch.randn(2, H, T, 8), "mixing": torch.randn(H, 8)}


# ---------------------------------------------------------------------- operators
@pytest.mark.parametrize("operator", ["gated_attention", "collaborative_attention"])
def test_context_parallel(operator: str, mesh: Any) -> None:
    experimental = pytest.importorskip("torch.distributed.tensor.experimental")
    arguments = operands(operator)
    call = getattr(hk, operator)
    expected = call(**arguments)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    compiled(**arguments)
    buffers = [torch.randn(2, 1, T, 8)]
    with experimental.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2]):
        with pytest.raises(
            ValueError, match=r"query is a part of a sequence, inside .*context_par"
        ):
            call(**arguments)
        with pytest.raises(RuntimeError):  # which Dynamo raises instead
            compiled(**arguments)
    torch.testing.assert_close(call(**arguments), expected)


# ---------------------------------------------------------------------- modules
def tensor_parallel(layer: nn.Module, mesh: Any, *columns: str) -> nn.Module:
    plan: dict[str, Any] = {name: parallel.ColwiseParallel() for name in columns}
    return parallel.parallelize_module(layer, mesh, plan | {"out_proj": parallel.RowwiseParallel()})


def test_converted_layers_under_tensor_parallelism(mesh: Any) -> None:
    pytest.importorskip("transformers", reason="a model of transformers")
    from tests.support.tiny_models import build, outputs

    model = build("bert")
    hk.convert.collaborate(model, 16, progress=False)
    attention = model.encoder.layer[1].attention.self
    content = attention.key.content
    parallel.parallelize_module(attention, mesh, {"key.content": parallel.ColwiseParallel()})
    assert attention.key.content is content
    with pytest.raises(ValueError, match=r"key\.content\.weight is a DTensor"):
        outputs(model)


def test_noise_of_gates_under_tensor_parallelism(mesh: Any) -> None:
    layer, x = hk.nn.GatedMultiheadAttention(E, H), torch.randn(2, T, E)
    tensor_parallel(layer, mesh, "q_proj", "k_proj", "v_proj")
    layer(x)
    layer.head_gate = hk.nn.FixedGate(torch.tensor([1.0, 0.0, 1.0, 0.5]))
    layer(x)
    layer.head_gate = hk.nn.HardConcrete(H)
    with pytest.raises(
        ValueError, match=r"head_gate draws noise .*; put their mesh into head_gate\.meshes"
    ):
        layer(x)
    layer.eval()
    layer(x)
    layer.train().head_gate.meshes = (mesh,)
    layer(x)


def test_sharded_models_get_no_gates_and_are_not_cut(mesh: Any) -> None:
    model = nn.Sequential(hk.nn.GatedMultiheadAttention(E, H))
    fsdp.fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"layer 0 .*is sharded .*before fully_shard"):
        hk.heads.gate(model, hk.nn.HardConcrete)
    with pytest.raises(ValueError, match=r"layer 0 .*is sharded over processes"):
        hk.heads.prune(model, {0: [1]})
    with pytest.raises(ValueError, match=r"layer 0 .*is sharded over processes"):
        hk.convert.collaborate(model, 8)
