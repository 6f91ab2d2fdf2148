"""Statistics of strided CPU tensors of plain numbers, by the kernel or, without one, by numpy."""

from __future__ import annotations

import numpy as np
import torch

from .columns import ROW, Partial
from .dtypes import NUMERIC
from .kernel import Kernel, codes
from .memory import dense_pieces, extents_of, logical_view, strided_view
from .numeric import measure_pieces, scaled_overrides
from .table import repeated

_CODES = codes("")


def measure_plain(tensor: torch.Tensor, kernel: Kernel | None) -> Partial:
    """Statistics of a tensor with memory and a dtype in NUMERIC, whatever its strides."""
    extents = extents_of(tensor.shape, tensor.stride())
    if kernel is not None:
        row = np.zeros((), ROW)
        code, address = _CODES[tensor.dtype], row.ctypes.data
        if not kernel.measure_extents(tensor.data_ptr(), extents, address, code):
            partial = Partial(*row.item()[: len(Partial._fields)])
            return repeated(partial, extents.repeats)
    numeric = NUMERIC[tensor.dtype]
    view = strided_view(tensor.data_ptr(), numeric.storage, extents)
    return repeated(measure_pieces(dense_pieces(view), numeric), extents.repeats)


def float64_overrides(tensor: torch.Tensor, partial: Partial) -> dict[str, object]:
    """Mean and norm of a float64 tensor whose sums left the range of float64."""
    pieces = dense_pieces(logical_view(tensor, NUMERIC[torch.float64].storage))
    return scaled_overrides(partial, pieces, tensor.numel())
