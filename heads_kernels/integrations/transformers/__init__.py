"""transformers models on the operators: `attn_implementation="heads_kernels"`, and `use(model)`.

Importing this package registers the attention function and the mask function with transformers (5.x), so that
`from_pretrained(..., attn_implementation="heads_kernels")` and `model.set_attn_implementation("heads_kernels")` work.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from heads_kernels.heads.interface import NAME
from heads_kernels.integrations.transformers.attention import attention_forward
from heads_kernels.integrations.transformers.masks import prepare_mask
from heads_kernels.integrations.transformers.models import from_pretrained, release, use

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, prepare_mask)

__all__ = ["from_pretrained", "release", "use"]
