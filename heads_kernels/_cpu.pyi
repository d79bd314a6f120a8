from collections.abc import Sequence

import torch
from torch import Tensor

_Terms = tuple[Tensor | None, Tensor | None, Tensor | None, float] | None
_Scores = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float, _Terms]
_Mask = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int, int]
_Options = tuple[Tensor | None, str, Tensor | None, float]

def attend(
    scores: _Scores,
    value: Tensor,
    mask: _Mask,
    options: _Options,
    recording: bool,
    threads: int,
    /,
) -> Tensor | None: ...
def attention_forward(
    scores: _Scores,
    value: Tensor,
    mask: _Mask,
    options: _Options,
    outputs: Sequence[Tensor | None],
    threads: int,
    alpha: Tensor | None,
    /,
) -> None: ...
def attention_backward(
    scores: _Scores,
    value: Tensor,
    mask: _Mask,
    options: _Options,
    closed_grad: bool,
    saved: tuple[Tensor, Tensor, Tensor, Tensor | None],
    gradients: Sequence[Tensor | None],
    threads: int,
    alpha: Tensor | None,
    /,
) -> None: ...
def attention_statistics(
    scores: _Scores,
    excluded: Tensor | None,
    mask: _Mask,
    outputs: Sequence[Tensor],
    threads: int,
    /,
) -> None: ...
def available_levels() -> list[str]: ...
def level() -> str: ...
def use_level(name: str, /) -> None: ...
def run_products(dtype: torch.dtype, steps: int, threads: int, /) -> int: ...
def run_powers(dtype: torch.dtype, steps: int, threads: int, /) -> int: ...
