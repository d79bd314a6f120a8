"""Layers with entmax in the place of softmax: `GatedMultiheadAttention(entmax=True)`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.nn import GatedMultiheadAttention, KeyValueCache
from heads_kernels.ops.entmax_attention import formula
from tests.support.alike import assert_alike

E, H, T, B = 24, 4, 9, 2


def layer(**options: Any) -> GatedMultiheadAttention:
    torch.manual_seed(0)
    made = GatedMultiheadAttention(E, H, entmax=True, **options)
    assert made.alpha_logits is not None
    with torch.no_grad():
        made.alpha_logits.copy_(torch.linspace(-2, 3, H))
        made.q_proj.weight.mul_(4)
    return made


def inputs(length: int = T) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, length, E)


def by_hand(made: GatedMultiheadAttention, x: Tensor) -> Tensor:
    query, key, value = (
        projection(x).unflatten(2, (H, E // H)).transpose(1, 2)
        for projection in (made.q_proj, made.k_proj, made.v_proj)
    )
    assert made.alpha is not None
    heads = hk.entmax_attention(query, key, value, alpha=made.alpha, scale=made.scale)
    return made.out_proj(heads.transpose(1, 2).flatten(2))


def test_is_the_operator() -> None:
    made, x = layer(), inputs()
    assert_alike(made(x)[0], by_hand(made, x))
    assert not torch.equal(made(x)[0], GatedMultiheadAttention.forward(softmax(made), x)[0])


def softmax(made: GatedMultiheadAttention) -> GatedMultiheadAttention:
    other = GatedMultiheadAttention(E, H)
    state = {name: t for name, t in made.state_dict().items() if name != "alpha_logits"}
    other.load_state_dict(state)
    return other


def test_alpha_is_learned() -> None:
    made = GatedMultiheadAttention(E, H, entmax=True)
    assert torch.equal(made.alpha, torch.full((H,), 1.5))  # type: ignore[arg-type]
    made(inputs())[0].square().sum().backward()
    assert made.alpha_logits is not None
    assert made.alpha_logits.grad is not None
    assert made.alpha_logits.grad.all()
    assert "entmax=True" in repr(made)
    assert GatedMultiheadAttention(E, H).alpha is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_alpha_stays_where_entmax_is_defined(dtype: torch.dtype) -> None:
    made = layer(dtype=dtype)
    assert made.alpha_logits is not None
    with torch.no_grad():
        made.alpha_logits.copy_(torch.tensor([-1000.0, -30.0, 30.0, 1000.0]))
    assert made.alpha is not None
    assert ((made.alpha > 1) & (made.alpha <= 2)).all()
    assert made(inputs().to(dtype))[0].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"num_key_heads": 2}, {"output_gate": "element"}], ids=str)
def test_pruned_is_closed(options: dict[str, Any]) -> None:
    made = nn.Sequential(layer(**options))
    x = inputs()
    heads = {0: [0, 1]}  # of one key head
    pruned = copy.deepcopy(made)
    hk.heads.close(made, heads)
    expected = made[0](x)[0]
    hk.heads.prune(pruned, heads)
    assert pruned[0].alpha_logits.shape == (2,)
    assert_alike(pruned[0](x)[0], expected)


def test_checkpoints_of_pruned_layers() -> None:
    made = nn.Sequential(layer())
    hk.heads.prune(made, {0: [3]})
    other = nn.Sequential(layer())
    hk.heads.apply_shapes(other, hk.heads.shapes(made))
    other.load_state_dict(made.state_dict())
    assert_alike(other[0](inputs())[0], made[0](inputs())[0])


def test_importance_of_heads() -> None:
    """By the gradients of gates (Michel et al. 2019)."""
    made = nn.Sequential(layer())
    hk.heads.gate(made, hk.nn.HardConcrete)
    made[0](inputs())[0].square().sum().backward()
    gates = hk.heads.attention_layers(made)[0].gate
    assert gates is not None
    assert all(p.grad is not None and p.grad.any() for p in gates.parameters())


def test_decoding_is_the_whole() -> None:
    made, x = layer(), inputs()
    cache = KeyValueCache()
    with torch.no_grad():
        steps = [made(x[:, t : t + 1], is_causal=True, cache=cache)[0] for t in range(T)]
        assert_alike(torch.cat(steps, 1), made(x, is_causal=True)[0])


def test_padding_and_batches() -> None:
    made, x = layer(), inputs()
    hidden = torch.zeros(B, T, dtype=torch.bool)
    hidden[1, 6:] = True
    out = made(x, key_padding_mask=hidden)[0]
    assert_alike(out[1, :6], made(x[1:, :6])[0][0])
    assert_alike(made(x[None], key_padding_mask=hidden[None])[0][0], out)


def test_packed_is_padded() -> None:
    made, x = layer(), inputs()
    real = torch.ones(B, T, dtype=torch.bool)
    real[0, 5:] = False
    packed, mask, pad_back = hk.nn.unpad(x, real)
    out = pad_back(made(packed, mask=mask)[0])
    assert_alike(out[real], made(x, key_padding_mask=~real)[0][real])


def test_compiled() -> None:
    made, x = layer(), inputs()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert_alike(compiled(x)[0], made(x)[0])


# ---------------------------------------------------------------------- observers
def test_support_sizes_and_probabilities() -> None:
    made, x = nn.Sequential(layer()), inputs()
    with hk.analysis.observe(made, lambda layer, call: calls.append(call)):
        calls: list[Any] = []
        made[0](x, is_causal=True)
    (call,) = calls
    scores = (call.query @ call.key.mT * call.scale).double()
    visible = torch.ones(T, T, dtype=torch.bool).tril().expand(B, H, T, T)
    order = (call.alpha.double() - 1)[:, None, None]
    top, above_top = formula.threshold(scores, visible, order)[..., None]
    p = formula.log_probabilities(scores - top, above_top, order).exp().masked_fill(~visible, 0.0)
    assert_alike(call.probabilities(slice(0, T)), p.float())
    assert torch.equal(call.support_sizes(), (call.probabilities(slice(0, T)) > 0).sum(-1))
    assert (call.support_sizes()[:, -1] < call.support_sizes()[:, 0]).any()  # alpha 1.95 and 1.1
    above = call.probabilities(slice(0, T)) > 0
    for size in (1, 3, 4 * T):
        tiles = [rows.split(size, 3) for rows in above.split(size, 2)]
        expected = sum(tile.any(3).any(2).long() for row in tiles for tile in row)
        assert torch.equal(call.support_tiles(size), expected)
    with pytest.raises(ValueError, match="size"):
        call.support_tiles(0)
    with pytest.raises(ValueError, match="statistics is that of softmax"):
        call.statistics()


# ---------------------------------------------------------------------- refusals
def test_statistics_are_refused() -> None:
    with pytest.raises(ValueError, match="need_statistics is True"):
        layer()(inputs(), need_statistics=True)


def test_conversion_is_refused() -> None:
    made = nn.Sequential(layer())
    with pytest.raises(ValueError, match="has entmax, which collaborative attention has not"):
        hk.convert.collaborate(made, 8, progress=False)


def test_context_parallelism_is_refused() -> None:
    made = layer()
    made.context = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="context is set, but entmax"):
        made(inputs())


def test_tensor_parallelism_is_refused() -> None:
    class Mesh:
        def size(self) -> int:
            return 2

    with pytest.raises(ValueError, match="has entmax, which serves no DTensors"):
        hk.integrations.distributed.tensor_parallel_plan(nn.Sequential(layer()), Mesh())  # type: ignore[arg-type]


def test_relevance_is_refused() -> None:
    made = nn.Sequential(layer())
    with pytest.raises(ValueError, match="entmax"):
        hk.analysis.relevance(made, [inputs()], lambda model, batch: model(batch)[0])


@pytest.mark.parametrize("entmax", [1, "yes", None])
def test_bad_flags(entmax: Any) -> None:
    with pytest.raises(TypeError, match="entmax"):
        GatedMultiheadAttention(E, H, entmax=entmax)
