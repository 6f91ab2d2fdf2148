"""What statistics of tensors look like on their way out: one row an entry, then one column a
statistic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope.v1.collector_pb2 import HAS_CHECKSUM, HAS_COUNTS, HAS_RANGE, HAS_SUMS

Overrides = dict[int, dict[str, object]]

#: One entry. kernel.c writes this layout, so the order and the widths are part of its interface.
ROW = np.dtype(
    [
        ("max", "<f8"),
        ("min", "<f8"),
        ("sum", "<f8"),
        ("sum_of_squares", "<f8"),
        ("nan_count", "<i8"),
        ("inf_count", "<i8"),
        ("zero_count", "<i8"),
        ("checksum", "<u8"),
        ("flags", "<u8"),
    ]
)

MEASURED = int(HAS_RANGE) | int(HAS_SUMS) | int(HAS_COUNTS)

#: Below this a square of a float64 may have lost digits, so the norm is computed again with
#: scaling.
SMALLEST_SQUARE = 1e-280

_EXACT = 2**53


class Partial(NamedTuple):
    """Statistics of one tensor or of a part of it. Integers stay exact, however large."""

    max: float | int
    min: float | int
    sum: float | int
    sum_of_squares: float
    nan_count: int = 0
    inf_count: int = 0
    zero_count: int = 0


@dataclass
class StatisticsColumns:
    """One numpy array a statistic, one element an entry, in the order of `add`.

    `overrides` maps an entry to JSON values that say it better than its columns: exact integers
    beyond 2**53, the mean or norm of a float64 tensor whose sums overflowed, a note why there are
    no values.
    """

    flags: npt.NDArray[np.uint8]
    max: npt.NDArray[np.float64]
    min: npt.NDArray[np.float64]
    sum: npt.NDArray[np.float64]
    sum_of_squares: npt.NDArray[np.float64]
    nan_count: npt.NDArray[np.int64]
    inf_count: npt.NDArray[np.int64]
    zero_count: npt.NDArray[np.int64]
    checksum: npt.NDArray[np.uint64]
    overrides: Overrides
    # Only where they are asked for; the samples of all entries stand one after another.
    std: npt.NDArray[np.float64] | None = None
    sample_count: npt.NDArray[np.uint16] | None = None
    samples: npt.NDArray[np.float64] | None = None


def columns_of(rows: npt.NDArray[Any], overrides: Overrides) -> StatisticsColumns:
    """The rows of all entries as columns; copies, so the rows can be used again."""
    flags = rows["flags"].astype(np.uint8)
    columns = {name: rows[name].copy() for name in ROW.names or () if name != "flags"}
    return StatisticsColumns(flags=flags, overrides=overrides, **columns)


def write_partial(
    rows: npt.NDArray[Any], entry: int, partial: Partial, checksum: int | None = None
) -> dict[str, object]:
    """Fill a row and return the overrides that exact integers need."""
    flags = MEASURED if checksum is None else MEASURED | int(HAS_CHECKSUM)
    rows[entry] = (*partial, checksum or 0, flags)
    return {
        name: value
        for name, value in (("max", partial.max), ("min", partial.min), ("sum", partial.sum))
        if isinstance(value, int) and abs(value) > _EXACT
    }


def json_number(value: float) -> object:
    """A float as strict JSON has it: NaN and infinities become the strings "nan", "inf", "-inf"."""
    return value if math.isfinite(value) else repr(value)
