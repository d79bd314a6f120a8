"""`hk.nn.unpad`: padded batches as one row of real tokens, for modules of the package and of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike

B, T, E, H = 4, 9, 32, 4


def batch(kind: str) -> Tensor:
    """Real tokens of a batch: a row of all, one of one, one of none, padded at the ends or anywhere."""
    real = torch.zeros(B, T, dtype=torch.bool)
    real[0] = True
    real[1, {"left": T - 1, "right": 0, "holes": 4}[kind]] = True
    real[2, {"left": slice(5, T), "right": slice(6), "holes": slice(1, T, 2)}[kind]] = True
    return real


KINDS = ("left", "right", "holes")


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str) -> None:
    real = batch(kind)
    x = torch.randn(B, T, 3, 2, dtype=torch.float64, requires_grad=True)
    packed, mask, pad_back = hk.nn.unpad(x, real)
    N = int(real.sum())
    assert torch.equal(packed, x[real][None])
    assert torch.equal(pad_back(packed), x * real[..., None, None])
    assert pad_back(torch.ones(1, N)).shape == (B, T)
    rows = torch.arange(B).repeat_interleave(real.sum(1))
    assert torch.equal(mask.to_dense(1, 1, N, N)[0, 0], rows[:, None] == rows)
    assert torch.autograd.gradcheck(lambda x: pad_back(hk.nn.unpad(x, real)[0].sin()), x)


@pytest.mark.parametrize("real", [torch.ones(B, T), torch.zeros(B, T)])
def test_all_tokens_or_none(real: Tensor) -> None:
    x = torch.randn(B, T, E)
    packed, _, pad_back = hk.nn.unpad(x, real.bool())
    assert packed.shape == (1, int(real.sum()), E)
    assert torch.equal(pad_back(packed), x * real[..., None])


def both(
    module: Callable[..., Tensor], packed_module: Callable[..., Tensor], real: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs on real tokens and the gradient of the input: padded, and packed."""
    found = []
    for is_packed in (False, True):
        x = torch.randn(B, T, E, generator=torch.Generator().manual_seed(0), requires_grad=True)
        if is_packed:
            packed, mask, pad_back = hk.nn.unpad(x, real)
            out = pad_back(packed_module(packed, mask))
        else:
            out = module(x)
        weight = torch.randn(E, generator=torch.Generator().manual_seed(1))
        (grad,) = torch.autograd.grad((out[real] * weight).sum(), x)
        found.append({"out": out[real], "dx": grad})
    return found[0], found[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_modules(shared: bool, causal: bool, kind: str) -> None:
    torch.manual_seed(0)
    attention: Any = hk.nn.GatedMultiheadAttention(E, H)
    if shared:
        attention = hk.nn.CollaborativeMultiheadAttention(E, H, shared_dim=16)
    hk.heads.gate(nn.ModuleList([attention]), lambda H: hk.nn.FixedGate(torch.rand(H)))
    real = batch(kind)
    order = hk.Mask(causal=causal)
    padded, packed = both(
        lambda x: attention(x, key_padding_mask=~real, is_causal=causal)[0],
        lambda x, mask: attention(x, mask=mask & order)[0],
        real,
    )
    assert_alike(packed, padded)


class masked:
    """Hand a native mask to the attention of layers of `torch.nn`, whose forward has no argument for it."""

    def __init__(self, layers: nn.Module, **masks: hk.Mask) -> None:
        self.handles = [
            getattr(layer, name).register_forward_pre_hook(
                lambda module, args, kwargs, mask=mask: (args, {**kwargs, "mask": mask}),
                with_kwargs=True,
            )
            for layer in layers.children()
            for name, mask in masks.items()
        ]

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def layer_of(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind(E, H, 24, dropout=0.0, batch_first=True)


def test_transformer_decoder() -> None:
    """Both sides packed; the mask of cross-attention is that of both sides' documents."""
    real, of_memory = batch("right"), batch("left")
    of_memory[3, :2] = True  # the rows of tokens that see nothing have a bias otherwise
    decoder = hk.nn.replace_attention_(
        nn.TransformerDecoder(layer_of(nn.TransformerDecoderLayer), 2)
    )
    memory = torch.randn(B, T, E)
    order = torch.ones(T, T, dtype=torch.bool).triu(1)

    def packed_decoder(x: Tensor, mask: hk.Mask) -> Tensor:
        rows = torch.arange(B).repeat_interleave(real.sum(1))
        keys = torch.arange(B).repeat_interleave(of_memory.sum(1))
        masks = {
            "self_attn": mask & hk.Mask(causal=True),
            "multihead_attn": hk.Mask(document_ids=(rows, keys)),
        }
        with masked(decoder.layers, **masks):
            return decoder(x, hk.nn.unpad(memory, of_memory)[0])

    padded, packed = both(
        lambda x: decoder(
            x,
            memory,
            tgt_mask=order,
            tgt_key_padding_mask=~real,
            memory_key_padding_mask=~of_memory,
        ),
        packed_decoder,
        real,
    )
    assert_alike(packed, padded)


@pytest.mark.parametrize(
    ("x", "real", "words"),
    [
        ([1], torch.ones(B, T).bool(), r"x is a list; pass a tensor \[B, T, ...\]"),
        (torch.ones(B), torch.ones(B, T).bool(), r"x has shape \[4\]"),
        (torch.ones(B, T, E), torch.ones(B, T).long(), "real has dtype torch.int64; pass a bool"),
        (torch.ones(B, T, E), torch.ones(T, B).bool(), r"real has shape \[9, 4\], but x has"),
        (torch.ones(B, T, E), None, "real is a NoneType"),
    ],
)
def test_refusals(x: Any, real: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        hk.nn.unpad(x, real)
