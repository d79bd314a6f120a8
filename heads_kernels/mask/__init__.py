"""Masks are data: one half-open interval of visible keys per query row.

mask.py       `Mask`, as callers write it: a tuple of terms, combined by AND
terms.py      the terms; each gives its `Intervals`
intervals.py  `Intervals`, as kernels read them
kept.py       what is cached between calls
"""

from heads_kernels.mask.intervals import UNBOUNDED, Intervals
from heads_kernels.mask.mask import Mask, as_mask

__all__ = ["UNBOUNDED", "Intervals", "Mask", "as_mask"]
