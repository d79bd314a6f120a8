"""The table of all workloads, by device and form.

On a CPU: BERT-base, lengths, short sentences, real padding, shared widths, bfloat16, models, score terms, entmax. On a
GPU: the lengths of language models, then score terms and entmax. On both: decoding. `goals` has what they should reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, Literal

import torch
from torch import Tensor

from benchmarks.settings import Settings, word
from heads_kernels.mask import Mask
from heads_kernels.testing import Case, CollaborativeCase, EntmaxCase, GatedCase, Inputs, find
from heads_kernels.testing.masks import Sizes, by_head, fixed, half_padded, lower_right, padded

Direction = Literal["forward", "backward"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("forward", "backward")
#: The calls of a workload, in a dtype on a device; the same numbers every time.
Make = Callable[[torch.dtype, torch.device], tuple[Inputs, ...]]


@dataclass(frozen=True, eq=False)
class Workload:
    """One row of the benchmark: calls of one operator that are timed together.

    name            what `--only` picks by
    table           heading of the table that it stands in; `label` is its first column
    dense           name of the workload whose time on our own kernel this one is compared with
    expected        what the model that the inputs come from computed itself, `[B, H, T, Dv]`
    directions      those that are timed; both are checked
    flex            whether FlexAttention is compiled for it on a GPU, which takes many seconds
    """

    name: str
    table: str
    label: str
    make: Make
    dense: str | None = None
    expected: tuple[Tensor, ...] = ()
    directions: tuple[Direction, ...] = DIRECTIONS
    flex: bool = False


def flops(calls: tuple[Inputs, ...], direction: Direction) -> int:
    """Matrix-product FLOPs that have to be done, 2 per multiply-add: those of visible pairs of open heads.

    Forward: scores and P V. Backward: scores again, dQ, dK; dP, dV.
    """
    problems = (inputs.requires_grad().parsed() for inputs in calls)
    return sum(problem.flops(backward=direction == "backward") for problem in problems)


def drawn(case: Case) -> Make:
    """A synthetic case; where heads are closed or mixing has zeros, gradients are taken with `closed_grad=False`."""
    skips = case.closed > 0 or (isinstance(case, CollaborativeCase) and case.mixing != "dense")

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Inputs, ...]:
        inputs = case.make(dtype, device, drawn_on=device)
        return (replace(inputs, options={**inputs.options, "closed_grad": not skips}),)

    return make


def variants(prefix: str, table: str, case: Case, closed: tuple[int, ...]) -> list[Workload]:
    """The same call dense, causal, half padded and with parts of the heads closed; `case` is the dense one."""
    dense, case = f"{prefix}_dense", replace(case, gate="H")
    causal, padding = replace(case, is_causal=True), replace(case, mask=half_padded)
    return [
        Workload(dense, table, "dense, all heads open", drawn(case)),
        Workload(f"{prefix}_causal", table, "causal", drawn(causal), dense),
        *(
            Workload(f"{prefix}_closed_{percent}", table, f"{percent} % of the heads closed",
                drawn(replace(case, closed=percent / 100)), dense)
            for percent in closed
        ),
        Workload(f"{prefix}_half_padded", table, "half of every sequence padded", drawn(padding), dense),
    ]  # fmt: skip


def in_dtype(base: Workload, dtype: torch.dtype, table: str) -> Workload:
    """A workload in this dtype, whatever that of the run is."""
    return replace(base, name=f"{base.name}_{word(dtype)}", table=table, label=base.name, dense=None,
        make=lambda _, device: base.make(dtype, device))  # fmt: skip


def table(settings: Settings) -> list[Workload]:
    """The workloads of a form on a device; those of MiniLM, on a CPU, come by capturing it."""
    if settings.device == "cuda":
        if settings.form == "smoke":
            tiny = [*_long(32, 64, (16,), (32,)), *_long_shared(32, (32,), (32,), 16)]
            return [*tiny, *score_terms(16)[:1], *decoding(settings)]
        every = [*_long(), *_long_shared(), *_half(), *score_terms(), *entmax()]
        every += decoding(settings)
        quick = ("gated_D128_T4096_", "gated_D64_T4096_", "gated_D128_T16384_", "collaborative_Ds256_T4096_",
            "collaborative_Ds512_T4096_dense", "decoding_")  # fmt: skip
        return every if settings.form == "full" else [w for w in every if w.name.startswith(quick)]
    if settings.form == "smoke":
        return [*standard(64), *score_terms(8), *entmax(8), *decoding(settings)]
    if settings.form == "quick":
        return [*standard(), short()[0], narrow()[0], *decoding(settings)]
    return [*standard(closed=CLOSED_SERIES), *lengths(), *short(), *real_padding(), *shared(),
        *narrow(), *models(), *score_terms(), *entmax(), *decoding(settings)]  # fmt: skip


# ---------------------------------------------------------------------- on a CPU
#: Percent of the heads that are closed: in every form, and for the time over the share of open heads.
CLOSED: Final = (50, 75)
CLOSED_SERIES: Final = (25, 50, 75, 100)


def standard(T: int = 512, closed: tuple[int, ...] = CLOSED) -> list[Workload]:
    """Both operators in BERT-base's shape, and an output-gated language model; `closed` is for gated attention."""
    gated = replace(find("gated_attention", "bert_base_512"), T=T, S=T)
    shared = replace(find("collaborative_attention", "bert_base_256"), T=T, S=T)
    ragged = replace(find("collaborative_attention", "bert_base_256_ragged"), T=T, S=T)
    model = GatedCase("language_model", 1, 16, T, T, D=128, Dv=128, Hk=4, is_causal=True,
        gate="BHT", gate_activation="sigmoid", layout="transposed")  # fmt: skip
    table = f"collaborative attention, B2 H12 T{T} Ds256 Dv64 (BERT-base)"
    return [
        *variants("gated", f"gated attention, B2 H12 T{T} D64 (BERT-base)", gated, closed),
        *variants("collaborative", table, shared, CLOSED),
        Workload("collaborative_ragged", table, "ragged mixing, the same Ds", drawn(ragged),
            "collaborative_dense"),
        Workload("language_model", f"gated attention, B1 H16 Hk4 T{T} D128 (a language model)",
            "causal, sigmoid gate per token", drawn(model)),
    ]  # fmt: skip


