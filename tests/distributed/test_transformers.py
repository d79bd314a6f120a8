"""Models of transformers over processes: some heads each, a part of every sequence, rows of an unpadded batch."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import parallel
from torch.nn.parallel import DistributedDataParallel

import heads_kernels as hk
from heads_kernels.integrations import distributed
from tests.support.alike import assert_alike
from tests.support.nn_layers import backward
from tests.support.processes import mesh_of, whole
from tests.support.refusals import assert_refused
from tests.support.tiny_models import build, packed_layers, small


# ---------------------------------------------------------------------- some heads
def split(model: nn.Module, mesh: Any) -> nn.Module:
    """As `from_pretrained(..., tp_plan="auto")` does for Llama."""
    column, row = parallel.ColwiseParallel, parallel.RowwiseParallel
    plan = {f"layers.*.self_attn.{name}_proj": column() for name in "qkv"}
    plan |= {f"layers.*.mlp.{name}_proj": column() for name in ("gate", "up")}
    plan |= {"layers.*.self_attn.o_proj": row(), "layers.*.mlp.down_proj": row()}
    parallel.parallelize_module(model, mesh, plan)
    return model


GATES = ("one sample", "per sample", "head mask")
CHECKS = [
    *(("llama", gates, order) for gates in GATES for order in ("gates first", "split first")),
    *((family, gates, "converted") for family in ("llama", "bert") for gates in GATES[::2]),
]


@pytest.mark.processes(2)
@pytest.mark.parametrize(("family", "gates", "order"), CHECKS)
def test_gates(family: str, gates: str, order: str) -> None:
    """Converted layers are split by the plan of the package, which hands the mesh to gates."""
    mesh = mesh_of(2)
    tokens = torch.arange(12).view(2, 6)
    results: list[dict[str, Tensor]] = []
    for parts in (False, True):
        model = small(family, "heads_kernels")
        if order == "converted":
            torch.manual_seed(3)
            hk.convert.collaborate(model, 16, progress=False)
        hk.integrations.transformers.use(model)
        if parts and order == "split first":
            split(model, mesh)
        options = {}
        if gates == "head mask":
            H, layers = model.config.num_attention_heads, model.config.num_hidden_layers
            options = {"head_mask": torch.linspace(0, 1, H).expand(layers, H)}
        else:
            torch.manual_seed(1)  # the same gates in every process
            hk.heads.gate(model, lambda H: hk.nn.HardConcrete(H, per_sample=gates == "per sample"))
        if parts and order == "converted":
            plan = distributed.tensor_parallel_plan(model, mesh)
            parallel.parallelize_module(model, mesh, plan)
        if parts and order == "gates first":
            split(model, mesh)
            if gates != "head mask":  # a plan of the caller's own does not hand the mesh to gates
                model(tokens)  # in evaluation mode
                words = r"head_gate draws noise of its own.*; put their mesh into head_gate\.meshes"
                assert_refused((lambda model=model, words=words: model.train()(tokens), words))
            for module in model.modules():
                if isinstance(module, hk.nn.HardConcrete):
                    module.meshes = (mesh,)
        for part in model.train().modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        torch.manual_seed(4 + (torch.distributed.get_rank() if parts else 0))
        found = backward(model, model(tokens, **options).last_hidden_state)
        results.append({name: whole(each) for name, each in found.items()})
    assert_alike(results[1], results[0])


# ---------------------------------------------------------------------- a part of every sequence
T = 16


def model_of(family: str, gates: bool = False) -> Any:
    """A model in use, without a pooler, whose output belongs to a whole sequence."""
    torch.manual_seed(0)
    model: Any = small(family, "heads_kernels")
    if family == "bert":
        model = type(model)(model.config, add_pooling_layer=False)
    hk.integrations.transformers.use(model)
    if gates:
        hk.heads.gate(model, lambda H: hk.nn.FixedGate(torch.linspace(0.0, 1.5, H)))
    return model.eval()


def inputs(padding: str, length: int = T) -> dict[str, Tensor]:
    tokens = torch.arange(2 * length).view(2, length) % 30 + 3
    real = torch.ones(2, length, dtype=torch.int64)
    positions = torch.arange(length).expand(2, length)
    if padding == "left":
        real[0, :5] = 0
        positions = (real.cumsum(1) - 1).clamp(min=0)
    if padding == "right":
        real[1, 6:] = 0
    given = {"input_ids": tokens, "position_ids": positions}
    return given if padding == "none" else {**given, "attention_mask": real}


#: Family, padding, method, gates, tokens and processes.
CASES: list[tuple[str, str, dict[str, Any], bool, int, int]] = [
    *(
        (family, padding, {"method": "all_gather"}, False, T, 2)
        for family in ("llama", "mistral", "gpt2", "bert")
        for padding in ("ones", "left")
    ),
    *((family, "none", {"method": "ring"}, False, T, 4) for family in ("llama", "bert")),
    *(("llama", "right", how, True, T, 2) for how in ({"method": "ring"}, {"balanced": True})),
    *(
        (family, padding, {"method": method}, True, 2, 2)
        for family, padding in (("llama", "none"), ("bert", "ones"))
        for method in ("all_gather", "ring")
    ),
]


@pytest.mark.processes("world")
@pytest.mark.parametrize(("family", "padding", "how", "gates", "length", "world"), CASES)
def test_parts_are_parts_of_the_whole(
    family: str, padding: str, how: dict[str, Any], gates: bool, length: int, world: int
) -> None:
    mesh = mesh_of(world)
    results: list[dict[str, Tensor]] = []
    whole = inputs(padding, length)
    real = whole.get("attention_mask", torch.ones(2, length))[..., None]
    for parts in (False, True):
        model = model_of(family, gates)
        given, weight = whole, real
        if parts:
            distributed.context_parallel(model, mesh, **how)
            context = distributed.ContextParallel(mesh, **how)
            given = {name: context.split(each, 1) for name, each in whole.items()}
            weight = context.split(real, 1)
        out = model(**given).last_hidden_state * weight
        (out * torch.linspace(-1, 1, out.shape[-1])).square().sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if parts:
            out = context.join(out.detach(), 1)
            for grad in grads.values():
                torch.distributed.all_reduce(grad)
        results.append({"out": out.detach(), **grads})
    assert_alike(results[1], results[0])


@pytest.mark.processes(2)
def test_models_and_arguments_that_are_refused() -> None:
    use, mesh = hk.integrations.transformers.use, mesh_of(2)
    model, both = model_of("llama"), mesh_of(1, 2, names=("tp", "cp"))
    for each, of_mesh, words in (
        (small("llama", "sdpa"), mesh, "call hk.integrations.transformers.use"),
        (use(small("llama", "heads_kernels"), unpad=True), mesh, "unpad=True"),
        (use(small("t5", "heads_kernels")), mesh, "encoder-decoder"),
        (use(small("bert", "heads_kernels")), mesh, "not one for each token"),
        (use(small("qwen3_next", "heads_kernels")), mesh, "are not those for whole sequences"),
        (model, both, "two dimensions"),
    ):
        assert_refused(((each, of_mesh), f".*{words}"), of=distributed.context_parallel)
        assert not any(getattr(module, "context", None) for module in each.modules())
    distributed.context_parallel(model, mesh)
    context = distributed.ContextParallel(mesh)
    given = {name: context.split(each, 1) for name, each in inputs("left").items()}
    assert_refused(
        ({"position_ids": None}, "position_ids is not given"),
        ({"attention_mask": inputs("left")["attention_mask"]}, "attention_mask has shape"),
        ({"labels": given["input_ids"]}, "labels is given"),
        ({"use_cache": True}, "use_cache"),
        ({"output_attentions": True}, "output_attentions"),
        (
            {"attention_mask": None, "position_ids": torch.arange(T // 2).expand(2, -1) % 3},
            "attention_mask .* packed sequences and chunks",
        ),
        of=partial(model, **given),
    )
    model.layers[1].self_attn.context = None
    assert_refused((lambda: model(**given), "in which a LlamaAttention has no context; set"))


TASKS = {"bert": "BertForMaskedLM", "llama": "LlamaForCausalLM"}


def gradients(model: Any, rows: slice, passes: int) -> dict[str, Tensor]:
    """Of a loss that is a sum over tokens, whose passes accumulate."""
    ids = torch.randint(3, 40, (4, 9), generator=torch.Generator().manual_seed(7))
    real = torch.arange(9) < torch.tensor([9, 9, 3, 6])[:, None]  # the first half has no padding
    for _ in range(passes):
        logits = model(ids[rows], attention_mask=real[rows].long()).logits
        logits[real[rows]].square().sum().backward()
    named = model.named_parameters()
    return {n.removeprefix("module."): p.grad for n, p in named if p.grad is not None}


@pytest.mark.processes(2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_data_parallel(name: str, checkpointing: bool) -> None:
    rank = torch.distributed.get_rank()
    expected = gradients(build(name, model=TASKS[name]), slice(0, 4), 2)
    model = hk.integrations.transformers.use(build(name, model=TASKS[name]), unpad=True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parallel = DistributedDataParallel(model)
    found = gradients(parallel, slice(2 * rank, 2 * rank + 2), 2)
    assert_alike({n: 2 * each for n, each in found.items()}, expected)  # a mean of two processes
    assert all(packed_layers(model)) == (rank == 1)


# ---------------------------------------------------------------------- sharded weights
@pytest.mark.processes(2)
@pytest.mark.parametrize("first", ["use", "fully_shard"])
@pytest.mark.parametrize("family", ["afmoe", "bloom"])
def test_fully_sharded_attention(family: str, first: str) -> None:
    """Attention modules are sharded by themselves, which changes their classes."""
    mesh = mesh_of(2)
    use, release = hk.integrations.transformers.use, hk.integrations.transformers.release
    stock, model, plain = (small(family, "eager") for _ in range(3))
    tokens, mask = torch.arange(12).view(2, 6), torch.rand(stock.config.num_attention_heads)
    if first == "use":
        use(model)
    for each in (stock, model):
        for name, part in list(each.named_modules()):
            if name.endswith(("self_attn", "self_attention")):
                fsdp.fully_shard(part, mesh=mesh)
        fsdp.fully_shard(each, mesh=mesh)
    if first == "fully_shard":
        use(model)
    assert_alike(model(tokens, head_mask=mask)[0], use(plain)(tokens, head_mask=mask)[0])
    release(model)
    for own, before in zip(model.modules(), stock.modules(), strict=True):
        assert type(own).__bases__ == type(before).__bases__
    assert len(set(map(type, model.modules()))) == len(set(map(type, stock.modules())))
    assert torch.equal(model(tokens)[0], stock(tokens)[0])
