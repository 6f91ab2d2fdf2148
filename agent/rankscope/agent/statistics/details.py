"""Statistics with more figures, for who asks for them: standard deviation and samples.

`DetailedStatistics` stands in the place of `TensorStatistics`, so that whoever does not ask pays
nothing.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .columns import Overrides, StatisticsColumns
from .device import is_capturing
from .device_figures import DeviceFigures
from .dtypes import NUMERIC
from .guard import unseen
from .memory import LOWEST_ADDRESS, has_memory
from .special import NoValues
from .spread import samples_of, samples_of_plain, spread_of, spread_of_parts
from .tensors import Pending, TensorStatistics

Rows = npt.NDArray[Any]

_FIRST_ROWS = 1024
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_function_modes = torch._C._is_torch_function_mode_enabled


@dataclass(frozen=True)
class Wanted:
    """Which figures are recorded beside the usual ones."""

    samples: int = 0  # most elements of each tensor, 0: none
    std: bool = False

    def __bool__(self) -> bool:
        return bool(self.samples or self.std)


class DetailedStatistics(TensorStatistics):
    """TensorStatistics whose columns also hold what is `wanted`."""

    def __init__(self, wanted: Wanted, checksum: str = "", *, use_kernel: bool = True) -> None:
        super().__init__(checksum, use_kernel=use_kernel)
        self._loop = None  # it knows nothing of details
        self._wanted = wanted
        self._details = _Details(wanted)

    def add(self, tensor: torch.Tensor | None, *, note: str = "") -> None:
        """Add one entry, as TensorStatistics does."""
        entry = self._count
        super().add(tensor, note=note)
        if tensor is not None:
            try:
                self._details.add(entry, tensor)
            except NoValues:
                pass  # the entry says so already
            except Exception as error:
                self._remark(entry, f"no samples: {type(error).__name__}: {error}")

    def take(self) -> DetailedPending:  # type: ignore[override]
        """Hand over all entries so far and begin anew."""
        pending = super().take()
        details, self._details = self._details, _Details(self._wanted)
        return DetailedPending(pending, details)


class DetailedPending:
    """A Pending whose columns hold more."""

    def __init__(self, pending: Pending, details: _Details) -> None:
        self.count = pending.count
        self._pending = pending
        self._details = details
        details.finish()

    def reduce(self) -> StatisticsColumns:
        """The columns, one element an entry. Called once."""
        columns = self._pending.reduce()
        self._details.fill(columns, self.count)
        return columns


class _Details:
    """The figures of one batch: a row an entry, those of devices when the batch is reduced."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._rows: Rows = np.zeros(_FIRST_ROWS, _row(wanted))
        self._devices: dict[torch.device, DeviceFigures] = {}

    def add(self, entry: int, tensor: torch.Tensor) -> None:
        if entry >= len(self._rows):
            more = np.zeros(max(entry, len(self._rows)), self._rows.dtype)
            self._rows = np.concatenate([self._rows, more])
        if _is_common(tensor):
            self._measure_plain(entry, tensor)
        else:
            with unseen(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._measure_any(entry, tensor)

    def _measure_plain(self, entry: int, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            return
        if self._wanted.samples:
            self._write(entry, samples_of_plain(tensor, self._wanted.samples))
        if self._wanted.std:
            self._rows["std"][entry] = spread_of_parts((tensor,))

    def _measure_any(self, entry: int, tensor: torch.Tensor) -> None:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.is_meta or tensor.numel() == 0:
            return
        if not tensor.is_cpu:
            self._queue(entry, tensor)
            return
        if tensor.layout is torch.strided and not has_memory(tensor):
            return
        if self._wanted.samples:
            self._write(entry, samples_of(tensor, self._wanted.samples))
        if self._wanted.std:
            self._rows["std"][entry] = spread_of(tensor)

    def _queue(self, entry: int, tensor: torch.Tensor) -> None:
        if is_capturing(tensor):
            return
        figures = self._devices.get(tensor.device)
        if figures is None:
            figures = self._devices[tensor.device] = DeviceFigures(
                tensor.device, self._wanted.samples, self._wanted.std
            )
        figures.add(entry, tensor)

    def _write(self, entry: int, samples: Rows) -> None:
        self._rows["samples"][entry, : len(samples)] = samples
        self._rows["sample_count"][entry] = len(samples)

    def finish(self) -> None:
        """No more is added."""
        self._events = [(figures, figures.finish()) for figures in self._devices.values()]

    def fill(self, columns: StatisticsColumns, count: int) -> None:
        """Put the figures of the first `count` entries into the columns."""
        overrides: Overrides = {}
        for figures, events in self._events:
            try:
                figures.reduce(events, self._rows, overrides, "")
            except Exception as error:  # the tensor's usual statistics say so
                figures.lose(self._rows, overrides, error)
        rows: Rows = np.zeros(count, self._rows.dtype)
        known = self._rows[:count]
        rows[: len(known)] = known
        if self._wanted.std:
            columns.std = rows["std"].copy()
        if self._wanted.samples:
            columns.sample_count = rows["sample_count"].copy()
            taken = np.arange(self._wanted.samples) < columns.sample_count[:, None]
            columns.samples = rows["samples"][taken]


def _row(wanted: Wanted) -> np.dtype[Any]:
    return np.dtype(
        [("std", "<f8"), ("sample_count", "<u2"), ("samples", "<f8", (wanted.samples,))]
    )


def _is_common(tensor: torch.Tensor) -> bool:
    """Plain memory that can be read without an operator."""
    if type(tensor) not in _PLAIN or _function_modes():
        return False
    if tensor.dtype not in NUMERIC or not tensor.is_cpu:
        return False
    try:
        return bool(
            tensor.data_ptr() >= LOWEST_ADDRESS and not tensor.is_neg() and not tensor.is_nested
        )
    except RuntimeError:
        return False
