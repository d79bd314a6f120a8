from collections.abc import Sequence

import torch
from torch import Tensor

_Terms = tuple[Tensor | None, Tensor | None, Tensor | None, float] | None
_Scores = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float, _Terms]
_Mask = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int, int, Tensor | None]
_Options = tuple[Tensor | None, str, Tensor | None, float]
_Read = tuple[Tensor, Tensor, Tensor]
_LaunchTarget = tuple[int, int]

def attention_forward(
    scores: _Scores,
    value: Tensor,
    mask: _Mask,
    options: _Options,
    outputs: Sequence[Tensor | None],
    parts: tuple[Tensor, Tensor, Tensor] | None,
    target: _LaunchTarget,
    /,
) -> None: ...
def attention_closed(
    scores: _Scores,
    value: Tensor,
    mask: _Mask,
    options: _Options,
    dout: Tensor,
    dgate: Tensor,
    target: _LaunchTarget,
    /,
) -> None: ...
def attention_rows(
    scores: _Scores,
    value: Tensor,
    mask: _Mask,
    options: _Options,
    read: tuple[Tensor, Tensor, Tensor, Tensor | None],
    written: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    target: _LaunchTarget,
    /,
) -> None: ...
def attention_keys(
    scores: _Scores,
    value: Tensor,
    mask: _Mask,
    options: _Options,
    read: _Read,
    gradients: Sequence[Tensor | None],
    splits: int,
    target: _LaunchTarget,
    /,
) -> None: ...
def attention_queries(
    scores: _Scores,
    value: Tensor,
    mask: _Mask,
    options: _Options,
    read: _Read,
    gradients: Sequence[Tensor | None],
    splits: int,
    closed_grad: bool,
    target: _LaunchTarget,
    /,
) -> None: ...
def attention_bias(
    scores: _Scores,
    value: Tensor,
    mask: _Mask,
    options: _Options,
    read: _Read,
    gradients: Sequence[Tensor | None],
    splits: int,
    target: _LaunchTarget,
    /,
) -> None: ...
def attention_statistics(
    scores: _Scores,
    excluded: Tensor | None,
    mask: _Mask,
    outputs: Sequence[Tensor],
    target: _LaunchTarget,
    /,
) -> None: ...
def dense_cells(mask: Tensor, cells: Tensor, target: _LaunchTarget, /) -> None: ...
def tiles_of(
    kernel: str, dtype: torch.dtype, D: int, Dv: int, terms: bool, device: int, /
) -> tuple[int, int, int]: ...
def unsupported_device(index: int, /) -> str: ...
def wrapper_names() -> list[str]: ...
def check_wrapper(name: str, tensors: Sequence[Tensor], target: _LaunchTarget, /) -> None: ...
