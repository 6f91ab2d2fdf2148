"""Statistics of plain memory with numpy alone, for where the compiled kernel is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .columns import SMALLEST_SQUARE, Partial
from .dtypes import Numeric
from .table import STATISTICS, combine_all

Array = npt.NDArray[Any]

#: float64 copies of a block stay in the second-level cache, and calls are few.
BLOCK_ELEMENTS = 1 << 16
_DOT_ELEMENTS = 1 << 10
# Long float32 sums of equal values drift by 1e-6 and more; sums of rows this long stay below.
_ONES = np.ones((_DOT_ELEMENTS, 1), np.float32)
_ZERO = np.zeros(1, np.int64)

#: Squares of float32 values are accurate between these magnitudes of the largest one.
_SAFE_SINGLE = (1e-17, 1e15)


def reduce_segments(values: Array, starts: Array) -> dict[str, Array]:
    """Every statistic of every segment of widened values; `starts` are the first positions, none
    empty.
    """
    floating = values.dtype.kind == "f"
    wide = values.astype(np.float64, copy=False) if floating else values
    results: dict[str, Array] = {}
    with np.errstate(all="ignore"):
        for statistic in STATISTICS:
            if statistic.name in ("nan_count", "inf_count") and not (
                floating and _may_hold_special(results["sum_of_squares"])
            ):
                results[statistic.name] = np.zeros(len(starts), np.int64)
            else:
                source = wide if statistic.name in ("sum", "sum_of_squares") else values
                results[statistic.name] = statistic.of_segments(source, starts)
    return results


def _may_hold_special(sums_of_squares: Array) -> bool:
    return not bool(np.isfinite(sums_of_squares).all())


def measure_array(values: Array, numeric: Numeric) -> Partial:
    """Statistics of a one-dimensional contiguous array as it lies in memory; not empty."""
    fast = numeric.name == "float32" and values.size >= BLOCK_ELEMENTS // 4
    step = 2 * BLOCK_ELEMENTS if fast else BLOCK_ELEMENTS
    blocks = (values[i : i + step] for i in range(0, values.size, step))
    measure = _measure_single if fast else _measure_block
    return combine_all([measure(block, numeric) for block in blocks])


def measure_pieces(pieces: Iterable[Array], numeric: Numeric) -> Partial:
    """Statistics of all pieces together."""
    return combine_all([measure_array(piece, numeric) for piece in pieces])


def _measure_block(block: Array, numeric: Numeric) -> Partial:
    results = reduce_segments(numeric.widen(block), _ZERO)
    return Partial(
        **{
            name: result[0].item() if isinstance(result[0], np.generic) else result[0]
            for name, result in results.items()
        }
    )


def _measure_single(block: Array, numeric: Numeric) -> Partial:
    """float32 by the fastest numpy has, unless squares would leave its range."""
    high, low = block.max().item(), block.min().item()
    largest = max(abs(high), abs(low))
    if not (_SAFE_SINGLE[0] < largest < _SAFE_SINGLE[1]):  # also when it is NaN
        return (
            _measure_block(block, numeric)
            if block.size <= BLOCK_ELEMENTS
            else combine_all(
                [
                    _measure_block(block[i : i + BLOCK_ELEMENTS], numeric)
                    for i in range(0, block.size, BLOCK_ELEMENTS)
                ]
            )
        )
    rows = block[: block.size // _DOT_ELEMENTS * _DOT_ELEMENTS].reshape(-1, _DOT_ELEMENTS)
    total = float((rows @ _ONES).sum(dtype=np.float64))
    squares = float((rows[:, None, :] @ rows[:, :, None]).sum(dtype=np.float64))
    rest = block[rows.size :].astype(np.float64)
    zeros = int(np.count_nonzero(block == 0))
    return Partial(high, low, total + float(rest.sum()), squares + float(rest @ rest), 0, 0, zeros)


def scaled_overrides(partial: Partial, pieces: Iterable[Array], count: int) -> dict[str, object]:
    """Mean and norm of float64 values whose sums left the range of float64; {} when they did not.

    `pieces` are the same values once more.
    """
    if partial.nan_count or partial.inf_count:
        return {}
    largest = max(abs(partial.max), abs(partial.min))
    squares_fit = largest == 0 or SMALLEST_SQUARE < partial.sum_of_squares < math.inf
    if squares_fit and math.isfinite(partial.sum):
        return {}
    total = squares = 0.0
    for piece in pieces:
        for start in range(0, piece.size, BLOCK_ELEMENTS):
            scaled = piece[start : start + BLOCK_ELEMENTS] / largest
            total += float(scaled.sum())
            squares += float(scaled @ scaled)
    found: dict[str, object] = {}
    if not math.isfinite(partial.sum):
        found["mean"] = largest * (total / count)
    if not squares_fit and math.isfinite(norm := largest * math.sqrt(squares)):
        found["norm"] = norm
    return found
