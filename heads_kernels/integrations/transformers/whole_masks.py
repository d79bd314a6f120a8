"""The mask of whole sequences, of which a model has built that of a part.

It has the same causal and window terms, and the padding of all parts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.integrations.transformers.masks import PreparedMask
from heads_kernels.mask import Mask
from heads_kernels.mask.terms import Causal, KeyMask, Term, Window
from heads_kernels.nn.multihead import Context


def whole_mask(module: nn.Module, context: Context, attention_mask: PreparedMask | Tensor) -> Mask:
    """The mask of whole sequences whose part is `attention_mask`; made once for a pass."""
    if not isinstance(attention_mask, PreparedMask) or isinstance(attention_mask.mask, Tensor):
        was = f"of {type(module).__name__} is a tensor of pairs, of which this process has a part"
        refuse("attention_mask", was, "pass a padding mask [B, T], or none")
    whole: Mask | None = attention_mask.derived.get("whole")
    if whole is None:
        terms: list[Term] = []
        for term in attention_mask.mask.terms:
            if isinstance(term, KeyMask):
                real = context.join(term.real.to(torch.uint8), 1)
                terms.append(KeyMask(real.bool()))
            elif isinstance(term, (Causal, Window)):
                terms.append(term)
            else:
                was = f"of {type(module).__name__} has {term}, of which this process has a part"
                instead = "pass attention_mask, of ones without padding; packed sequences and chunks are not split"
                refuse("attention_mask", was, instead)
        whole = attention_mask.derived["whole"] = Mask.of(tuple(terms))
    return whole
