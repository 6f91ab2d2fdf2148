"""Reading a CPU tensor's memory without calling a torch operator, which a mode could see."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

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


class Extents(NamedTuple):
    """How values lie in memory: (size, stride) in elements, outermost first, neighbours merged."""

    dimensions: tuple[tuple[int, int], ...]
    repeats: int  # how often each element counts
    numbers: ctypes.Array[ctypes.c_int64]  # the dimensions once more, as C reads them

    @property
    def is_dense(self) -> bool:
        return len(self.dimensions) == 1 and self.dimensions[0][1] == 1


@lru_cache(maxsize=4096)
def extents_of(shape: tuple[int, ...], strides: tuple[int, ...], in_order: bool = False) -> Extents:
    """The extents of a tensor without an empty dimension.

    Statistics do not ask for an order: dimensions are sorted as they lie in memory, so that a
    transposed tensor becomes one dense run, and expanded ones are counted in `repeats`. With
    `in_order` the order of indices is kept and `repeats` is 1.
    """
    dims = [(size, step) for size, step in zip(shape, strides, strict=True) if size != 1]
    repeats = 1
    if not in_order:
        repeats = math.prod(size for size, step in dims if step == 0)
        dims = [(size, step) for size, step in dims if step]
        dims.sort(key=itemgetter(1), reverse=True)
    merged: list[tuple[int, int]] = []
    for size, step in dims:
        if merged and merged[-1][1] == step * size:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    merged = merged or [(1, 1)]
    numbers = [number for pair in merged for number in pair]
    return Extents(tuple(merged), repeats, (ctypes.c_int64 * len(numbers))(*numbers))


def strided_view(address: int, dtype: np.dtype[Any], extents: Extents) -> Array:
    """The memory that `extents` name."""
    shape = tuple(size for size, _ in extents.dimensions)
    strides = tuple(step * dtype.itemsize for _, step in extents.dimensions)
    return array_at(address, dtype, shape, strides)


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
