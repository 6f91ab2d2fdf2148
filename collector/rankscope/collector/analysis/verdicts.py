"""A verdict and a reason for each pair of leaves.

error: one side has no such leaf; dtype, shape, kind, requires_grad or a value differs; NaN or an
infinity on one side; the leaf is where its rank diverges first; its error is above 0.5.

warning: the error is above the tolerance of its dtype, or equal numbers have another checksum.

pass: everything else.

The tolerance is that of `tolerances` where a pattern fits the record, else 200 roundings of float64
and float32, 8 of float16, 4 of bfloat16 and coarser ones; 0 for integers and booleans.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .advice import difference
from .figures import Figures, Floats, Hard
from .noise import EPSILON, NOISY_FLOOR_EPSILONS, SAME

LARGE = 0.5
VERDICTS = ("pass", "warning", "error")


class Verdicts(NamedTuple):
    """Of each row: an index into VERDICTS, and a reason, "" for pass."""

    level: npt.NDArray[np.int64]
    reason: list[str]


def verdicts(
    figures: Figures, origins: Sequence[int], tolerances: Mapping[str, float] | None = None
) -> Verdicts:
    """`origins` are the rows where ranks diverge first."""
    tolerance = _tolerance(figures, tolerances or {})
    hard = figures.hard & ~int(Hard.CONTENT) != 0
    level = np.zeros(len(hard), np.int64)
    content = (figures.hard & Hard.CONTENT > 0) & (figures.error <= SAME)
    level[(figures.error > tolerance) | content] = 1
    level[hard | (figures.error > LARGE)] = 2
    level[list(origins)] = 2
    reason = [""] * len(hard)
    known: dict[int, str] = {}
    for row in np.flatnonzero(level).tolist():
        kind = int(figures.hard[row])
        if kind & (Hard.ONLY_A | Hard.ONLY_B):
            # The same words for thousands of rows.
            reason[row] = known.setdefault(kind, difference(figures, row))
        else:
            reason[row] = _reason(figures, row)
    for row in origins:
        reason[row] = f"first divergence of its rank: {difference(figures, row)}"
    return Verdicts(level, reason)


def _reason(figures: Figures, row: int) -> str:
    if figures.hard[row] & ~int(Hard.CONTENT):
        return difference(figures, row)
    if figures.error[row] > SAME:
        return f"error {figures.error[row]:.3g}"
    return "another checksum"


def _tolerance(figures: Figures, tolerances: Mapping[str, float]) -> Floats:
    by_dtype = np.array(
        [EPSILON.get(n, 0.0) * NOISY_FLOOR_EPSILONS.get(EPSILON.get(n, 0.0), 4.0)
         for n in figures.dtypes] + [1e-5]
    )  # fmt: skip
    result: Floats = np.maximum(by_dtype[figures.dtype[0]], by_dtype[figures.dtype[1]])
    for pattern, value in tolerances.items():
        fits = [fnmatchcase(name, pattern) for name in figures.pairs.names]
        result = np.where(np.array(fits, bool)[figures.pairs.record], value, result)
    return result
