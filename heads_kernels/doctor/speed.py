"""Four shapes, forward and backward together, on the verified backends and on PyTorch's SDPA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from heads_kernels.ops.gate import activate, as_4d
from heads_kernels.testing import Inputs, find, time_in_turn

_GATED, _SHARED = "gated_attention", "collaborative_attention"
#: Of BERT-base at 512 tokens: what a user's model most likely is like, and what a CPU does in time.
SHAPES: Final = (
    (_GATED, "bert_base_512"),
    (_GATED, "bert_base_512_causal"),
    (_SHARED, "bert_base_256"),
    (_SHARED, "bert_base_256_ragged"),
)
#: Examples in a batch: a GPU is filled by 12 heads times this. Heuristic.
_BATCH: Final = {"cpu": 1, "cuda": 32}


def time_backends(
    backends: Sequence[str], device: torch.device, budget_s: float
) -> Iterator[dict[str, Any]]:
    """For each shape "operator", "shape" and "seconds" by backend, with "sdpa" among them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for operator, name in SHAPES:
        case = replace(find(operator, name), B=_BATCH[device.type])
        inputs = case.make(dtype, device, drawn_on=device).requires_grad()
        calls = {"sdpa": _both(inputs, lambda i=inputs: sdpa(i))}  # type: ignore[misc]
        for backend in backends:
            calls[backend] = _both(inputs, lambda i=inputs, b=backend: i.call(b))  # type: ignore[misc]
        times = time_in_turn(
            calls, device=device, budget_s=budget_s / len(SHAPES), warmup=1, least=3
        )
        seconds = {candidate: timing.median for candidate, timing in times.items()}
        yield {"operator": operator, "shape": name, "seconds": seconds}


def fastest_first(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The backends that were timed, by the geometric mean of their times."""

    def logarithm(name: str) -> float:
        return sum(math.log(row["seconds"][name]) for row in rows)

    return sorted(
        (name for row in rows[:1] for name in row["seconds"] if name != "sdpa"), key=logarithm
    )


def sdpa(inputs: Inputs) -> Tensor:
    """The same call by `scaled_dot_product_attention`, times the gate; the mixed query is in memory."""
    p, t = inputs.parsed(), inputs.tensors
    query, key, mask = t["query"], t["key"], None
    if "mixing" in t:
        query = query[:, None] * t["mixing"].to(query.dtype)[:, None]  # [B, H, T, Ds]
        key = key[:, None].expand(-1, p.H, -1, -1)
        if "content_bias" in t:
            mask = t["content_bias"].to(query.dtype)[:, :, None] * p.scale
    is_causal = bool(inputs.options.get("is_causal"))
    out = F.scaled_dot_product_attention(
        query, key, t["value"], mask, is_causal=is_causal, scale=p.scale
    )
    if p.gate is None:
        return out
    return out * as_4d(activate(p.gate, p.gate_activation)).to(out.dtype)


def _both(inputs: Inputs, call: Callable[[], Tensor]) -> Callable[[], object]:
    leaves = list(inputs.tensors.values())
    return lambda: torch.autograd.grad(call(), leaves, inputs.dout)
