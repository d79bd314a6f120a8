"""Models of transformers whose processes have a part of every sequence are those of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.processes import Processes

distributed = pytest.importorskip("heads_kernels.integrations.distributed")
pytest.importorskip("transformers", reason="models of transformers")

T = 16


def model_of(family: str, gates: bool = False) -> Any:
    """A model in use, without a pooler, whose output belongs to a whole sequence."""
    from tests.support.tiny_models import small

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


# ---------------------------------------------------------------------- in every rank
def check(family: str, padding: str, how: dict[str, Any], gates: bool, length: int = T) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
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


#: Family, padding, method, gates, tokens (a process with one is asked for what the others are) and processes.
CASES: list[tuple[str, str, dict[str, Any], bool, int, int]] = [
    *(
        (family, padding, {"method": "all_gather"}, False, T, 2)
        for family in ("llama", "mistral", "gpt2", "bert")
        for padding in ("ones", "left")
    ),
    *((family, "none", {"method": "ring"}, False, T, 4) for family in ("llama", "bert")),
    *(("llama", "right", how, True, T, 2) for how in ({"method": "ring"}, {"balanced": True})),
    *(
        (family, padding, {"method": method, "length": 3}, True, 3, 2)
        for family, padding in (("llama", "none"), ("bert", "ones"))
        for method in ("all_gather", "ring")
    ),
]


@pytest.mark.parametrize(("family", "padding", "how", "gates", "length", "world"), CASES)
def test_parts_are_parts_of_the_whole(
    family: str,
    padding: str,
    how: dict[str, Any],
    gates: bool,
    length: int,
    world: int,
    ranks: Callable[[int], Processes],
) -> None:
    ranks(world).run(check, family, padding, how, gates, length)


# ---------------------------------------------------------------------- what is refused
def refusals() -> None:
    from tests.support.tiny_models import small

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    use = hk.integrations.transformers.use
    split = distributed.context_parallel
    for model, words in (
        (small("llama", "sdpa"), "call hk.integrations.transformers.use"),
        (use(small("llama", "heads_kernels"), unpad=True), "unpad=True"),
        (use(small("t5", "heads_kernels")), "encoder-decoder"),
        (use(small("bert", "heads_kernels")), "not one for each token"),
        (use(small("qwen3_next", "heads_kernels")), "are not those for whole sequences"),
    ):
        with pytest.raises(ValueError, match=words):
            split(model, mesh)
        assert not any(getattr(each, "context", None) for each in model.modules())
    model = model_of("llama")
    both = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "cp"))
    with pytest.raises(ValueError, match="two dimensions"):
        split(model, both)
    split(model, mesh)
    context = distributed.ContextParallel(mesh)
    given = {name: context.split(each, 1) for name, each in inputs("left").items()}
    for wrong, words in (
        ({"position_ids": None}, "position_ids is not given"),
        ({"attention_mask": inputs("left")["attention_mask"]}, "attention_mask has shape"),
        ({"labels": given["input_ids"]}, "labels is given"),
        ({"use_cache": True}, "use_cache"),
        ({"output_attentions": True}, "output_attentions"),
    ):
        with pytest.raises(ValueError, match=words):
            model(**{**given, **wrong})
    packed = {**given, "position_ids": torch.arange(T // 2).expand(2, -1) % 3}
    del packed["attention_mask"]
    with pytest.raises(ValueError, match="packed sequences and chunks"):
        model(**packed)


def test_refused(ranks: Callable[[int], Processes]) -> None:
    ranks(2).run(refusals)
