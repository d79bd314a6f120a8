"""ALBERT: one layer runs many times, and a head mask `[L, H]` has a row for each time."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from heads_kernels.errors import refuse


class _RowsOfHeadMask(nn.Module):
    """Stands before `AlbertTransformer`: its loop over layers, each with its row of the head mask."""

    if TYPE_CHECKING:  # what the stock class has

        def __getattr__(self, name: str) -> Any: ...

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        head_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if head_mask is None or head_mask.dim() != 2:
            return super().forward(hidden_states, attention_mask, head_mask=head_mask, **kwargs)
        layers = self.config.num_hidden_layers
        if head_mask.shape[0] != layers:
            was = f"has shape {list(head_mask.shape)}, but the layer runs {layers} times"
            refuse("head_mask", was, f"pass [H] or [{layers}, H]")
        hidden_states = self.embedding_hidden_mapping_in(hidden_states)
        for layer, row in enumerate(head_mask):
            group = layer * self.config.num_hidden_groups // layers
            hidden_states = self.albert_layer_groups[group](
                hidden_states, attention_mask, head_mask=row, **kwargs
            )
        return BaseModelOutput(last_hidden_state=hidden_states)


@cache
def rowwise_class(stock: Any) -> Any:
    """The class that gives every run of a shared layer its row; None where `stock` shares no layer."""
    if stock.__name__ != "AlbertTransformer" or not stock.__module__.startswith("transformers."):
        return None
    return type(f"Rowwise{stock.__name__}", (_RowsOfHeadMask, stock), {"__module__": __name__})
