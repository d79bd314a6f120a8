"""What holds of every attention module, whatever it computes."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, B, E, Gates, H, S, T, assert_as_accurate_as, gradients, spread
from tests.support.refusals import assert_refused

Module = Any  # one of hk.nn, with float64 weights unless asked otherwise


gated = partial(hk.nn.GatedMultiheadAttention, E, H)
collaborative = partial(hk.nn.CollaborativeMultiheadAttention, E, H, 10)
MODULES: dict[str, Callable[..., Module]] = {
    "gated": gated,
    "grouped": partial(gated, num_key_heads=2, output_gate="head"),
    "element gate": partial(gated, output_gate="element", bias=False, value_dim=3),
    "entmax": partial(gated, entmax=True),
    "content bias": collaborative,
    "shared biases": partial(collaborative, qk_bias=True, content_bias=False, output_gate="head"),
    "ragged": partial(collaborative, ragged=True, num_value_heads=2),
    "merged": partial(hk.nn.MergedAttention, E, H, output_gate="head"),
}
each_module = pytest.mark.parametrize("name", MODULES)


def by_kind(*quick: str) -> pytest.MarkDecorator:
    """Each module, those that are not `quick` in the check part."""
    check = pytest.mark.check
    names = [name if name in quick else pytest.param(name, marks=check) for name in MODULES]
    return pytest.mark.parametrize("name", names)


GATES = [1.0, 0.0, 0.5, -1.0]
MEMORY = torch.randn(B, S, E, generator=torch.Generator().manual_seed(1)).double()


def made(name: str, **options: Any) -> Module:
    return spread(MODULES[name](**{"dtype": torch.float64, **options}))


def with_gates(name: str, **options: Any) -> Module:
    layer = made(name, **options)
    layer.head_gate = Gates(GATES).to(layer.out_proj.weight.dtype)
    return layer


def run(layer: Module, x: Tensor, rows: slice = slice(None), **options: Any) -> Tensor:
    """The output; merged attention is a decoder's, with `rows` of a memory, and averages earlier rows by itself."""
    if isinstance(layer, hk.nn.MergedAttention):
        options.pop("is_causal", None)
        hidden = options.pop("key_padding_mask", None)
        options |= {} if hidden is None else {"mask": hk.Mask(query_mask=~hidden)}
        memory = MEMORY[rows].to(x.dtype)
        return layer(x, memory.expand(*x.shape[:-2], S, E), **options)[0]
    return layer(x, **options)[0]


def inputs(length: int = S) -> Tensor:
    return torch.randn(B, length, E, dtype=torch.float64)


def results(layer: Module, x: Tensor, **options: Any) -> list[Tensor]:
    """Output and gradients of all weights."""
    out = run(layer, x, **options)
    return [out.detach(), *gradients(out, *layer.parameters())]


# ---------------------------------------------------------------------- what must not matter
@each_module
@pytest.mark.parametrize("left", [False, True])
def test_padding_changes_no_real_row(name: str, left: bool) -> None:
    """Nor is it read; the rows of padding are the bias of the output projection, and give no bias a gradient."""
    layer, x = with_gates(name), inputs(4)[:1]
    junk = torch.full((1, 3, E), torch.nan).double()
    hidden = torch.tensor([[False] * 4 + [True] * 3])
    hidden = hidden.flip(1) if left else hidden
    padded = torch.cat((junk, x) if left else (x, junk), 1)
    out = run(layer, padded, slice(1), is_causal=True, key_padding_mask=hidden)
    real = run(layer, x, slice(1), is_causal=True)
    assert_alike(out[~hidden], real[0])
    biases = [each for name, each in layer.named_parameters() if name.endswith("bias") and "out" not in name]
    if biases:
        assert_alike(torch.autograd.grad(out[~hidden].sum(), biases), torch.autograd.grad(real.sum(), biases))
    bias = layer.out_proj.bias
    assert_alike(out[hidden], torch.zeros(3, E).double() if bias is None else bias.expand(3, E))


