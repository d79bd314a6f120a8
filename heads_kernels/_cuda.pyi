import torch
from torch import Tensor

from heads_kernels.call import Call

_Read = tuple[Tensor, Tensor, Tensor]
_Written = tuple[Tensor | None, ...]
_LaunchTarget = tuple[int, int]

def call_fields() -> str: ...
def attention_forward(
    call: Call,
    results: tuple[Tensor, ...],
    parts: tuple[Tensor, Tensor, Tensor] | None,
    cells: Tensor | None,
    target: _LaunchTarget,
    /,
) -> None: ...
def attention_closed(
    call: Call, dout: Tensor, dgate: Tensor, cells: Tensor | None, target: _LaunchTarget, /
) -> None: ...
def attention_rows(
    call: Call, read: tuple[Tensor | None, ...], written: _Written, target: _LaunchTarget, /
) -> None: ...
def attention_keys(
    call: Call,
    read: _Read,
    gradients: _Written,
    splits: int,
    cells: Tensor | None,
    target: _LaunchTarget,
    /,
) -> None: ...
def attention_queries(
    call: Call,
    read: _Read,
    gradients: _Written,
    splits: int,
    cells: Tensor | None,
    target: _LaunchTarget,
    /,
) -> None: ...
def attention_bias(
    call: Call,
    read: _Read,
    gradients: _Written,
    splits: int,
    cells: Tensor | None,
    target: _LaunchTarget,
    /,
) -> None: ...
def attention_statistics(
    call: Call,
    results: _Written,
    rows: Tensor | None,
    cells: Tensor | None,
    target: _LaunchTarget,
    /,
) -> None: ...
def dense_cells(mask: Tensor, cells: Tensor, target: _LaunchTarget, /) -> None: ...
def tiles_of(kernel: str, dtype: torch.dtype, D: int, Dv: int, terms: bool, device: int, /) -> tuple[int, int, int]: ...
def unsupported_device(index: int, /) -> str: ...
