"""Which dtypes are measured from memory, and how numpy reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Numeric:
    """How a dtype lies in memory (`storage`) and how its values become a numpy dtype that can
    count.
    """

    name: str
    storage: np.dtype[Any]
    widen: Callable[[Array], Array]
    is_float: bool = False

    @property
    def itemsize(self) -> int:
        return self.storage.itemsize


def _same(values: Array) -> Array:
    return values


def _half(values: Array) -> Array:
    return values.astype(np.float32)


def _brain(values: Array) -> Array:
    return (values.astype(np.uint32) << 16).view(np.float32)


def _integer(name: str) -> Numeric:
    return Numeric(name, np.dtype(name), _same)


#: The name is also the suffix of the kernel's function.
NUMERIC: dict[torch.dtype, Numeric] = {
    torch.float32: Numeric("float32", np.dtype("f4"), _same, is_float=True),
    torch.float64: Numeric("float64", np.dtype("f8"), _same, is_float=True),
    torch.float16: Numeric("float16", np.dtype("f2"), _half, is_float=True),
    torch.bfloat16: Numeric("bfloat16", np.dtype("u2"), _brain, is_float=True),
    torch.bool: Numeric("bool", np.dtype("u1"), _same),
    **{
        getattr(torch, name): _integer(name)
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
        if hasattr(torch, name)
    },
}
