"""Registers the package's attention function with transformers, and refuses it for models that it cannot serve."""

from __future__ import annotations

from functools import wraps
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from heads_kernels.heads.configs import NAME
from heads_kernels.integrations.transformers.attention import attention_forward
from heads_kernels.integrations.transformers.masks import prepare_mask
from heads_kernels.integrations.transformers.passes import watch
from heads_kernels.integrations.transformers.support import check_keywords, check_named


def register() -> None:
    """Make `attn_implementation="heads_kernels"` known to transformers, and refuse it where it cannot be served.

    transformers accepts any registered name for any model, so two methods of `PreTrainedModel` are wrapped: the one
    that checks the name, and the one that finishes construction. Other names are not affected.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, prepare_mask)
    check: Any = PreTrainedModel.get_correct_attn_implementation
    finish: Any = PreTrainedModel.post_init

    @wraps(check)
    def get_correct_attn_implementation(
        self: PreTrainedModel,
        requested_attention: str | None,
        is_init_check: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if requested_attention == NAME:
            check_named(self, is_made=not is_init_check)
            if not is_init_check:
                watch(self)
        return check(self, requested_attention, is_init_check, *args, **kwargs)

    @wraps(finish)
    def post_init(self: PreTrainedModel) -> None:
        finish(self)
        if self.config._attn_implementation == NAME:
            check_keywords(self)
            watch(self)

    stock: Any = PreTrainedModel
    stock.get_correct_attn_implementation = get_correct_attn_implementation
    stock.post_init = post_init