@each_module
def test_closed_heads_are_pruned_heads(name: str) -> None:
    """Outputs and the gradient of the input, of neighbouring heads, which may share a key; and of all heads.

    Gates of open heads are folded into weights, all of which have gradients. Checkpoints of pruned layers load.
    """
    for heads in ([1], [0, 1], [0, 1, 2, 3]):
        model, x = nn.ModuleDict({"layer": made(name)}), inputs().requires_grad_()
        gates = torch.tensor([0.3, 0.9, 1.0, 0.5]).double().index_fill(0, torch.tensor(heads), 0.0)
        hk.heads.gate(model, lambda H, gates=gates: hk.nn.FixedGate(gates))
        found = []
        for _ in range(2):
            out = run(model["layer"], x, key_padding_mask=PADDED)
            slope = torch.autograd.grad(out.sum(), x, allow_unused=True, retain_graph=True)[0]
            found.append([out, slope])
            hk.heads.prune(model, hk.heads.closed(model))
        assert (model["layer"].num_heads, model["layer"].head_gate) == (H - len(heads), None)
        out.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        loaded = nn.ModuleDict({"layer": made(name)})
        hk.heads.apply_shapes(loaded, hk.heads.shapes(model))
        loaded.load_state_dict(model.state_dict())
        assert_alike(run(loaded["layer"], x, key_padding_mask=PADDED), out)
        if len(heads) == H:  # whose gradient is 0, or none is there
            gradients = [each.pop() for each in found]
            assert not any(each.any() for each in gradients if each is not None)
        assert_alike(found[1], found[0])


@pytest.mark.parametrize("name", ["grouped", "element gate", "merged"])
@torch.no_grad()
def test_gates_of_real_rows_are_not_spared_nan(name: str) -> None:
    """A projection that has become NaN is seen in every real row."""
    layer, x = with_gates(name), inputs()
    layer.gate_proj.weight.fill_(torch.nan)
    out = run(layer, x, is_causal=True, key_padding_mask=PADDED)
    assert out.isnan().any(-1)[~PADDED].all()


@each_module
@torch.no_grad()
def test_decoding_is_the_full_pass(name: str) -> None:
    """No token, a prompt of three, then one by one, padded at the left, while beams change places."""
    layer, x, padded = with_gates(name), inputs(), PADDED.flip(1)
    full = run(layer, x, is_causal=True, key_padding_mask=padded)
    cache, order, steps, end = hk.nn.KeyValueCache(), torch.arange(B), [], 0
    for tokens in x.split([0, 3, 1, 1, 2], dim=1):
        start, end = end, end + tokens.shape[1]
        merged = isinstance(layer, hk.nn.MergedAttention)
        hidden = padded[order, start if merged else 0 : end]
        with pytest.raises(ValueError, match="key_mask has"):  # which changes nothing
            run(layer, tokens[order], order, mask=hk.Mask(key_mask=torch.ones(1, 9) > 0), cache=cache)
        out = run(layer, tokens[order], order, is_causal=True, key_padding_mask=hidden, cache=cache)
        steps.append(out[order.argsort()])
        beams = torch.tensor([1, 0])
        cache.reorder(beams)
        order = order[beams]
    assert_alike(torch.cat(steps, 1), full)
    cache.reset()
    assert cache.length == 0
    assert cache.running is None


@each_module
def test_layouts_of_the_batch(name: str) -> None:
    """Several batch dimensions, none, and the batch second."""
    layer, x = with_gates(name), inputs()
    out = run(layer, x, is_causal=True)
    assert_alike(run(layer, x[None].expand(3, B, S, E), is_causal=True)[1], out)
    assert run(layer, x[:0], slice(0), is_causal=True).shape == (0, S, E)
    layer.batch_first = False
    rows = [x.transpose(0, 1), MEMORY.transpose(0, 1)]
    sources = rows if name == "merged" else rows[:1]
    options = {} if name == "merged" else {"is_causal": True}
    assert_alike(layer(*sources, **options)[0].transpose(0, 1), out)
    assert_refused((lambda: layer(x.new_zeros(2, 3, 7, 24), MEMORY), r"^query has .* 7, 24\]; pass \[T, B, 24\]"))


