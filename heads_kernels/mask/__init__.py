"""Masks are data: one half-open interval of visible keys per query row, and for some heads their first keys.

Causal masks and windows become two integers (a band), masks that depend on data (lengths, documents, prefixes) or on
the head become two int32 vectors, a key mask with holes adds one byte per key, and any other bool mask has one byte per
pair. A kernel intersects the parts that are given, skips tiles outside of them, and needs no mask arithmetic in tiles
inside. It does not know which kind of mask it was given.
"""

from heads_kernels.mask.intervals import UNBOUNDED, Intervals
from heads_kernels.mask.mask import Mask, as_mask

__all__ = ["UNBOUNDED", "Intervals", "Mask", "as_mask"]
