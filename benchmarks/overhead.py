"""Microseconds of a call without gradients on tensors that are too small to matter, B1 H2 T4 D8."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import heads_kernels as hk
from benchmarks.candidates import Call
from benchmarks.results import Found
from benchmarks.settings import Settings
from heads_kernels.testing import time_in_turn


def measure(settings: Settings) -> Iterator[Found]:
    place = settings.place
    query, key, value = torch.randn(3, 1, 2, 4, 8, device=place)
    shared_query, shared_key = torch.randn(2, 1, 4, 8, device=place)
    gate, mixing = torch.rand(2, device=place), torch.rand(2, 8, device=place)
    real = torch.arange(4, device=place)[None] < 3
    mask = hk.Mask(key_mask=real)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Call] = {
        "gated_attention": lambda: hk.gated_attention(query, key, value),
        "gated_attention with a gate": lambda: hk.gated_attention(query, key, value, gate=gate),
        "collaborative_attention": lambda: hk.collaborative_attention(
            shared_query, shared_key, value, mixing
        ),
        "gated_attention with a kept Mask": lambda: hk.gated_attention(query, key, value, mask),
        "SDPA": lambda: sdpa(query, key, value),
        "SDPA with a mask": lambda: sdpa(query, key, value, attn_mask=real[:, None, None]),
        "SDPA times gate": lambda: sdpa(query, key, value) * gate[:, None, None],
        "eager times gate": lambda: (
            (query @ key.mT * 8**-0.5).softmax(-1) @ value * gate[:, None, None]
        ),
    }
    budget = settings.effort().budget_s
    times = time_in_turn(calls, device=place, budget_s=budget, least=20, warmup=20)
    found = Found("overhead", "Overhead of a call without gradients",
        {"B1 H2 T4 D8": "{call}", "microseconds": "{us:.1f}"})  # fmt: skip
    found.rows = [{"call": name, "us": timing.median * 1e6} for name, timing in times.items()]
    yield found