@each_module
def test_gates_multiply_heads(name: str) -> None:
    """`[H]`, `[B, H]` and `[B, H, T]`: a gate says from the batch size and the length what it gives."""
    layer, x = made(name), inputs()

    class Given(Gates):
        def forward(self, batch_size: int, length: int) -> Tensor:
            assert (batch_size, length) == (B, S)
            return self.given

    gate = layer.head_gate = Given(GATES)

    def under(gates: Tensor) -> Tensor:
        gate.given = gates
        return run(layer, x, key_padding_mask=PADDED)

    nothing = under(torch.zeros(H))
    heads = torch.stack([under(one) - nothing for one in torch.eye(H)], 1)  # [B, H, T, E]
    for gates in (torch.tensor(GATES), torch.randn(B, H), torch.randn(B, H, S)):
        gates = gates.double().requires_grad_()
        factors = gates if gates.dim() > 1 else gates[None]
        factors = factors[..., None] if factors.dim() == 3 else factors[..., None, None]
        expected = nothing + (heads * factors).sum(1)
        out = under(gates)
        assert_alike(out, expected)
        slopes = [torch.autograd.grad(each.sum(), gates, retain_graph=True)[0] for each in (out, expected)]
        has_one = (gates != 0) | layer.closed_grad  # of ragged attention, gates of 0 have none
        assert_alike(slopes[0][has_one], slopes[1][has_one])


@each_module
def test_dropout_in_training_only(name: str) -> None:
    layer, x = made(name, dropout=0.5), inputs()
    expected = run(layer, x)
    assert_alike(run(layer, x), expected)
    layer.train()
    one, other = run(layer, x), run(layer, x)
    assert not torch.allclose(one, expected)
    assert not torch.allclose(one, other)


# ---------------------------------------------------------------------- copies and initialisation
@each_module
def test_copies_compute_the_same(name: str) -> None:
    layer, x = made(name), inputs()
    expected = run(layer, x)
    loaded = made(name)
    loaded.load_state_dict(layer.state_dict())
    on_meta = made(name, device="meta")
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    on_meta.to_empty(device="cpu").load_state_dict(layer.state_dict())
    for twin in (loaded, on_meta, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert set(twin.state_dict()) == set(layer.state_dict())
        assert_alike(run(twin, x), expected)


@each_module
def test_initialisation(name: str) -> None:
    """Xavier uniform projections, each by itself; biases of 0; heads that attend."""
    layer = MODULES[name]()
    for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        bound = (6 / sum(part.weight.shape)) ** 0.5
        assert 0.9 * bound < part.weight.abs().max() <= bound
        assert part.bias is None or not part.bias.any()
    before = layer.q_proj.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.q_proj.weight, before)


# ---------------------------------------------------------------------- inside PyTorch
@by_kind("grouped", "ragged")
def test_compiled(name: str) -> None:
    layer, x = with_gates(name, dtype=torch.float32), inputs().float()
    options = {"is_causal": True, "key_padding_mask": PADDED}
    expected, plain = results(layer, x, **options), copy.deepcopy(layer)
    layer.compile(fullgraph=True, backend="aot_eager")
    assert_alike(results(layer, x, **options), expected)
    caches = {layer: hk.nn.KeyValueCache(), plain: hk.nn.KeyValueCache()}
    with torch.no_grad():
        for row in x[:, :2].split(1, 1):
            found, wanted = (run(each, row, is_causal=True, cache=cache) for each, cache in caches.items())
            assert_alike(found, wanted)


