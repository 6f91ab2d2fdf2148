"""Reading a CPU tensor's memory without calling a torch operator, which a mode could see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

#: Addresses below this are not trusted: a storage without memory gives its offset as the address.
LOWEST_ADDRESS = 1 << 40

_PIECE_ELEMENTS = 1 << 20


class _Memory:
    """Carries an address into numpy."""

    def __init__(self, address: int, dtype: np.dtype[Any], shape: Any, strides: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "typestr": dtype.str,
            "shape": shape,
            "strides": strides,
        }


def array_at(address: int, dtype: np.dtype[Any], shape: Any, strides: Any = None) -> Array:
    """A read-only view of memory; valid only while the owner lives. `strides` are bytes, None:
    dense.
    """
    return np.asarray(_Memory(address, dtype, shape, strides))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether all elements of a strided CPU tensor lie in memory that its storage owns."""
    if tensor.numel() == 0 or tensor.data_ptr() == 0:
        return False
    return _last_byte(tensor) <= tensor.untyped_storage().nbytes()


def _last_byte(tensor: torch.Tensor) -> int:
    if tensor.is_nested:
        return tensor.numel() * tensor.element_size()
    span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + span + 1) * tensor.element_size()


Extents = list[tuple[int, int]]


def extents_of(tensor: torch.Tensor) -> tuple[Extents, int]:
    """(size, stride) in elements, outermost first, in the order of memory, with neighbours merged.

    The second value says how often each element repeats (expanded dimensions). Order does not
    matter to statistics, so a transposed tensor comes out as one dense run.
    """
    dims = sorted(
        ((step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1),
        reverse=True,
    )
    repeats = 1
    extents: Extents = []
    for step, size in dims:
        if step == 0:
            repeats *= size
        elif extents and extents[-1][1] == step * size:
            extents[-1] = (extents[-1][0] * size, step)
        else:
            extents.append((size, step))
    return extents or [(1, 1)], repeats


def strided_view(address: int, dtype: np.dtype[Any], extents: Extents) -> Array:
    """The memory that `extents` name."""
    shape = tuple(size for size, _ in extents)
    return array_at(address, dtype, shape, tuple(step * dtype.itemsize for _, step in extents))


def logical_view(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """The tensor's memory in the order of its indices."""
    if tensor.is_contiguous():
        return array_at(tensor.data_ptr(), dtype, (tensor.numel(),))
    strides = tuple(step * dtype.itemsize for step in tensor.stride())
    return array_at(tensor.data_ptr(), dtype, tuple(tensor.shape), strides)


def dense_pieces(view: Array) -> Iterator[Array]:
    """The elements of a view as one-dimensional contiguous arrays, in order, copying 1M at a time
    at most.
    """
    if view.flags.c_contiguous:
        yield view.reshape(-1)
    elif view.size <= _PIECE_ELEMENTS:
        yield np.ascontiguousarray(view).reshape(-1)
    elif view.ndim == 1:
        for start in range(0, view.size, _PIECE_ELEMENTS):
            yield np.ascontiguousarray(view[start : start + _PIECE_ELEMENTS])
    else:
        for part in view:
            yield from dense_pieces(part)
