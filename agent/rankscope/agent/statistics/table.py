"""The table of statistics: each one's name, how it is computed, and how two partial results
combine.

`of_segments(values, starts)` takes values that stand one after another, float64 or integers, and
gives one result a segment. `on_device(tensor)` takes a plain tensor and gives a 0-d tensor without
waiting for the device. kernel.c computes the same for all of them in one read of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .columns import Partial

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Statistic:
    """One statistic; `name` is a field of Partial and a column of the contract."""

    name: str
    of_segments: Callable[[Array, Array], Array]
    on_device: Callable[[torch.Tensor], torch.Tensor]
    combine: Callable[[Any, Any], Any]


def _greater(a: Any, b: Any) -> Any:
    return a if a > b or a != a else b


def _smaller(a: Any, b: Any) -> Any:
    return a if a < b or a != a else b


def _add(a: Any, b: Any) -> Any:
    return a + b


def _sums(values: Array, starts: Array) -> Array:
    if values.dtype.itemsize < 8 or values.dtype.kind == "f":
        wide = np.float64 if values.dtype.kind == "f" else np.int64
        return np.add.reduceat(values, starts, dtype=wide)
    low = np.add.reduceat((values & 0xFFFFFFFF).astype(np.int64), starts)
    high = np.add.reduceat((values >> 32).astype(np.int64), starts)
    return high.astype(object) * 2**32 + low  # 64-bit integers may add up to more than 64 bits


def _sums_of_squares(values: Array, starts: Array) -> Array:
    return np.add.reduceat(np.square(values.astype(np.float64, copy=False)), starts)


def _counts(test: Callable[[Array], Any]) -> Callable[[Array, Array], Array]:
    def count(values: Array, starts: Array) -> Array:
        positions = np.flatnonzero(test(values))
        return np.diff(np.searchsorted(positions, np.append(starts, len(values))))

    return count


def _device_sum(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sum(dtype=wide_dtype(tensor))


def _device_sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    wide = wide_dtype(tensor) if tensor.dtype.is_floating_point else float_dtype(tensor.device)
    if not tensor.dtype.is_floating_point:
        tensor = tensor.to(wide)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return norm.square()


def float_dtype(device: torch.device) -> torch.dtype:
    """The widest float that the device computes in."""
    return torch.float64 if device.type in ("cpu", "cuda", "xpu") else torch.float32


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The accumulator of a tensor's sum on its device."""
    return float_dtype(tensor.device) if tensor.dtype.is_floating_point else torch.int64


STATISTICS: tuple[Statistic, ...] = (
    Statistic("max", np.maximum.reduceat, torch.amax, _greater),
    Statistic("min", np.minimum.reduceat, torch.amin, _smaller),
    Statistic("sum", _sums, _device_sum, _add),
    Statistic("sum_of_squares", _sums_of_squares, _device_sum_of_squares, _add),
    Statistic("nan_count", _counts(np.isnan), lambda t: torch.isnan(t).sum(), _add),
    Statistic("inf_count", _counts(np.isinf), lambda t: torch.isinf(t).sum(), _add),
    Statistic("zero_count", _counts(lambda v: v == 0), lambda t: (t == 0).sum(), _add),
)


def combine(first: Partial, second: Partial) -> Partial:
    """The statistics of two parts taken together."""
    return Partial(*(s.combine(a, b) for s, a, b in zip(STATISTICS, first, second, strict=True)))


def combine_all(partials: list[Partial]) -> Partial:
    """The statistics of all parts taken together; at least one."""
    return reduce(combine, partials)


def repeated(partial: Partial, times: int) -> Partial:
    """The statistics of a tensor that holds every element `times` times."""
    if times == 1:
        return partial
    high, low, *sums = partial
    return Partial(high, low, *(value * times for value in sums))  # type: ignore[arg-type]
