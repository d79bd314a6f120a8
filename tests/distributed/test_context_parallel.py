"""Attention of parts of sequences is that of whole sequences in one process."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import parallel
from torch.utils._pytree import tree_leaves

import heads_kernels as hk
from heads_kernels.integrations import distributed
from tests.ops.calls import tensors, with_offsets
from tests.support.alike import assert_alike
from tests.support.dispatched import Ops
from tests.support.processes import Processes, mesh_of, whole
from tests.support.refusals import assert_refused

B, H, T, D = 2, 4, 24, 8
REAL = torch.ones(B, T, dtype=torch.bool)
REAL[0, 17:] = False
REAL[1, 3] = False
MASKS = {
    "none": None,
    "causal": hk.Mask(causal=True),
    "padding": hk.Mask(causal=True, key_mask=REAL, query_mask=REAL),
    "window": hk.Mask(causal=True, window=(5, 0)),
    "documents": hk.Mask(document_ids=torch.arange(T) // 7) & hk.Mask(causal=True),
    "prefix": hk.Mask(causal=True, prefix_lengths=[7, 12]),
    "windows by head": hk.Mask(causal=True, window=[(-1, 0), (5, 0), (0, 0), (9, -1)], first_keys=[0, 2, 7, 1]),
    "dense": torch.arange(T)[:, None] % 5 != torch.arange(T) % 3,
    "dense by head": torch.arange(H)[:, None, None] % 3 != (torch.arange(T) % 5)[:, None] - torch.arange(T) % 3,
}
GATES = {
    "no gate": None,
    "[H]": torch.tensor([0.5, 0.0, 0.0, 1.0]),
    "[B, H]": torch.tensor([[0.5, 0.0, 0.3, 1.0], [0.0, 0.0, 1.0, 2.0]]),
    "[B, H, T]": torch.linspace(-1, 1, B * H * T).view(B, H, T),
    "[B, H, 1]": torch.linspace(0, 2, B * H).view(B, H, 1),
    "[B, H, T, Dv]": torch.linspace(-1, 1, B * H * T * D).view(B, H, T, D),
}
HOW = {
    "all_gather": {"method": "all_gather"},
    "balanced": {"method": "all_gather", "balanced": True},
    "ring": {"method": "ring"},
    "balanced ring": {"method": "ring", "balanced": True},
}
OPERATORS = pytest.mark.parametrize("operator", ["gated_attention", "collaborative_attention"])
#: What a process has a part of, and along which dimension.
PARTS = {"query": -2, "key": -2, "value": -2, "content_bias": -1}


def operands(operator: str, gate: str, Hk: int, length: int) -> dict[str, Tensor]:
    """`Hk` is the number of heads of values, and of keys where heads have their own."""
    torch.manual_seed(0)
    width = 12 if operator == "collaborative_attention" else D
    sizes = {"B": B, "H": H, "Hk": Hk, "Hv": Hk, "T": length, "S": length, "D": width, "Dv": D}
    given = tensors(operator, **sizes, dtype=torch.float32) | {"sinks": torch.randn(H)}
    if (factors := GATES[gate]) is not None:
        given["gate"] = factors[:, :, :length] if factors.dim() > 2 else factors
    return given


# ---------------------------------------------------------------------- in every rank
def context_of(method: str = "all_gather", **options: Any) -> Any:
    """Of all processes."""
    mesh = mesh_of(torch.distributed.get_world_size())
    return distributed.ContextParallel(mesh, method, **options)


def parts_of(context: Any, given: dict[str, Tensor], dims: dict[str, int] = PARTS) -> dict[str, Tensor]:
    """What this process has of operands, as leaves."""
    return {
        name: (context.split(t, dims[name]) if name in dims else t.clone()).requires_grad_()
        for name, t in given.items()
    }


def check_call(operator: str, gate: str, how: dict[str, Any], Hk: int = H, length: int = T, **options: Any) -> None:
    """Parts of the output, and gradients that add up to those of one process, an `offset_table`'s too."""
    context = context_of(**how)
    given = operands(operator, gate, Hk, length)
    if "offset_table" in options:
        given["offset_table"] = options.pop("offset_table")
    call = getattr(hk, operator)

    def run(function: Any, leaves: dict[str, Tensor]) -> Tensor:
        return function(**with_offsets(leaves | options))

    dout = torch.randn(B, H, length, D)
    plain = parts_of(context, given, {})
    torch.manual_seed(3)
    expected = run(call, plain)
    expected.backward(dout)
    dims = dict(PARTS)
    if gate.startswith("[B, H, T"):
        dims["gate"] = 2
    mine = parts_of(context, given, dims)
    torch.manual_seed(3 + torch.distributed.get_rank())
    out = run(partial(context, call), mine)
    out.backward(context.split(dout, 2))
    assert_alike(out.detach(), context.split(expected.detach(), 2))
    for name, t in mine.items():
        want = plain[name].grad
        if name in dims:
            assert_alike(t.grad, context.split(want, dims[name]), name=name)
        else:
            torch.distributed.all_reduce(t.grad)
            assert_alike(t.grad, want, name=name)


