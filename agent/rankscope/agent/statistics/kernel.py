"""The compiled kernel (kernel.c), where the installation has it: one read of memory for all
statistics.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rankscope.agent.native import walk

from .columns import ROW
from .dtypes import NUMERIC
from .memory import LOWEST_ADDRESS, Extents

_log = logging.getLogger("rankscope")

#: Written by hatch_build.py when the package is built.
LIBRARY = Path(__file__).with_name(
    "librankscope_kernel." + {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
)

#: From this number of elements on a call takes long enough to let other threads run.
LARGE_COUNT = 1 << 16

# Positions are the kernel's numbers.
_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "bool", "int8", "uint8", "int16", "uint16"),
    *("int32", "uint32", "int64", "uint64"),
)
_CHECKSUMS = {"": 0, "md5": 1, "xor": 2}
_BEST_FIRST = (2, 1, 0)

Measure = Callable[[int, int, int, int], int]
MeasureStrided = Callable[[int, int, object, int, int], int]
#: (tensors, start, address of the first row, numbers of dtypes) -> how far it came.
Loop = Callable[[list[Any], int, int, dict[torch.dtype, int]], int]


@dataclass(frozen=True)
class Kernel:
    """The kernel's functions; each writes one row at an address and returns 1 if the row is not
    exact.

    `measure(data, count, row, code)` keeps the interpreter lock, `measure_large` lets it go;
    `measure_strided(data, dimensions, numbers, row, code)` and its large brother take extents.
    """

    instructions: str
    measure: Measure
    measure_large: Measure
    measure_strided: MeasureStrided
    measure_strided_large: MeasureStrided

    def measure_extents(self, data: int, extents: Extents, row: int, code: int) -> int:
        """Measure each value once, whatever `extents.repeats` says."""
        count = math.prod(size for size, _ in extents.dimensions)
        if extents.is_dense:
            return (self.measure if count < LARGE_COUNT else self.measure_large)(
                data, count, row, code
            )
        strided = self.measure_strided if count < LARGE_COUNT else self.measure_strided_large
        return strided(data, len(extents.dimensions), extents.numbers, row, code)


def loop_over(kernel: Kernel) -> Loop | None:
    """The compiled loop that measures a list of tensors with the kernel, where there is one."""
    if walk is None:
        return None
    address = ctypes.cast(kernel.measure, ctypes.c_void_p).value  # type: ignore[arg-type]
    walk.use(address or 0, ROW.itemsize, LARGE_COUNT, LOWEST_ADDRESS)
    return walk.measure


def codes(checksum: str) -> dict[torch.dtype, int]:
    """What the kernel calls each dtype when it also computes `checksum` ("md5" only leaves room for
    it).
    """
    return {
        dtype: 16 * _CHECKSUMS[checksum] + _NAMES.index(numeric.name)
        for dtype, numeric in NUMERIC.items()
    }


@lru_cache(maxsize=1)
def load_kernel() -> Kernel | None:
    """The kernel, or None where it was not built or does not load; that is logged once."""
    found = _load()
    if isinstance(found, Kernel):
        return found
    _log.info("statistics are computed with numpy: %s", found)
    return None


def kernel_status() -> str:
    """One line for the user: which way statistics are computed, and why."""
    found = _load()
    if isinstance(found, Kernel):
        loops = "" if walk is not None else ", records walked in Python"
        return f"compiled kernel ({found.instructions}{loops})"
    return f"numpy, slower ({found})"


@lru_cache(maxsize=1)
def _load() -> Kernel | str:
    if sys.byteorder != "little":
        return "big-endian machine"
    if not LIBRARY.exists():
        return "the package was built without a C compiler"
    try:
        return open_kernel(LIBRARY)
    except (OSError, AttributeError) as error:
        return f"{LIBRARY.name} cannot be used: {error}"


def open_kernel(path: Path, instruction_sets: tuple[int, ...] = _BEST_FIRST) -> Kernel:
    """Load the library and use the first of `instruction_sets` that this processor has."""
    held, released = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
    if held.rankscope_row_bytes() != ROW.itemsize:
        raise OSError("built for another version")
    held.rankscope_use.restype = ctypes.c_char_p
    names = (held.rankscope_use(number) for number in instruction_sets)
    instructions = next((name.decode() for name in names if name), None)
    if instructions is None:
        raise OSError(f"none of the instruction sets {instruction_sets} is there")
    for library in (held, released):
        library.rankscope_measure.argtypes = (
            *(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_int),
        )
        library.rankscope_measure_strided.argtypes = (
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
        )
    return Kernel(
        instructions,
        held.rankscope_measure,
        released.rankscope_measure,
        held.rankscope_measure_strided,
        released.rankscope_measure_strided,
    )
