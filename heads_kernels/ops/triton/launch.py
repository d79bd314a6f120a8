"""The launch of a kernel.

Triton takes 20 us to find the compiled kernel of a launch by its arguments, and 6 us to launch it. So compiled kernels
are cached here too, by everything that Triton may specialize on and more: the values of numbers, not only whether they
are 1 or a multiple of 16. Triton's compilation settings are those of the first launch.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from heads_kernels.ops.triton.operands import POINTERS
from heads_kernels.ops.triton.tiles import Tiles

#: Key of a launch -> the compiled kernel, and the values of its constants in the order of its parameters.
_KEPT: Final[dict[tuple[object, ...], tuple[Any, tuple[object, ...]]]] = {}
#: Entries of the cache; calls with other numbers of rows or keys have entries of their own. Heuristic.
_MOST_KEPT: Final = 4096
_PLAIN: Final = frozenset({type(None), int, float, bool})
_POINTERS: Final = frozenset(POINTERS)


def launch(
    kernel: Any, programs: int, like: Tensor, tiles: Tiles, *args: Any, **constants: Any
) -> None:
    """Run `programs` programs of `kernel` on the device and the current stream of `like`."""
    if programs == 0:
        return
    if like.is_cuda and like.device.index != torch.cuda.current_device():
        with torch.cuda.device(like.device):
            launch(kernel, programs, like, tiles, *args, **constants)
        return
    options = tiles.num_warps, tiles.num_stages, tiles.maxnreg
    facts: list[object] = [id(kernel), like.device, *options, *constants, *constants.values()]
    _collect_facts(args, facts)
    key = tuple(facts)
    if (kept := _KEPT.get(key)) is not None:
        compiled, values = kept
        compiled[programs, 1, 1](*args, *values)
        return
    compiled = kernel[(programs,)](*args, **constants, **tiles.launch_options)
    # None: interpreted. On AMD, kernels are also specialized on the size of the memory behind a pointer.
    if compiled is None or torch.version.hip:
        return
    if len(_KEPT) >= _MOST_KEPT:
        _KEPT.clear()
    _KEPT[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def _collect_facts(values: tuple[Any, ...], facts: list[object]) -> None:
    """Append dtype and alignment of each tensor in nested tuples, the block of a descriptor, and each number."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            facts.append(value)
        elif kind in _POINTERS:
            ptr = value[0]
            facts += ptr.dtype, ptr.data_ptr() & 15, *value[1:]
        elif isinstance(value, tuple):
            _collect_facts(value, facts)
        elif isinstance(value, Tensor):
            facts += value.dtype, value.data_ptr() & 15
        else:  # a descriptor of Triton or Gluon
            facts += value.base.dtype, *value.block_shape