@OPERATORS
@pytest.mark.processes(4)
def test_memory_of_a_ring(operator: str) -> None:
    """No process of a ring has all keys or values, forward or backward."""
    length, W = 256, torch.distributed.get_world_size()
    largest = {}
    for method in ("all_gather", "ring"):
        context = context_of(method)
        parts = parts_of(context, operands(operator, "[H]", H, length))
        with Ops() as ops:
            context(getattr(hk, operator), **parts).sum().backward()
        returned = tree_leaves([out for *_, out in ops.ran])
        largest[method] = max(each.numel() for each in returned if isinstance(each, Tensor))
    values = B * H * length * D
    assert largest["all_gather"] >= values
    assert largest["ring"] <= 2 * values // W  # twice: the parts that are merged


@OPERATORS
@pytest.mark.processes(4)
def test_half_precision_of_a_ring(operator: str) -> None:
    """In bfloat16 a ring has the error of one call on whole sequences, and that of rounding what each block adds.

    The gradients of a block are rounded like those of the call, independently: W of them, which add up to sqrt(W).
    """
    context, call = context_of("ring"), getattr(hk, operator)
    given = {name: t.bfloat16() for name, t in operands(operator, "[H]", H, T).items()}
    exact = {name: t.double().requires_grad_() for name, t in given.items()}
    one, parts = parts_of(context, given, {}), parts_of(context, given)
    dout = torch.randn(B, H, T, D).bfloat16()
    call(**exact).backward(dout.double())
    call(**one).backward(dout)
    context(call, **parts).backward(context.split(dout, 2))
    most = 1 + torch.distributed.get_world_size() ** 0.5
    for name in [name for name in PARTS if name in given]:  # in one order in all processes
        joined = context.join(parts[name].grad, PARTS[name])
        error, of_one_call = ((each.double() - exact[name].grad).norm() for each in (joined, one[name].grad))
        assert error <= most * of_one_call, (name, error, of_one_call)


@pytest.mark.processes(4)
def test_sums_of_a_ring() -> None:
    """Gradients of bfloat16 queries and values are summed in float32: 256 and three times 1/2 is 256 in bfloat16."""
    first = torch.distributed.get_rank() == 0
    sign = 1.0 - 2.0 * (torch.distributed.get_rank() % 2)  # of values, so that the output is 0
    large = 1024.0 if first else 2.0
    parts = [torch.full((1, 1, 1, 1), each).bfloat16().requires_grad_() for each in (0.0, sign * large, sign)]
    out = context_of("ring")(hk.gated_attention, **dict(zip(PARTS, parts, strict=False)))  # probabilities of 1/4
    out.backward(torch.full_like(out, large))
    assert (parts[0].grad, parts[2].grad) == (258 * large, 258)


