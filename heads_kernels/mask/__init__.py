"""Masks are data: which keys every query row may see, as one half-open interval per row.

mask.py       what callers write: a `Mask` is a tuple of terms, ANDed
terms.py      one reason to hide keys each; a term gives its `Intervals`
intervals.py  what kernels read
"""

from heads_kernels.mask.intervals import UNBOUNDED, Intervals
from heads_kernels.mask.mask import Mask, as_mask

__all__ = ["UNBOUNDED", "Intervals", "Mask", "as_mask"]