#: T to B of the series over length, about a thousand tokens a call: at 12 heads of width 64 all
#: tensors of a call are 12 MB, so no length has the help of a cache that another has not.
LENGTHS: Final = {32: 32, 64: 16, 128: 8, 256: 4, 512: 2, 1024: 1, 2048: 1}
#: Of these both directions are timed, at two widths.
LONG: Final = (512, 2048)

#: B by T of short sentences, and the share of their tokens that is real: MiniLM's batches of real
#: text (`minilm`) have 0.4, batches sorted by length more.
SHORT: Final = ((8, 32), (32, 32), (8, 128), (32, 128))
_SHORT_REAL: Final = 0.5

#: Percent of real tokens in the series over padding, about; `sentence_lengths` draws them.
REAL: Final = (90, 70, 50, 25)

#: Widths of the shared query and key; BERT-base's 256 stands in `standard`.
SHARED: Final = (96, 256, 384)


def sentence_lengths(B: int, T: int, share: float) -> list[int]:
    """Tokens of B sentences, the longest T, about `share` of the B T real; the same ones every time.

    With u uniform in (0, 1), `T u^(1 / share - 1)` has the mean `share T`; one u is drawn from each of
    B equal parts, so that few sentences have that mean, too.
    """
    generator = torch.Generator().manual_seed(0)
    u = (torch.randperm(B, generator=generator) + torch.rand(B, generator=generator)) / B
    drawn = (T * u ** (1 / share - 1)).round().clamp(1, T).int()
    drawn[drawn.argmax()] = T
    return [int(length) for length in drawn]


def _gated(B: int, T: int, D: int) -> Case:
    """BERT-base's twelve heads, laid out as projections give them."""
    return GatedCase(f"T{T}_D{D}", B, 12, T, T, D=D, Dv=D, gate="H", layout="transposed")


def lengths() -> list[Workload]:
    """T 32 to 2048 dense and causal, without what `standard` has."""
    result = []
    for D, (T, B) in product((64, 128), LENGTHS.items()):
        if (T, D) == (512, 64) or (D == 128 and T not in LONG):
            continue
        case, name = _gated(B, T, D), f"gated_T{T}_D{D}"
        table = f"gated attention by length, B{B} H12 T{T} D{D}"
        directions = DIRECTIONS if T in LONG else DIRECTIONS[:1]
        result += [
            Workload(f"{name}_{kind}", table, kind, drawn(of), directions=directions)
            for kind, of in (("dense", case), ("causal", replace(case, is_causal=True)))
        ]
    return result


