"""Statistics of tensors, one entry a tensor, measured when it is added."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rankscope.v1.collector_pb2 import HAS_CHECKSUM, HAS_COUNTS

from .arena import SMALL_ELEMENTS, Arena
from .checksum import CHECKSUMS, crc32_at
from .columns import ROW, Overrides, StatisticsColumns, columns_of, write_partial
from .describe import Description
from .device import DeviceResults, is_capturing
from .dtypes import NUMERIC
from .faults import reason_of
from .guard import unseen
from .kernel import LARGE_COUNT, codes, load_kernel, loop_over
from .memory import LOWEST_ADDRESS, dense_pieces, extents_of, has_memory, logical_view
from .plain import float64_overrides, measure_plain
from .special import NoValues, measure_special, values_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FIRST_ROWS = 1024
_ROW_BYTES = ROW.itemsize
_COUNTS_ONLY = np.uint64(HAS_COUNTS)
_CHECKSUM = np.uint64(HAS_CHECKSUM)

_function_modes = torch._C._is_torch_function_mode_enabled


class TensorStatistics:
    """Collects one entry a tensor; `take` hands over what has come together.

    The caller holds a lock around every call. `checksum` is "", "md5" (CRC-32, as the field calls
    it) or "xor". Copies of small tensors wait in an arena of `arena_limit_bytes` at most; a full
    one is reduced at once, and as much again may be in the Pending that is being reduced. Each
    entry takes 72 bytes.
    """

    def __init__(
        self, checksum: str = "", arena_limit_bytes: int = 16 << 20, *, use_kernel: bool = True
    ) -> None:
        if checksum and checksum not in CHECKSUMS:
            raise ValueError(f"checksum: {checksum!r} is not one of '', {', '.join(CHECKSUMS)}")
        self._kernel = load_kernel() if use_kernel else None
        self._codes = codes(checksum)
        self._checksum = checksum
        # The CRC is zlib's, called from Python.
        self._loop = loop_over(self._kernel) if self._kernel and checksum != "md5" else None
        self._limit = arena_limit_bytes
        self._spare: deque[Arena] = deque(maxlen=1)
        self._count = 0
        self._use_rows(np.zeros(_FIRST_ROWS, ROW))
        self._overrides: Overrides = {}
        self._arena = Arena()
        self._devices: dict[torch.device, DeviceResults] = {}

    def add(self, tensor: torch.Tensor | None, *, note: str = "") -> None:
        """Add one entry with the statistics that `tensor` has now; None adds one without values.

        Never raises and leaves no trace in the tensor, autograd, modes or random state; what cannot
        be measured becomes an entry without values whose override has a "note".
        """
        entry = self._count
        self._make_room(1)
        self._count = entry + 1
        if tensor is None:
            self._remark(entry, note)
            return
        try:
            if (
                type(tensor) not in _PLAIN
                or _function_modes()
                or not self._add_common(entry, tensor)
            ):
                with unseen():
                    self._add_any(entry, tensor)
        except NoValues as error:
            note = self._drop(entry, note, str(error))
        except Exception as error:
            reason = f"statistics failed: {reason_of(error)}"
            note = self._drop(entry, note, reason)
        if note:
            self._remark(entry, note)

    def add_all(self, entries: list[torch.Tensor | Description]) -> None:
        """Add entries in order; the common ones in one call where there is a compiled loop."""
        index, count = 0, len(entries)
        while index < count:
            if self._loop is not None and not _function_modes():
                if self._count + count - index > len(self._rows):
                    self._make_room(count - index)
                address = self._address + self._count * _ROW_BYTES
                reached = self._loop(entries, index, address, self._codes)
                self._count += reached - index
                index = reached
                if index == count:
                    return
            entry = entries[index]
            index += 1
            if type(entry) is Description:
                self.add(entry.data, note=entry.note)
            else:
                self.add(entry)  # type: ignore[arg-type]

    def _make_room(self, entries: int) -> None:
        while self._count + entries > len(self._rows):
            self._use_rows(np.concatenate([self._rows, np.zeros(len(self._rows), ROW)]))

    def take(self) -> Pending:
        """Hand over all entries so far and begin anew. Quick."""
        pending = Pending(
            self._count,
            self._rows,
            self._overrides,
            self._arena,
            self._devices,
            self._checksum,
            self._spare,
        )
        self._count = 0
        self._use_rows(np.zeros(_FIRST_ROWS, ROW))
        self._overrides = {}
        self._arena = self._spare.pop() if self._spare else Arena()
        self._devices = {}
        return pending

    def _use_rows(self, rows: npt.NDArray[Any]) -> None:
        self._rows = rows
        self._checksums = rows["checksum"]
        self._address: int = rows.ctypes.data

    def _add_common(self, entry: int, tensor: torch.Tensor) -> bool:
        """The common case, in as few calls as possible; False when the tensor is anything else."""
        code = self._codes.get(tensor.dtype)
        if code is None or not tensor.is_cpu:
            return False
        try:
            address, dense = tensor.data_ptr(), tensor.is_contiguous()
            if address < LOWEST_ADDRESS or tensor.is_neg():
                return False
        except RuntimeError:  # no memory of its own: sparse, wrapped by a transform, ...
            return False
        kernel, count = self._kernel, tensor.numel()
        if kernel is None:
            return self._keep_copy(entry, tensor, count)
        row = self._address + entry * _ROW_BYTES
        if dense:
            measure = kernel.measure if count < LARGE_COUNT else kernel.measure_large
            inexact = measure(address, count, row, code)
        elif tensor.is_nested:
            return False
        else:
            extents = extents_of(tensor.shape, tensor.stride(), self._checksum == "xor")
            if extents.repeats > 1 and count < LARGE_COUNT:
                extents = extents_of(tensor.shape, tensor.stride(), True)
            inexact = kernel.measure_extents(address, extents, row, code) or extents.repeats > 1
        if inexact:
            self._measure_exactly(entry, tensor)
            if self._checksum:
                self._add_checksum(entry, tensor)
        elif self._checksum == "md5":
            self._checksums[entry] = (
                crc32_at(address, tensor.nbytes) if dense else self._checksum_of(tensor)
            )
        return True

    def _keep_copy(self, entry: int, tensor: torch.Tensor, count: int) -> bool:
        if count > SMALL_ELEMENTS or tensor.is_nested:
            return False
        numeric = NUMERIC[tensor.dtype]
        if tensor.is_contiguous():
            self._arena.add(entry, numeric, tensor.data_ptr(), count)
        else:
            dense = np.ascontiguousarray(logical_view(tensor, numeric.storage))
            self._arena.add(entry, numeric, dense.ctypes.data, count)
        if self._arena.used_bytes > self._limit:
            self._arena.reduce(self._rows, self._overrides, self._checksum)
        return True

    def _add_any(self, entry: int, tensor: torch.Tensor) -> None:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.is_meta:
            raise NoValues("meta tensor")
        if tensor.numel() == 0:
            self._add_empty(entry)
        elif not tensor.is_cpu:
            self._add_on_device(entry, tensor)
        elif tensor.layout is torch.strided and not has_memory(tensor):
            raise NoValues("memory is not allocated")
        else:
            self._measure_exactly(entry, tensor)
            if self._checksum:
                self._add_checksum(entry, tensor)

    def _add_empty(self, entry: int) -> None:
        self._rows[entry]["flags"] = _COUNTS_ONLY
        if self._checksum == "md5":
            self._rows[entry]["flags"] |= _CHECKSUM

    def _add_on_device(self, entry: int, tensor: torch.Tensor) -> None:
        if is_capturing(tensor):
            raise NoValues("captured into a CUDA graph")
        results = self._devices.get(tensor.device)
        if results is None:
            results = self._devices[tensor.device] = DeviceResults(tensor.device)
        results.add(entry, tensor)
        if tensor.layout is not torch.strided:
            self._remark(entry, "of the stored values")
        elif self._checksum:
            results.add_bytes(entry, tensor, self._checksum)

    def _measure_exactly(self, entry: int, tensor: torch.Tensor) -> None:
        """Any CPU tensor with values, with overrides for what a row cannot hold."""
        if _is_plain(tensor):
            partial = measure_plain(tensor, self._kernel)
            if tensor.dtype is torch.float64:
                self._override(entry, float64_overrides(tensor, partial))
        else:
            # torch warns of some types when they are touched; that is no news for the script, and
            # where it makes errors of warnings it would cost the values.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                partial = measure_special(tensor, lambda part: measure_plain(part, self._kernel))
        self._override(entry, write_partial(self._rows, entry, partial))

    def _add_checksum(self, entry: int, tensor: torch.Tensor) -> None:
        self._checksums[entry] = self._checksum_of(tensor)
        self._rows["flags"][entry] |= _CHECKSUM

    def _checksum_of(self, tensor: torch.Tensor) -> int:
        values = tensor if _is_plain(tensor) else values_of(tensor)
        view = logical_view(values, np.dtype(f"V{values.element_size()}"))
        return CHECKSUMS[self._checksum](dense_pieces(view))

    def _drop(self, entry: int, note: str, reason: str) -> str:
        self._rows[entry] = np.zeros((), ROW)
        self._overrides.pop(entry, None)
        return f"{note}; {reason}" if note else reason

    def _remark(self, entry: int, note: str) -> None:
        if note:
            self._override(entry, {"note": note})

    def _override(self, entry: int, values: dict[str, object]) -> None:
        if values:
            self._overrides.setdefault(entry, {}).update(values)


class Pending:
    """Entries that were taken; `reduce` does the heavy part, on any thread and without the lock."""

    def __init__(
        self,
        count: int,
        rows: npt.NDArray[Any],
        overrides: Overrides,
        arena: Arena,
        devices: dict[torch.device, DeviceResults],
        checksum: str,
        spare: deque[Arena],
    ) -> None:
        self.count = count
        self._rows = rows
        self._overrides = overrides
        self._arena = arena
        self._devices = [(results, results.finish()) for results in devices.values()]
        self._checksum = checksum
        self._spare = spare

    def reduce(self) -> StatisticsColumns:
        """The columns, one element an entry. Called once."""
        self._arena.reduce(self._rows, self._overrides, self._checksum)
        self._spare.append(self._arena)
        for results, events in self._devices:
            try:
                results.reduce(events, self._rows, self._overrides, self._checksum)
            except Exception as error:
                results.lose(self._rows, self._overrides, error)
        return columns_of(self._rows[: self.count], self._overrides)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype in NUMERIC
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_neg()
    )
