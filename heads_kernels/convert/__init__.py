"""Conversion of ordinary attention to collaborative attention.

A model with known attention layers (`hk.heads.attention_layers`):

    conversion = hk.convert.collaborate(model, 192, calibration=batches)

Any other weights, `W_Q` and `W_K` `[H * D, D_in]` and `b_Q` `[H * D]`, with inputs `x` `[B, T, D_in]`:

    heads = hk.convert.Heads(
        W_Q.view(H, D, D_in), W_K.view(H, D, D_in), scale=D**-0.5, query_bias=b_Q.view(H, D)
    )
    factors = heads.fit(Ds, hk.convert.Moments.of(x))
    layer = hk.nn.CollaborativeMultiheadAttention(D_in, H, factors.dim, scale=factors.scale)
    layer.load_state_dict(
        {
            "q_proj.weight": factors.query,
            "k_proj.weight": factors.key,
            "mixing": factors.mixing,
            "content_proj.weight": factors.content,
        },
        strict=False,  # values and output are not converted
    )
"""

from heads_kernels.convert.collaborate import calibrate, collaborate, curves
from heads_kernels.convert.conversion import Conversion, Curves, Report, plot
from heads_kernels.convert.heads import Factors, Heads
from heads_kernels.convert.moments import Moments

__all__ = [
    "Conversion",
    "Curves",
    "Factors",
    "Heads",
    "Moments",
    "Report",
    "calibrate",
    "collaborate",
    "curves",
    "plot",
]
