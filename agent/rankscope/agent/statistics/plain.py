"""Statistics of strided CPU tensors of plain numbers, by the kernel or, without one, by numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .columns import ROW, Partial
from .dtypes import NUMERIC
from .kernel import LARGE_COUNT, Kernel, codes
from .memory import dense_pieces, extents_of, logical_view, strided_view
from .numeric import measure_pieces, scaled_overrides
from .table import repeated

_CODES = codes("")


def measure_plain(tensor: torch.Tensor, kernel: Kernel | None) -> Partial:
    """Statistics of a tensor with memory and a dtype in NUMERIC, whatever its strides."""
    if kernel is not None:
        row = np.zeros((), ROW)
        if not _measure_into(row, tensor, kernel):
            return Partial(*(row[name].item() for name in Partial._fields))
    return _measure_with_numpy(tensor)


def float64_overrides(tensor: torch.Tensor, partial: Partial) -> dict[str, object]:
    """Mean and norm of a float64 tensor whose sums left the range of float64."""
    pieces = dense_pieces(logical_view(tensor, NUMERIC[torch.float64].storage))
    return scaled_overrides(partial, pieces, tensor.numel())


def _measure_into(row: npt.NDArray[Any], tensor: torch.Tensor, kernel: Kernel) -> bool:
    """Fill the row; True when it cannot hold the values exactly."""
    extents, repeats = extents_of(tensor)
    code, address = _CODES[tensor.dtype], tensor.data_ptr()
    if len(extents) == 1 and extents[0][1] == 1:
        count = extents[0][0]
        measure = kernel.measure if count < LARGE_COUNT else kernel.measure_large
        inexact = measure(address, count, row.ctypes.data, code)
    else:
        flat = [number for extent in extents for number in extent]
        array = (ctypes.c_int64 * len(flat))(*flat)
        inexact = kernel.measure_strided(address, len(extents), array, row.ctypes.data, code)
    if repeats > 1:
        for name in Partial._fields[2:]:
            row[name] *= repeats
    return bool(inexact)


def _measure_with_numpy(tensor: torch.Tensor) -> Partial:
    numeric = NUMERIC[tensor.dtype]
    extents, repeats = extents_of(tensor)
    view = strided_view(tensor.data_ptr(), numeric.storage, extents)
    partial = measure_pieces(dense_pieces(view), numeric)
    return repeated(partial, repeats) if repeats > 1 else partial
