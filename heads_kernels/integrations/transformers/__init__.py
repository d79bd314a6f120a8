"""transformers models on the operators: `attn_implementation="heads_kernels"`, and `use(model)`.

Importing this package registers the attention function and the mask function with transformers (5.x), so that
`from_pretrained(..., attn_implementation="heads_kernels")` and `model.set_attn_implementation("heads_kernels")` work.
"""

from heads_kernels.integrations.transformers.models import from_pretrained, register, release, use
from heads_kernels.integrations.transformers.tested import TESTED

register()

__all__ = ["TESTED", "from_pretrained", "release", "use"]