@OPERATORS
@pytest.mark.processes("W")
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("W", [2, 3, *(pytest.param(each, marks=pytest.mark.release) for each in (1, 4))])
def test_table(operator: str, how: dict[str, Any], W: int) -> None:
    """Every operand and kind of gate of one token a process or two; between two processes masks and options, too."""
    table = torch.linspace(-1, 1, H * 7).view(H, 7)
    for gate in GATES:
        if how.get("balanced"):
            check_call(operator, gate, how, length=2 * W)
        else:
            check_call(operator, gate, how, length=W, offset_table=table, softcap=2.0)
    if W != 2:
        return
    for mask in MASKS.values():
        check_call(operator, "[B, H, T]", how, attn_mask=mask)
    check_call(operator, "[H]", how, 2)
    check_call(operator, "[B, H]", how, is_causal=True, closed_grad=False)
    check_call(operator, "no gate", how, softcap=2.0, is_causal=True)
    if not how.get("balanced"):  # dropout draws the elements of the whole
        check_call(operator, "no gate", how, dropout_p=0.4)
        slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
        check_call(operator, "no gate", how, bias=hk.OffsetBias.alibi(slopes))


#: Dropout where heads are split, too; it is refused where parts are balanced.
SPLIT = [
    *((shape, how, 0.0) for shape in ((1, 2), (2, 2)) for how in HOW),
    *(((2, 2), how, 0.3) for how in ("all_gather", "ring")),
    pytest.param((1, 2), "ring", 0.3, marks=pytest.mark.check),
]


@pytest.mark.processes("shape")
@pytest.mark.parametrize(("shape", "name", "dropout"), SPLIT)
def test_layers(shape: tuple[int, int], name: str, dropout: float) -> None:
    """Sequences and, of two processes each, heads are split: outputs, and gradients summed over sequences."""
    mesh, how = mesh_of(*shape, names=("tp", "cp")), HOW[name]
    results = []
    x = torch.randn(B, T, 16, dtype=torch.float64)
    for split in (False, True):
        torch.manual_seed(0)
        gated, shared = hk.nn.GatedMultiheadAttention, hk.nn.CollaborativeMultiheadAttention
        layers = [
            gated(16, H, output_gate="element", dropout=dropout),
            gated(16, H, dropout=dropout),
            shared(16, H, 12, dropout=dropout),
            gated(16, H, num_key_heads=1, dropout=dropout),
        ]
        model = nn.ModuleList(layers).double()
        hk.heads.gate(model, lambda n: hk.nn.HardConcrete(n, log_alpha="voita"))
        given = x
        if split and shape[0] == 1:
            distributed.context_parallel(model, mesh["cp"], **how)
        elif split:
            plan = distributed.tensor_parallel_plan(model, mesh["tp"])
            parallel.parallelize_module(model, mesh["tp"], plan)
            distributed.context_parallel(model, mesh["tp", "cp"], **how)
        if split:
            context = distributed.ContextParallel(mesh["cp"], **how)
            given = context.split(x, 1)
        torch.manual_seed(5 + (torch.distributed.get_rank() if split else 0))
        for layer in model:
            given = given + layer(given, key_padding_mask=~REAL, is_causal=True)[0]
        given.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        # A key's bias adds the same to all scores of a row: its gradient is 0, and what is left is rounding.
        grads = {name: grad for name, grad in grads.items() if not name.endswith("k_proj.bias")}
        if split:
            grads = {name: whole(grad) for name, grad in grads.items()}
            for gradient in grads.values():
                torch.distributed.all_reduce(gradient, group=mesh.get_group("cp"))
            given = context.join(given, 1)
        results.append({"out": given.detach(), **grads})
    assert_alike(results[1], results[0])


def check_death() -> None:
    """The other process is gone: an error, and no endless wait."""
    context = context_of()
    if torch.distributed.get_rank() == 1:
        os._exit(1)
    q = torch.randn(B, H, T, D)
    context(hk.gated_attention, query=q, key=q, value=q)


# ---------------------------------------------------------------------- in this process
@pytest.mark.check
def test_a_process_that_dies() -> None:
    processes = Processes(2)
    with pytest.raises(AssertionError, match=r"rank [01]"):
        processes.run(check_death, limit=100)
    processes.close()


