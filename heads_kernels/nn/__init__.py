"""Layers around the operators: attention modules, head gates, initialisation."""

from heads_kernels.nn.attention import GatedMultiheadAttention, replace_attention_
from heads_kernels.nn.cache import KeyValueCache
from heads_kernels.nn.collaborative import CollaborativeMultiheadAttention
from heads_kernels.nn.gates import FixedGate, HardConcrete, HeadGate, expected_open, l0_penalty
from heads_kernels.nn.initialization import ds_init_, mixing_init_
from heads_kernels.nn.merged import MergedAttention
from heads_kernels.nn.unpadding import unpad

__all__ = [
    "CollaborativeMultiheadAttention",
    "FixedGate",
    "GatedMultiheadAttention",
    "HardConcrete",
    "HeadGate",
    "KeyValueCache",
    "MergedAttention",
    "ds_init_",
    "expected_open",
    "l0_penalty",
    "mixing_init_",
    "replace_attention_",
    "unpad",
]