def short() -> list[Workload]:
    """Batches of short sentences, padded."""
    table = "gated attention, short sentences padded to the longest, H12 D64"
    result = []
    for B, T in SHORT:
        real = sentence_lengths(B, T, _SHORT_REAL)
        label = f"B{B} T{T}, {sum(real) / (B * T):.0%} of the tokens real"
        case = replace(_gated(B, T, 64), mask=padded(*real))
        result.append(Workload(f"gated_T{T}_B{B}_padded", table, label, drawn(case)))
    return result


def real_padding(B: int = 8, T: int = 256) -> list[Workload]:
    """The same batch with ever more padding, rows and keys; the first has none."""
    table, dense = f"gated attention, real padding, B{B} H12 T{T} D64", "gated_real_100"
    case = _gated(B, T, 64)
    result = [Workload(dense, table, "all tokens real", drawn(case))]
    for percent in REAL:
        real = sentence_lengths(B, T, percent / 100)
        share = sum(n * n for n in real) / (B * T * T)
        label = f"{sum(real) / (B * T):.0%} real, {share:.0%} of the FLOPs"
        padding = replace(case, mask=padded(*real))
        result.append(Workload(f"gated_real_{percent}", table, label, drawn(padding), dense))
    return result


def shared() -> list[Workload]:
    """Collaborative attention by its shared width, dense and ragged mixing, without what `standard` has."""
    result = []
    for (model, B, T, Dv), Ds in product((("bert_base", 2, 512, 64), ("minilm", 8, 128, 32)), SHARED):
        if (model, Ds) == ("bert_base", 256):
            continue
        dense, ragged = f"collaborative_{model}_{Ds}", f"collaborative_{model}_{Ds}_ragged"
        table = f"collaborative attention, B{B} H12 T{T} Ds{Ds} Dv{Dv} ({model})"
        case = CollaborativeCase(f"{model}_{Ds}", B, 12, T, T, Ds=Ds, Dv=Dv, scale=Dv**-0.5,
            content_bias=True, layout="transposed")  # fmt: skip
        result += [
            Workload(dense, table, "dense mixing", drawn(case)),
            Workload(ragged, table, "ragged mixing", drawn(replace(case, mixing="ragged")), dense),
        ]
    return result


#: Names in `standard` of what is timed in bfloat16, too.
NARROW: Final = ("gated_dense", "gated_causal", "collaborative_dense")


def narrow() -> list[Workload]:
    """Workloads of `standard` in bfloat16, whatever the dtype of the run."""
    table = "bfloat16, B2 H12 T512 (BERT-base)"
    return [in_dtype(base, torch.bfloat16, table) for base in standard() if base.name in NARROW]


def models() -> list[Workload]:
    """Shapes of further models."""
    keys, rows = sentence_lengths(8, 64, _SHORT_REAL), sentence_lengths(8, 72, _SHORT_REAL)
    changes: dict[str, dict[str, Any]] = {
        "transformer_base_encoder": {"mask": padded(*keys)},
        "transformer_base_cross": {"mask": padded(*keys, queries=False)},
        "transformer_base_decoder": {"mask": padded(*rows), "is_causal": True},
        "deit_197": {},
        "gqa_language_model_decode": {"B": 1, "mask": lower_right},
    }
    return [
        Workload(f"gated_{name}", "shapes of models", name, drawn(replace(find("gated_attention", name), **changed)))
        for name, changed in changes.items()
    ]