def test_positions(fake_mesh: Callable[..., Any]) -> None:
    """Of the first of four processes; balanced it has the first and the last of eight blocks."""
    mesh = fake_mesh(4)
    context = distributed.ContextParallel(mesh)
    assert context.positions(16).tolist() == [0, 1, 2, 3]
    assert_refused((lambda: context.split(torch.zeros(21), 0), "pad it to a multiple of 4"))
    balanced = distributed.ContextParallel(mesh, balanced=True)
    assert balanced.positions(16).tolist() == [0, 1, 14, 15]


# ---------------------------------------------------------------------- refusals
def test_calls_that_are_refused(fake_mesh: Callable[..., Any]) -> None:
    mesh, bias = fake_mesh(4), torch.zeros(6, 6)

    def call(how: dict[str, Any], options: dict[str, Any], length: int = 6, operator: Any = hk.gated_attention) -> None:
        q = torch.randn(B, H, length, D)
        distributed.ContextParallel(mesh, **how)(operator, query=q, key=q, value=q, **options)

    assert_refused(
        (({"method": "p2p"}, {}), r"method is 'p2p'; use one of 'all_gather', 'ring'"),
        (({"balanced": True}, {}, 5), r"sequence has 20 tokens, .* multiple of 8"),
        (({}, {"bias": bias}), r"bias is a tensor"),
        (({"method": "ring"}, {"bias": bias}), r"bias is a tensor"),
        (({"balanced": True}, {"dropout_p": 0.5}), r"dropout_p is 0\.5; .*balanced=False"),
        (({"method": "ring"}, {"dropout_p": 0.5}), r"dropout_p is 0\.5, .* 6 tokens each; .* multiple of 4"),
        (({}, {"return_lse": True}), r"return_lse is True"),
        (({}, {}, 6, hk.entmax_attention), r"operator is entmax_attention; pass hk\.gated"),
        of=call,
    )


@OPERATORS
def test_a_call_inside_of_torchs_own(operator: str, fake_mesh: Callable[..., Any]) -> None:
    """Which would take the call for one of whole sequences."""
    reason = "this PyTorch has no torch.distributed.tensor.experimental"
    experimental = pytest.importorskip("torch.distributed.tensor.experimental", reason=reason)
    call, arguments = getattr(hk, operator), operands(operator, "no gate", H, T)
    expected = call(**arguments)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    compiled(**arguments)
    buffers = {"buffers": [torch.randn(2, 1, T, 8)], "buffer_seq_dims": [2]}
    with experimental.context_parallel(fake_mesh(1), **buffers):
        assert_refused((lambda: call(**arguments), r"query is a part of a sequence, inside .*context_p"))
        with pytest.raises(RuntimeError):  # which Dynamo raises instead
            compiled(**arguments)
    assert_alike(call(**arguments), expected)


def test_tensor_parallelism_without_its_dimension(fake_mesh: Callable[..., Any]) -> None:
    mesh = fake_mesh(2, 2, 1, names=("tp", "cp", "dp"))
    layer = hk.nn.GatedMultiheadAttention(16, H)
    plan = distributed.tensor_parallel_plan(layer, mesh["tp"])
    parallel.parallelize_module(layer, mesh["tp"], plan)
    distributed.context_parallel(layer, mesh["cp"])
    assert_refused(
        (lambda: layer(torch.randn(B, 6, 16)), r"query is a DTensor .*dimensions: mesh\['tp', 'cp'\]"),
        (lambda: distributed.ContextParallel(mesh), "mesh has 3 dimensions"),
    )


def test_layers_that_read_whole_sequences(fake_mesh: Callable[..., Any]) -> None:
    layer, mesh = hk.nn.GatedMultiheadAttention(16, H), fake_mesh(2)
    x = torch.randn(B, 6, 16)
    distributed.context_parallel(layer, mesh)
    assert_refused(
        (lambda: distributed.context_parallel(nn.Linear(3, 3), mesh), r"module is a Linear"),
        (lambda: layer(x, cache=hk.nn.KeyValueCache()), "cache is given, but the layer is under context"),
    )
    layer.context = None
    with torch.no_grad():
        layer(x, cache=hk.nn.KeyValueCache())