class Block(nn.Module):
    """A layer with what is constant in its calls; `call` makes the rest from the lengths."""

    def __init__(self, layer: nn.Module, call: Callable[[Tensor, Tensor], dict[str, Any]]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if isinstance(self.layer, hk.nn.MergedAttention):
            return self.layer(x, x * 2)[0]
        return self.layer(x, **self.call(x, lengths))[0]


CALLS: dict[str, Callable[[Tensor, Tensor], dict[str, Any]]] = {
    "padding": lambda x, n: {"key_padding_mask": torch.arange(x.shape[1]) >= n[:, None], "is_causal": True},
    "lengths": lambda x, lengths: {"mask": hk.Mask(causal=True, key_lengths=lengths)},
    "window": lambda x, lengths: {"mask": hk.Mask(window=(3, 1), key_lengths=lengths)},
    "dense": lambda x, lengths: {"attn_mask": x[0, :, :1] > x[0, :, 0]},
    "bias": lambda x, lengths: {"bias": -(x[..., 0, None] - x[:, None, :, 0]).abs()[:, None]},
    "cross": lambda x, lengths: {"key": torch.cat((x, x * 2), 1)},
}


def assert_exports(layer: nn.Module, call: Any, *, strict: bool = False) -> None:
    """The program of one call serves others, and contains one op of this package."""
    block = Block(layer, call).eval()
    sizes = {0: Dim("B", min=1, max=64), 1: Dim("T", min=2, max=512)}
    with torch.no_grad():
        example = torch.randn(3, 7, E), torch.tensor([7, 2, 4])
        program = torch.export.export(
            block, example, dynamic_shapes={"x": sizes, "lengths": {0: sizes[0]}}, strict=strict
        )
        names = [str(node.target) for node in program.graph.nodes]
        assert sum(each.startswith("heads_kernels.") for each in names) == 1
        for b, t in ((3, 7), (1, 2), (5, 33)):
            x, lengths = torch.randn(b, t, E), torch.randint(1, t + 1, (b,))
            assert_alike(program.module()(x, lengths), block(x, lengths))


@by_kind("gated")
def test_exported(name: str) -> None:
    """With gates, some heads closed; then with some of them pruned."""
    layer = with_gates(name, dtype=torch.float32)
    assert_exports(layer, CALLS["padding"])
    hk.heads.prune(nn.ModuleList([layer]), {0: [2, 3]})
    assert_exports(layer, CALLS["padding"])


@pytest.mark.check
@pytest.mark.parametrize("call", CALLS)
def test_exported_masks(call: str) -> None:
    layer = made("ragged", dtype=torch.float32)
    layer.head_gate = hk.nn.HardConcrete(H)
    with torch.no_grad():
        layer.head_gate.log_alpha.copy_(torch.tensor([-3.0, 0.1, 3.0, 0.5]))
    assert_exports(layer, CALLS[call], strict=call == "lengths")


@each_module
def test_autocast(name: str) -> None:
    """As accurate as the layer in bfloat16; gradients have the dtype of the weights."""
    layer, x = with_gates(name, dtype=torch.float32), inputs().float()
    exact = run(copy.deepcopy(layer).double(), x.double())
    plain = run(copy.deepcopy(layer).bfloat16(), x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        out = run(layer, x)
    assert out.dtype == torch.bfloat16
    assert_as_accurate_as(out, plain, exact)
    out.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {torch.float32}


# ---------------------------------------------------------------------- bad arguments
OF_BOTH: list[tuple[Any, ...]] = [
    ({"embed_dim": 0}, ValueError, "embed_dim is 0"),
    ({"num_heads": 0}, ValueError, "num_heads is 0"),
    ({"num_heads": 5}, ValueError, "embed_dim is 24, but num_heads is 5"),
    ({"kdim": -1}, ValueError, "kdim is -1"),
    ({"value_dim": True}, TypeError, "value_dim is a bool"),
    ({"bias": 1}, TypeError, "bias is a int"),
    ({"dropout": 1.0}, ValueError, "dropout is 1.0"),
    ({"scale": float("nan")}, ValueError, "scale is nan"),
    ({"output_gate": "row"}, ValueError, "output_gate is 'row'; use one of None, 'head'"),
    ({"batch_first": 0}, TypeError, "batch_first is a int"),
]
OF_GATED = [
    ({"num_key_heads": 3}, ValueError, "num_key_heads is 3, but num_heads is 4"),
    ({"head_dim": 0}, ValueError, "head_dim is 0"),
    ({"entmax": 1}, TypeError, "entmax is a int"),
]
OF_COLLABORATIVE = [
    ({"shared_dim": 0}, ValueError, "shared_dim is 0"),
    ({"shared_dim": 3}, ValueError, "kind is 'concatenate', but 4 heads share 3 features"),
    ({"mixing_init": "uniform"}, ValueError, "kind is 'uniform'; use one of 'concatenate'"),
    ({"num_value_heads": 3}, ValueError, "num_value_heads is 3, but num_heads is 4"),
    ({"qk_bias": None}, TypeError, "qk_bias is a NoneType"),
    ({"content_bias": 1}, TypeError, "content_bias is a int"),
    ({"ragged": "yes"}, TypeError, "ragged is a str"),
]


def test_bad_layers() -> None:
    sizes = {"embed_dim": E, "num_heads": H}
    assert_refused(*OF_BOTH, *OF_GATED, of=partial(hk.nn.GatedMultiheadAttention, **sizes))
    shared = partial(hk.nn.CollaborativeMultiheadAttention, **sizes, shared_dim=10)
    assert_refused(*OF_BOTH, *OF_COLLABORATIVE, of=shared)


NESTED = torch.nested.nested_tensor(list(torch.zeros(2, 5, 24)), layout=torch.jagged)
X, Y = torch.zeros(B, T, E), torch.zeros(B, S, E)
#: Not of merged attention, which needs a key.
NO_KEY = ({"key": None, "value": Y}, ValueError, "value is given without key")
BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": [1]}, TypeError, "query is a list"),
    ({"query": X[0]}, ValueError, r"query has shape \[5, 24\]; pass \[B, T, 24\], with batch_f"),
    ({"query": NESTED}, ValueError, "query is nested"),
    ({"key": Y[..., :8]}, ValueError, r"key has shape \[2, 7, 8\]; pass \[B, S, 24\]"),
    ({"key": Y[:1]}, ValueError, r"key has batch \[1\], but query has batch \[2\]"),
    ({"value": Y[:, :3]}, ValueError, r"value has shape \[2, 3, 24\], but key has \[2, 7, 24\]"),
    ({"need_weights": True}, ValueError, "need_weights is True"),
    ({"key_padding_mask": hk.Mask()}, TypeError, "key_padding_mask is a Mask; .* mask="),
    ({"key_padding_mask": PADDED[0]}, ValueError, r"key_padding_mask has shape \[7\]"),
    ({"key_padding_mask": PADDED.long()}, TypeError, "key_padding_mask has dtype torch.int64"),
    ({"key_padding_mask": PADDED * -1e4}, ValueError, "key_padding_mask holds floats other than"),
    ({"attn_mask": torch.ones(S, S).bool()}, ValueError, r"attn_mask has shape \[7, 7\].*\[5, 7\] or \[8, 5, 7\]"),
    ({"mask": PADDED}, TypeError, "mask is a Tensor; pass a hk.Mask"),
    ({"is_causal": 1}, TypeError, "is_causal is a int"),
    ({"cache": {}}, TypeError, "cache is a dict"),
]


@each_module
def test_bad_calls(name: str) -> None:
    refused = BAD_CALLS if name == "merged" else [NO_KEY, *BAD_CALLS]
    assert_refused(*refused, of=partial(MODULES[name](), query=X, key=Y))