def score_terms(part: int = 1) -> list[Workload]:
    """Calls with a bias, a cap, sinks and dense masks, in the shapes of models; all lengths divided by `part`."""
    rows, T, L = 128 // part, 256 // part, 512 // part
    table = f"pair bias [1, H, T, T], B{rows} T{T} D32, sigmoid gate by element"
    result = []
    for H in (4, 8):  # heads of the rows of an alignment
        case = GatedCase(f"pair_bias_{H}", rows, H, T, T, D=32, Dv=32, gate="BHTD", gate_dtype=None,
            gate_activation="sigmoid", bias="1HTS", bias_dtype=None, layout="transposed")  # fmt: skip
        result.append(Workload(f"pair_bias_H{H}", table, f"H{H}", drawn(case)))
    # Offsets -128 to 128, which T5's 32 buckets divide up.
    t5 = GatedCase("t5_base_encoder", 8, 12, L, L, D=64, Dv=64, offsets=257, scale=1.0, layout="transposed")
    # Windows of a half and a quarter of the length: those of the models are longer than such calls, or as here.
    gemma = GatedCase("gemma_2", 1, 8, 2 * L, 2 * L, D=256, Dv=256, Hk=4, softcap=50.0, is_causal=True,
        mask=fixed(Mask(window=(L - 1, 0))), layout="transposed")  # fmt: skip
    gpt_oss = GatedCase("gpt_oss", 1, 64, L, L, D=64, Dv=64, Hk=8, sinks=True, is_causal=True,
        mask=fixed(Mask(window=(L // 4 - 1, 0))), layout="transposed")  # fmt: skip
    heads = GatedCase("head_windows", 1, 8, 8 * L, 8 * L, D=64, Dv=64, layout="transposed",
        mask=by_head(*4 * [(-1, 0), (L // 2 - 1, 0)]))  # fmt: skip
    of_models = {
        "t5_base": (f"T5-base encoder, B8 H12 T{L} D64", t5),
        "gemma_2": (f"Gemma 2, B1 H8 Hk4 T{2 * L} D256, cap", gemma),
        "gpt_oss": (f"GPT-OSS, B1 H64 Hk8 T{L} D64, sinks", gpt_oss),
        "head_windows": (f"window {L // 2} in every other head, B1 H8 T{8 * L} D64", heads),
    }
    table = "bias by offset, cap, sinks in the shapes of models"
    result += [Workload(name, table, label, drawn(case)) for name, (label, case) in of_models.items()]
    dense = replace(find("gated_attention", "bert_base_512"), T=L, S=L)
    table = f"dense bool masks [B, 1, T, S], B{dense.B} H{dense.H} T{L} D64"
    half, blocks = (replace(dense, mask=mask) for mask in (random_pairs, block_sparse))
    result += [
        Workload("mask_random", table, "half of the pairs, drawn", drawn(half), "gated_dense"),
        Workload("mask_blocks", table, "a quarter of the blocks", drawn(blocks), "gated_dense"),
    ]
    return result


def entmax(part: int = 1) -> list[Workload]:
    """Adaptively sparse attention beside bisection in PyTorch; all lengths divided by `part`."""
    result = []
    for (T, H), alpha in product(((512, 12), (2048, 3)), ((1.5, 1.5), (1.1, 1.9))):
        L, learned = T // part, alpha[0] != alpha[1]
        case = EntmaxCase(f"entmax_{T}_{alpha}", 1, H, L, L, D=64, Dv=64, alpha=alpha, layout="transposed")
        words = f"alpha {alpha[0]} to {alpha[1]}" if learned else f"alpha {alpha[0]}"
        result.append(Workload(f"entmax_T{T}{'_learned' if learned else ''}",
            "entmax, B1 D64; eager is bisection", f"H{H} T{L}, {words}", drawn(case)))  # fmt: skip
    return result


#: Larger caches are left out.
_MOST_CACHE: Final = 1 << 31


def decoding(settings: Settings) -> list[Workload]:
    """One query row against a cache with its heads first, as in transformers, or its tokens first, as in
    `hk.nn.KeyValueCache`; collaborative attention of the same width where all heads have keys of their own.
    On a CPU in bfloat16, too."""
    shapes = [(1, 12, 12, 512, 64), (8, 12, 12, 4096, 64), (1, 16, 4, 4096, 128)]
    if settings.form == "smoke":
        shapes = [(2, 12, 12, 32, 64), (2, 16, 4, 32, 64)]
    elif settings.form == "full":
        # On a CPU memory is the bound from batches of 8 on.
        batches = (1, 8) if settings.device == "cpu" else (1, 8, 64)
        shapes = [(B, *heads, S, D) for heads, D, B, S in product(((12, 12), (16, 4)), (64, 128), batches, (512, 4096))]
    result = []
    for B, H, Hk, S, D in shapes:
        sizes = f"B{B} H{H} Hk{Hk} S{S} D{D}"
        table, name = f"decoding, {sizes}", f"decoding_{sizes.replace(' ', '_')}"
        first = GatedCase(name, B, H, 1, S, D=D, Dv=D, Hk=Hk)
        cases: dict[str, Case] = {"heads_first": first, "tokens_first": replace(first, layout="transposed")}
        if Hk == H and D == 64:
            cases["shared"] = CollaborativeCase(name, B, H, 1, S, Ds=256, Dv=D, scale=D**-0.5, layout="transposed")
        if 2 * B * Hk * S * D * settings.dtype.itemsize > _MOST_CACHE:
            continue
        for kind, case in cases.items():
            label = kind.replace("_", " ")
            base = Workload(f"{name}_{kind}", table, label, drawn(case), directions=DIRECTIONS[:1])
            result.append(base)
            if (settings.device, settings.form) == ("cpu", "full"):
                narrow = in_dtype(base, torch.bfloat16, table)
                result.append(replace(narrow, label=f"{label}, bfloat16"))
    return result


def random_pairs(sizes: Sizes, device: torch.device) -> Tensor:
    """Half of the pairs, and the diagonal; the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    half = torch.rand(sizes.B, 1, sizes.T, sizes.S, generator=generator) < 0.5
    return (half | torch.eye(sizes.T, sizes.S, dtype=torch.bool)).to(device)


def block_sparse(sizes: Sizes, device: torch.device) -> Tensor:
    """Every fourth diagonal of 8 x 8 blocks."""
    i, j = (torch.arange(n, device=device) // (n // 8) for n in (sizes.T, sizes.S))
    visible = (i[:, None] - j) % 4 == 0
    return visible.expand(sizes.B, 1, sizes.T, sizes.S)


# ---------------------------------------------------------------------- on a GPU
#: Lengths, the most telling first. These, the 16384 tokens of a call and the 2048 features over its heads are the
#: convention of FlashAttention's charts. Collaborative attention has 12 heads of 64 values, as BERT-base.
GPU_LENGTHS: Final = (8192, 4096, 16384, 1024)


def _long(
    tokens: int = 16384,
    features: int = 2048,
    widths: tuple[int, ...] = (128, 64),
    every: tuple[int, ...] = GPU_LENGTHS,
) -> list[Workload]:
    """Gated attention at the lengths of language models; the first, at the first width, has FlexAttention beside it.

    Of the first two heads are closed and sequences padded, too.
    """
    result = []
    for T, D in product(every, widths):
        B, H = tokens // T, features // D
        case = GatedCase(f"T{T}_D{D}", B, H, T, T, D=D, Dv=D, gate="H", layout="transposed")
        found = variants(f"gated_D{D}_T{T}", f"gated attention, B{B} H{H} T{T} D{D}", case, CLOSED)
        varied, wide = T in every[:2], widths[0] == D
        if every[0] == T and wide:
            found = [replace(one, flex=True) for one in found]
        result += found if varied else found[:2]
        if varied and wide:
            grouped = replace(case, H=2 * H, Hk=H // 2, gate="BHTD", gate_activation="sigmoid", is_causal=True)
            label = f"causal, H{2 * H} Hk{H // 2}, sigmoid gate"
            result.append(Workload(f"gated_D{D}_gqa_T{T}", found[0].table, label, drawn(grouped)))
    return result


def _long_shared(
    tokens: int = 16384,
    widths: tuple[int, ...] = (256, 512, 768),
    every: tuple[int, ...] = (8192, 4096, 2048),
    Dv: int = 64,
) -> list[Workload]:
    """Collaborative attention at these lengths."""
    result = []
    for T, Ds in product(every, widths):
        B, H = tokens // T, 12
        case = CollaborativeCase(f"T{T}_Ds{Ds}", B, H, T, T, Ds=Ds, Dv=Dv, layout="transposed")
        name = f"collaborative_Ds{Ds}_T{T}"
        table = f"collaborative attention, B{B} H{H} T{T} Ds{Ds} Dv{Dv}"
        dense = f"{name}_dense"
        result.append(Workload(dense, table, "dense mixing", drawn(case)))
        if every.index(T) == len(every) // 2:
            causal, ragged = replace(case, is_causal=True), replace(case, mixing="ragged")
            result += [
                Workload(f"{name}_causal", table, "causal", drawn(causal), dense),
                Workload(f"{name}_ragged", table, "ragged mixing", drawn(ragged), dense),
            ]
    return result


def _half() -> list[Workload]:
    """Dense and causal calls of `_long` in float16."""
    table = "float16, T8192"
    return [
        in_dtype(base, torch.float16, table)
        for base in _long(every=(8192,))
        if base.label in ("dense, all heads open", "causal")
    ]
