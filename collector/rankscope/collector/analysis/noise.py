"""When is a difference a difference?

Two runs of one program on equal machines agree bit for bit up to the fault, so there any
difference counts. Two runs on different machines, or in different precision, differ by rounding
from the first operation on; there a fault is a *jump* of the error: many times what the inputs of
the record bring, and many times what was usual so far.

Which of the two it is, the pair itself says: operations whose inputs are equal bit for bit and
whose result depends on the machine either all give equal results, or do not.
"""

from dataclasses import dataclass

import numpy as np

from .figures import Bools, Figures, Floats, Hard
from .flow_rows import FlowRows
from .pairing import Ints

#: Below this, sums of the same numbers in another order.
SAME = 1e-12
#: Rounding of one operation, relative to the largest element.
EPSILON = {
    "torch.float64": 2.0**-52, "torch.float32": 2.0**-23, "torch.float16": 2.0**-10,
    "torch.bfloat16": 2.0**-7, "torch.complex64": 2.0**-23, "torch.complex128": 2.0**-52,
    "torch.complex32": 2.0**-10, "torch.float8_e4m3fn": 2.0**-3, "torch.float8_e5m2": 2.0**-2,
    "torch.float8_e4m3fnuz": 2.0**-3, "torch.float8_e5m2fnuz": 2.0**-2,
}  # fmt: skip
EXACT_FLOOR = 4 * 2.0**-23  # whatever the dtype: equal machines round equally
NOISY_FLOOR_EPSILONS = {2.0**-52: 1e4, 2.0**-23: 200.0, 2.0**-10: 8.0, 2.0**-7: 4.0}
JUMP = 5.0
LARGEST_NOISE = 0.02  # a larger error of equal inputs is no rounding
OVERALL_DTYPE = 0.6  # where so many leaves differ in dtype, the runs differ in precision as a whole


@dataclass(frozen=True)
class Noise:
    """How the pair behaves. `floor` is per row; errors above it may count."""

    deterministic: bool
    precision_differs: bool
    floor: Floats
    equal: int  # operations with equal inputs and equal results
    unequal: int  # with equal inputs and slightly different results


def measure(figures: Figures, rows: FlowRows, same_setup: bool) -> Noise:
    """Look at all rows. `same_setup`: both sides say that they ran on equal machines."""
    epsilon = _epsilon(figures)
    floating = figures.is_tensor & (epsilon > 0)
    changed = floating & (figures.hard & Hard.DTYPE > 0)
    precision = bool(changed.sum() > OVERALL_DTYPE * max(floating.sum(), 1))
    factor = np.full(len(epsilon), 4.0)
    for size, times in NOISY_FLOOR_EPSILONS.items():
        factor[epsilon == size] = times
    noisy = np.where(floating, epsilon * factor, 1e-5)
    equal, unequal = _counts(figures, rows, floating, noisy)
    if same_setup:
        deterministic = not (unequal >= 3 and equal < 4 * unequal)
    else:
        deterministic = unequal == 0 and equal > 0
    deterministic &= not precision
    exact = np.where(epsilon == EPSILON["torch.float64"], SAME, EXACT_FLOOR)
    exact = np.where(floating | ~figures.is_tensor, exact, 0.0)
    floor = exact if deterministic else noisy
    return Noise(deterministic, precision, floor, equal, unequal)


def _epsilon(figures: Figures) -> Floats:
    """Of the coarser side of each row; 0 for what is no floating-point tensor."""
    sizes = np.array([EPSILON.get(name, 0.0) for name in figures.dtypes] + [0.0])
    both: Floats = np.maximum(sizes[figures.dtype[0]], sizes[figures.dtype[1]])
    return both


def _counts(figures: Figures, rows: FlowRows, floating: Bools, rounding: Floats) -> tuple[int, int]:
    off = (figures.error > SAME) | (figures.hard & ~int(Hard.REQUIRES_GRAD) != 0)
    hard_off = (figures.error > rounding) | (
        figures.hard & ~int(Hard.REQUIRES_GRAD | Hard.CONTENT) != 0
    )
    groups = rows.groups
    size = rows.group_count

    def count(mask: Bools) -> Ints:
        return np.bincount(groups[mask], minlength=size).astype(np.int64)

    inputs, outputs = rows.is_input, ~rows.is_input
    usable = count(inputs & floating) > 0
    usable &= count(inputs & off) == 0
    usable &= count(outputs & floating) > 0
    usable &= rows.group_rounds & ~rows.group_contains
    usable &= count(hard_off) == 0
    differs = count(outputs & off) > 0
    return int((usable & ~differs).sum()), int((usable & differs).sum())
