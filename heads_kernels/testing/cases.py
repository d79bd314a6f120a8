"""The named cases: one call each, from tiny ones and edge cases to the shapes of real models.

Tests and benchmarks read `GATED`, `COLLABORATIVE` and `ENTMAX`; a new row there is tested on every
backend and dtype. Tags: "tiny" and "nasty" (edge cases) run in every test run; "model" are shapes of
real models, for benchmarks and slow tests; "long" is too long for an oracle that builds the `[T, S]`
matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from heads_kernels.mask import Mask
from heads_kernels.testing import masks
from heads_kernels.testing.case import Case, CollaborativeCase, EntmaxCase, GatedCase

_TINY: Final = ("tiny",)
_MODEL: Final = ("model",)
_LOW: Final = (torch.float32, torch.bfloat16, torch.float16)

_of_model = partial(GatedCase, gate="H", layout="transposed", tags=_MODEL)
_converted = partial(CollaborativeCase, content_bias=True, layout="transposed", tags=_MODEL)


def _gates(make: Callable[..., Case]) -> tuple[Any, ...]:
    """Every rank of gate with every activation."""
    return tuple(
        make(f"gate_{gate.lower()}_{kind}", 2, 3, 19, 21, gate=gate, gate_activation=kind, closed=0.34, tags=_TINY)
        for gate in ("H", "BH", "BHT", "BHTD")
        for kind in ("identity", "sigmoid", "softplus")
    )


def _terms(make: Callable[..., Case]) -> tuple[Any, ...]:
    """Biases, caps and sinks, alike for both operators with softmax; `make` knows the widths."""
    return (
        make("bias_shared", 3, 2, 70, 67, bias="1HTS", gate="BHTD", gate_activation="sigmoid"),
        make("bias_rows", 2, 2, 33, 40, bias="B1T1", gate="BHT"),
        make("bias_keys", 2, 2, 33, 40, bias="11S", is_causal=True),
        make("bias_pairs", 2, 3, 33, 34, bias="TS", bias_dtype=None, gate="H", closed=0.34),
        make("bias_hides", 2, 2, 66, 70, bias="B1TS", bias_hides=True, mask=masks.holes),
        make("bias_dropout", 2, 2, 33, 41, bias="1HTS", dropout_p=0.2),
        make("offsets_causal", 1, 2, 130, 130, offsets=300, is_causal=True),
        make("offsets_decode", 2, 2, 1, 67, offsets=9, mask=masks.lower_right),
        make("softcap", 2, 2, 35, 70, softcap=1.5, gate="H"),
        make("softcap_bias", 2, 2, 65, 70, softcap=2.0, bias="1HTS", bias_hides=True, is_causal=True, outlier=8.0),
        make("sinks", 2, 3, 35, 70, sinks=True, mask=masks.holes, gate="H", closed=0.34),
        make("sinks_all", 2, 2, 70, 70, sinks=True, softcap=2.0, bias="1HTS", gate="BHT", dropout_p=0.1,
            mask=masks.padded(70, 33)),
        make("sinks_no_keys", 2, 2, 5, 0, sinks=True, gate="H"),
    )  # fmt: skip


def _alike(make: Callable[..., Case]) -> tuple[Any, ...]:
    """Sizes, layouts and masks, alike for both operators with softmax; `make` knows the widths."""
    return (
        make("closed_all", 2, 3, 17, 17, gate="H", closed=1.0),
        make("one_key", 2, 2, 3, 1),
        make("one_row", 2, 2, 1, 67, gate="BHT"),
        make("length_63", 1, 2, 63, 65),
        make("scale", 1, 2, 33, 34, scale=0.7),
        make("transposed", 2, 4, 49, 50, layout="transposed", gate="H"),
        make("padded", 4, 2, 70, 70, mask=masks.padded(70, 33, 1, 0), gate="BH"),
        make("padded_causal", 3, 2, 70, 70, mask=masks.padded(70, 64, 13, causal=True)),
        make("padded_left", 3, 2, 70, 70, mask=masks.left_padded, gate="BHT"),
        make("holes", 3, 2, 35, 70, mask=masks.holes, gate="H"),
        make("window", 1, 2, 130, 130, mask=masks.fixed(Mask(window=(9, 4)))),
        make("window_holes", 2, 2, 70, 70, mask=masks.window_over_holes, gate="BHT"),
        make("packed_causal", 1, 2, 100, 100, mask=masks.packed(31, 2, 65, causal=True), gate="H"),
        make("lower_right_blind_rows", 1, 2, 70, 33, mask=masks.lower_right, gate="BHT"),
        make("dense_heads", 2, 2, 20, 30, mask=masks.dense_heads),
        make("dropout", 2, 2, 33, 41, dropout_p=0.3, gate="H", closed=0.5),
        make("empty_batch", 0, 2, 5, 6, gate="BHT"),
        make("zero_keys", 2, 2, 5, 0, gate="H"),
        make("zero_rows", 2, 2, 0, 5, gate="BHT"),
        make("offsets", 2, 3, 70, 67, offsets=33, gate="H", closed=0.34),
        make("mean", 2, 3, 35, 70, gate="H", mean=4.0),
        make("declining_heads", 2, 3, 35, 70, gate="H", decline=2.0**-9),
    )


GATED: Final[tuple[GatedCase, ...]] = (
    GatedCase("one", 1, 1, 1, 1, D=1, Dv=1, tags=_TINY),
    GatedCase("small", 2, 2, 4, 5, D=8, Dv=8, tags=_TINY),
    GatedCase("small_causal", 2, 2, 6, 6, D=8, Dv=8, is_causal=True, gate="H", tags=_TINY),
    *_gates(partial(GatedCase, D=16, Dv=24)),
    GatedCase("gate_broadcast_batch", 2, 3, 9, 11, D=16, Dv=16, gate="1H", closed=0.34, tags=_TINY),
    GatedCase("gate_broadcast_heads", 2, 3, 9, 11, D=16, Dv=16, gate="B1", closed=0.5, tags=_TINY),
    GatedCase("gate_broadcast_one", 2, 3, 9, 11, D=16, Dv=16, gate="1", tags=_TINY),
    GatedCase("gate_broadcast_tokens", 2, 3, 9, 11, D=16, Dv=16, gate="B1T", tags=_TINY),
    GatedCase("gate_broadcast_width", 2, 3, 9, 11, D=16, Dv=16, gate="1H1D", gate_activation="sigmoid", tags=_TINY),
    GatedCase("gate_wide_rank_heads", 2, 3, 9, 11, D=16, Dv=16, gate="BH11", closed=0.5, tags=_TINY),
    GatedCase("gate_strided_tokens", 2, 3, 33, 35, D=16, Dv=16, gate="BHT", gate_strided=True),
    GatedCase("gate_strided_elements", 2, 3, 33, 35, D=16, Dv=20, gate="BHTD", gate_strided=True,
        gate_activation="sigmoid"),
    GatedCase("gate_own_dtype", 2, 3, 33, 35, D=16, Dv=16, gate="BHTD", gate_dtype=None),
    GatedCase("closed_heads", 2, 4, 65, 65, D=32, Dv=32, gate="H", closed=0.5),
    GatedCase("closed_batch_heads", 3, 4, 33, 40, D=32, Dv=32, gate="BH", closed=0.5, Hk=2, mask=masks.causal),
    GatedCase("length_65_causal", 1, 2, 65, 65, D=32, Dv=32, is_causal=True),
    GatedCase("length_1000", 1, 2, 200, 1003, D=32, Dv=32, gate="H"),
    GatedCase("length_1000_causal", 1, 2, 1000, 1000, D=16, Dv=16, is_causal=True),
    GatedCase("cross", 2, 2, 37, 130, D=32, Dv=48),
    GatedCase("grouped", 2, 6, 34, 35, D=16, Dv=16, Hk=2, gate="H"),
    GatedCase("multi_query", 1, 5, 34, 35, D=16, Dv=16, Hk=1, is_causal=True),
    GatedCase("width_1_sharp", 2, 8, 130, 130, D=8, Dv=1, scale=1.5),  # no average over numbers hides an error
    GatedCase("width_3", 1, 2, 17, 18, D=3, Dv=5),
    GatedCase("width_40_72", 1, 2, 33, 34, D=40, Dv=72),
    GatedCase("width_72_40", 1, 2, 33, 34, D=72, Dv=40),
    GatedCase("width_96", 1, 2, 66, 67, D=96, Dv=96),
    GatedCase("width_128", 1, 2, 66, 67, D=128, Dv=128, is_causal=True),
    GatedCase("width_256", 1, 1, 20, 33, D=256, Dv=256),
    GatedCase("scale_negative", 1, 2, 33, 34, D=16, Dv=16, scale=-0.3),
    GatedCase("scale_zero", 1, 2, 33, 34, D=16, Dv=16, scale=0.0),
    GatedCase("outliers", 1, 2, 65, 130, D=64, Dv=64, outlier=40.0),
    GatedCase("transposed_grouped", 2, 4, 49, 50, D=24, Dv=40, Hk=2, layout="transposed",
        gate="BHT", mask=masks.padded(50, 31, queries=False)),
    GatedCase("sliced", 2, 3, 33, 47, D=24, Dv=40, layout="sliced", gate="BHTD"),
    GatedCase("sliced_causal", 1, 2, 65, 65, D=16, Dv=16, layout="sliced", is_causal=True),
    GatedCase("lower_right", 1, 2, 33, 70, D=16, Dv=16, mask=masks.lower_right),
    GatedCase("causal_more_keys", 1, 2, 33, 70, D=16, Dv=16, is_causal=True),
    GatedCase("window_causal", 1, 2, 200, 200, D=16, Dv=16, mask=masks.fixed(Mask(causal=True, window=(33, -1)))),
    GatedCase("window_lower_right", 1, 2, 40, 90, D=16, Dv=16,
        mask=masks.fixed(Mask(causal="lower_right", window=(17, 0)))),
    GatedCase("padded_keys", 3, 2, 21, 70, D=16, Dv=16, mask=masks.padded(70, 65, 0, queries=False)),
    GatedCase("padded_tensor", 3, 2, 33, 70, D=16, Dv=16, mask=masks.key_padding_tensor),
    GatedCase("head_windows", 2, 4, 130, 130, D=16, Dv=16, Hk=2, gate="BHT",
        mask=masks.by_head((-1, 0), (9, 0), (33, -1), (0, 0))),
    GatedCase("head_windows_blind_rows", 1, 3, 140, 90, D=16, Dv=24, gate="H", closed=0.34,
        mask=masks.by_head((5, 3), (-1, 0), (70, 0))),
    GatedCase("first_keys", 1, 2, 200, 200, D=16, Dv=16, mask=masks.fixed(Mask(window=(20, 4), first_keys=5))),
    GatedCase("streaming", 1, 4, 300, 300, D=16, Dv=16, Hk=2, gate="H", dropout_p=0.1,
        mask=masks.by_head((-1, 0), (33, 0), (20, 0), (64, 0), first_keys=[0, 4, 130, 1])),
    GatedCase("streaming_holes", 2, 4, 150, 150, D=16, Dv=24, Hk=1, sinks=True, softcap=2.0,
        mask=masks.streaming_over_holes),
    GatedCase("streaming_bias", 1, 2, 150, 200, D=16, Dv=24, bias="1HTS", bias_hides=True,
        mask=masks.by_head((9, 0), (30, 0), first_keys=[70, 3])),
    GatedCase("streaming_decode", 2, 8, 1, 300, D=64, Dv=64, Hk=2, layout="transposed",
        mask=masks.by_head(*3 * [(-1, 0), (20, 0)], (130, 0), (0, 0), first_keys=[0, 4, 70, 1] * 2)),
    GatedCase("streaming_few_rows", 2, 4, 5, 300, D=32, Dv=32, Hk=2, gate="H", closed=0.25,
        mask=masks.streaming_over_holes),
    GatedCase("packed", 1, 2, 100, 100, D=16, Dv=16, mask=masks.packed(1, 40, 33, 20)),
    GatedCase("prefix", 2, 2, 70, 70, D=16, Dv=16, mask=masks.prefix(0, 41)),
    GatedCase("dense_rows", 2, 2, 20, 30, D=16, Dv=16, mask=masks.dense_rows, gate="H"),
    GatedCase("dense_blocks", 2, 4, 150, 215, D=16, Dv=24, Hk=2, mask=masks.dense_blocks, gate="BHT"),
    GatedCase("dropout_few_keys", 2, 2, 64, 2, D=16, Dv=16, dropout_p=0.25),  # sharp rows
    GatedCase("dropout_everything", 2, 4, 66, 66, D=24, Dv=40, Hk=2, dropout_p=0.1, gate="BHT",
        gate_activation="sigmoid", mask=masks.padded(66, 35, causal=True), layout="transposed"),
    GatedCase("decode", 2, 8, 1, 300, D=64, Dv=64, Hk=2, mask=masks.lower_right, gate="BHT",
        gate_activation="sigmoid", layout="transposed"),
    GatedCase("bias", 2, 6, 35, 70, D=16, Dv=24, Hk=2, bias="BHTS", gate="H"),
    *_alike(partial(GatedCase, D=16, Dv=24)),
    *_terms(partial(GatedCase, D=16, Dv=24)),
    GatedCase("declining_heads_terms", 1, 2, 66, 70, D=24, Dv=24, bias="1HTS", sinks=True, softcap=2.0,
        gate="BHT", decline=2.0**-9, is_causal=True),
    # Shapes of real models.
    _of_model("bert_base_512", 2, 12, 512, 512, D=64, Dv=64),
    _of_model("bert_base_512_closed_50", 2, 12, 512, 512, D=64, Dv=64, closed=0.5),
    _of_model("bert_base_512_closed_75", 2, 12, 512, 512, D=64, Dv=64, closed=0.75),
    _of_model("bert_base_512_causal", 2, 12, 512, 512, D=64, Dv=64, is_causal=True),
    _of_model("bert_base_512_half_padded", 2, 12, 512, 512, D=64, Dv=64, mask=masks.half_padded),
    _of_model("bert_base_128_padded", 8, 12, 128, 128, D=64, Dv=64,
        mask=masks.padded(128, 103, 90, 77, 61, 40, 31, 12)),
    _of_model("minilm_128", 8, 12, 128, 128, D=32, Dv=32, mask=masks.padded(128, 110, 95, 64, 52, 33, 25, 9)),
    _of_model("transformer_base_encoder", 8, 8, 64, 64, D=64, Dv=64, mask=masks.padded(64, 60, 51, 43, 37, 30, 22, 14)),
    _of_model("transformer_base_decoder", 8, 8, 72, 72, D=64, Dv=64,
        mask=masks.padded(72, 66, 58, 45, 40, 31, 20, 15, causal=True)),
    _of_model("transformer_base_cross", 8, 8, 72, 64, D=64, Dv=64,
        mask=masks.padded(64, 60, 51, 43, 37, 30, 22, 14, queries=False)),
    _of_model("deit_197", 4, 12, 197, 197, D=64, Dv=64),
    GatedCase("gqa_language_model", 1, 32, 1024, 1024, D=128, Dv=128, Hk=8, is_causal=True,
        gate="BHT", gate_activation="sigmoid", layout="transposed", dtypes=_LOW, tags=_MODEL),
    GatedCase("gqa_language_model_decode", 4, 32, 1, 2048, D=128, Dv=128, Hk=8, mask=masks.lower_right, gate="BHT",
        gate_activation="sigmoid", layout="transposed", dtypes=_LOW, tags=_MODEL),
    GatedCase("long_8192", 1, 8, 8192, 8192, D=64, Dv=64, gate="H", dtypes=_LOW, tags=("model", "long")),
)  # fmt: skip


# ---------------------------------------------------------------------- collaborative attention
COLLABORATIVE: Final[tuple[CollaborativeCase, ...]] = (
    CollaborativeCase("one", 1, 1, 1, 1, Ds=1, Dv=1, tags=_TINY),
    CollaborativeCase("small", 2, 2, 4, 5, Ds=8, Dv=8, tags=_TINY),
    CollaborativeCase("small_bias", 2, 2, 6, 6, Ds=8, Dv=8, content_bias=True, is_causal=True, tags=_TINY),
    *_gates(partial(CollaborativeCase, Ds=32, Dv=24)),
    CollaborativeCase("blocks", 2, 4, 33, 34, Ds=64, Dv=16, mixing="blocks"),
    CollaborativeCase("blocks_uneven", 2, 3, 33, 34, Ds=40, Dv=16, mixing="blocks", content_bias=True),
    CollaborativeCase("ragged", 2, 4, 33, 70, Ds=128, Dv=16, mixing="ragged", gate="H"),
    CollaborativeCase("ragged_bias", 2, 4, 65, 66, Ds=112, Dv=24, mixing="ragged", content_bias=True, is_causal=True),
    CollaborativeCase("ragged_unaligned", 2, 4, 33, 34, Ds=72, Dv=16, mixing="unaligned"),
    CollaborativeCase("zero_chunks", 2, 3, 33, 34, Ds=100, Dv=16, mixing="chunks"),
    CollaborativeCase("zero_head", 2, 3, 33, 34, Ds=48, Dv=16, mixing="zero_head"),
    CollaborativeCase("zero_head_bias", 2, 3, 33, 34, Ds=48, Dv=16, mixing="zero_head", content_bias=True),
    CollaborativeCase("length_1000", 1, 2, 1000, 1001, Ds=32, Dv=16, content_bias=True, is_causal=True),
    CollaborativeCase("width_72", 1, 2, 33, 34, Ds=72, Dv=40),
    CollaborativeCase("width_1_sharp", 2, 3, 64, 64, Ds=8, Dv=1, scale=1.5),
    CollaborativeCase("width_7", 1, 3, 33, 34, Ds=7, Dv=5),
    CollaborativeCase("width_384", 1, 2, 20, 35, Ds=384, Dv=64),
    CollaborativeCase("outliers", 1, 2, 65, 130, Ds=64, Dv=32, outlier=20.0),
    CollaborativeCase("sliced", 2, 3, 33, 47, Ds=40, Dv=24, layout="sliced", mixing="unaligned"),
    CollaborativeCase("head_windows", 2, 4, 130, 130, Ds=32, Dv=16, Hv=2, content_bias=True,
        mask=masks.by_head((-1, 0), (9, 0), (33, -1), (0, 0))),
    CollaborativeCase("streaming", 1, 3, 200, 200, Ds=48, Dv=16, gate="H", dropout_p=0.1,
        mask=masks.by_head((-1, 0), (33, 0), (20, 0), first_keys=[0, 4, 70])),
    CollaborativeCase("streaming_holes", 2, 3, 66, 130, Ds=32, Dv=16, sinks=True, bias="1HTS",
        mask=masks.streaming_over_holes),
    CollaborativeCase("five_heads", 1, 5, 10, 10, Ds=80, Dv=16, content_bias=True),
    CollaborativeCase("dense_blocks", 2, 2, 150, 215, Ds=32, Dv=16, mask=masks.dense_blocks),
    CollaborativeCase("decode", 2, 8, 1, 300, Ds=128, Dv=64, mask=masks.lower_right, content_bias=True),
    CollaborativeCase("grouped", 2, 6, 34, 35, Ds=48, Dv=16, Hv=2, content_bias=True),
    CollaborativeCase("grouped_causal", 2, 4, 65, 65, Ds=64, Dv=24, Hv=2, mixing="ragged",
        is_causal=True, gate="BHT", gate_activation="sigmoid"),
    CollaborativeCase("grouped_padded", 3, 4, 70, 70, Ds=40, Dv=16, Hv=2, gate="H", closed=0.34,
        mask=masks.padded(70, 33, 1), layout="transposed"),
    CollaborativeCase("grouped_closed", 3, 4, 33, 70, Ds=32, Dv=16, Hv=2, gate="BH", closed=0.5,
        mask=masks.holes, content_bias=True),
    CollaborativeCase("grouped_elements", 2, 4, 19, 21, Ds=32, Dv=24, Hv=2, gate="BHTD",
        gate_activation="softplus", layout="sliced", tags=_TINY),
    CollaborativeCase("grouped_dropout", 2, 4, 33, 41, Ds=32, Dv=16, Hv=2, dropout_p=0.2, bias="1HTS", gate="H"),
    CollaborativeCase("grouped_zero_chunks", 2, 4, 130, 131, Ds=100, Dv=16, Hv=2, mixing="chunks",
        mask=masks.padded(131, 67, queries=False)),
    CollaborativeCase("grouped_decode", 2, 8, 1, 300, Ds=128, Dv=64, Hv=2, mixing="ragged",
        mask=masks.lower_right, gate="BHT", gate_activation="sigmoid", layout="transposed"),
    CollaborativeCase("multi_value", 1, 5, 34, 35, Ds=80, Dv=16, Hv=1, is_causal=True, sinks=True),
    CollaborativeCase("bias", 2, 3, 35, 70, Ds=32, Dv=16, bias="BHTS", gate="H"),
    *_alike(partial(CollaborativeCase, Ds=32, Dv=16, content_bias=True)),
    *_terms(partial(CollaborativeCase, Ds=32, Dv=16)),
    # Converted models keep the scale of the original: 64**-0.5 for BERT-base, 32**-0.5 for MiniLM.
    _converted("bert_base_256", 2, 12, 512, 512, Ds=256, Dv=64, scale=0.125),
    _converted("bert_base_256_ragged", 2, 12, 512, 512, Ds=256, Dv=64, scale=0.125, mixing="ragged"),
    _converted("bert_base_256_padded", 8, 12, 128, 128, Ds=256, Dv=64, scale=0.125,
        mask=masks.padded(128, 103, 90, 77, 61, 40, 31, 12)),
    _converted("bert_base_384", 2, 12, 512, 512, Ds=384, Dv=64, scale=0.125),
    _converted("bert_base_384_ragged", 2, 12, 512, 512, Ds=384, Dv=64, scale=0.125, mixing="ragged"),
    _converted("minilm_192", 8, 12, 128, 128, Ds=192, Dv=32, scale=32**-0.5,
        mask=masks.padded(128, 110, 95, 64, 52, 33, 25, 9)),
    _converted("minilm_192_ragged", 8, 12, 128, 128, Ds=192, Dv=32, scale=32**-0.5, mixing="ragged",
        mask=masks.padded(128, 110, 95, 64, 52, 33, 25, 9)),
)  # fmt: skip


# ---------------------------------------------------------------------- entmax attention
_SPREAD: Final = (1.05, 2.0)
#: The names of cases that are those of gated attention, by their `alpha`.
_OF_GATED: Final = {
    (1.5, 1.5): (
        "one", "small_causal", "one_row", "outliers", "sliced", "window", "packed_causal", "empty_batch", "zero_keys",
        "bias_hides", "offsets", "dropout_everything",
    ),
    _SPREAD: (
        "closed_heads", "closed_batch_heads", "multi_query", "holes", "dense_blocks", "bias_shared", "softcap_bias",
        "gate_bhtd_sigmoid", "transposed_grouped", "head_windows", "declining_heads",
    ),
    (1.3, 1.8): ("cross",),
}  # fmt: skip

ENTMAX: Final[tuple[EntmaxCase, ...]] = (
    *(EntmaxCase(**vars(case), alpha=alpha) for case in GATED for alpha in _OF_GATED if case.name in _OF_GATED[alpha]),
    EntmaxCase("sparsemax", 2, 3, 19, 21, D=16, Dv=24, alpha=(2.0, 2.0), tags=_TINY),
    EntmaxCase("near_softmax", 2, 3, 19, 21, D=16, Dv=24, alpha=(1.02, 1.1), tags=_TINY),
    EntmaxCase("length_1000", 1, 2, 130, 1003, D=32, Dv=32, gate="H", alpha=_SPREAD),
    EntmaxCase("streaming", 1, 4, 200, 200, D=16, Dv=16, Hk=2, gate="H",
        mask=masks.by_head((-1, 0), (33, 0), (20, 0), (64, 0), first_keys=[0, 4, 70, 1])),
    EntmaxCase("mean", 2, 3, 35, 70, D=16, Dv=24, mean=2.0, alpha=_SPREAD),
)  # fmt: skip


#: The cases of the operators with softmax.
CASES: Final[tuple[Case, ...]] = (*GATED, *COLLABORATIVE)


def find(operator: str, name: str) -> Case:
    """The case of this operator and name; raises `KeyError` with the existing names."""
    table = {case.name: case for case in (*CASES, *ENTMAX) if case.operator == operator}
    if name not in table:
        raise KeyError(f"{operator} has no case {name!r}; it has {', '.join(table)}")
    return table[name]
