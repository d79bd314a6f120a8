"""Thin layers around the operators: attention modules, gates of heads, initialisations."""

from heads_kernels.nn.gates import FixedGate, HeadGate

__all__ = [
    "FixedGate",
    "HeadGate",
]
