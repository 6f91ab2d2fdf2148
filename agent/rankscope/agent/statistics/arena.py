"""Small CPU tensors are copied into one buffer a dtype and reduced together later: the way without
a kernel.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.v1.collector_pb2 import HAS_CHECKSUM

from .checksum import CHECKSUMS
from .columns import MEASURED, Overrides, Partial, write_partial
from .dtypes import Numeric
from .numeric import BLOCK_ELEMENTS, reduce_segments, scaled_overrides

Rows = npt.NDArray[Any]

#: Larger tensors are cheaper to measure where they are.
SMALL_ELEMENTS = 8192

_FIRST_BYTES = 1 << 16


class _Store:
    """Values of one dtype, one after another."""

    def __init__(self, numeric: Numeric) -> None:
        self.numeric = numeric
        self.buffer = np.empty(_FIRST_BYTES, np.uint8)
        self.address = self.buffer.ctypes.data
        self.used = 0
        self.entries: list[int] = []
        self.lengths: list[int] = []

    def grow(self, needed: int) -> None:
        size = max(2 * self.buffer.size, self.used + needed)
        larger = np.empty(size, np.uint8)
        larger[: self.used] = self.buffer[: self.used]
        self.buffer, self.address = larger, larger.ctypes.data

    def clear(self) -> None:
        self.used = 0
        self.entries.clear()
        self.lengths.clear()


class Arena:
    """Holds copies of small tensors until `reduce`. Buffers are kept for the next use."""

    def __init__(self) -> None:
        self._stores: dict[str, _Store] = {}
        self.used_bytes = 0

    def add(self, entry: int, numeric: Numeric, address: int, elements: int) -> None:
        """Copy `elements` values at `address` as the values of `entry`."""
        store = self._stores.get(numeric.name)
        if store is None:
            store = self._stores[numeric.name] = _Store(numeric)
        size = elements * numeric.itemsize
        if store.used + size > store.buffer.size:
            store.grow(size)
        ctypes.memmove(store.address + store.used, address, size)
        store.used += size
        store.entries.append(entry)
        store.lengths.append(elements)
        self.used_bytes += size

    def reduce(self, rows: Rows, overrides: Overrides, checksum: str) -> None:
        """Write the statistics of everything held into `rows`, then hold nothing."""
        for store in self._stores.values():
            if store.entries:
                _reduce_store(store, rows, overrides, checksum)
            store.clear()
        self.used_bytes = 0


def _reduce_store(store: _Store, rows: Rows, overrides: Overrides, checksum: str) -> None:
    values = store.buffer[: store.used].view(store.numeric.storage)
    ends = np.cumsum(store.lengths)
    starts = ends - store.lengths
    first = 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + BLOCK_ELEMENTS, "right")))
        chunk = values[starts[first] : ends[last - 1]]
        results = reduce_segments(store.numeric.widen(chunk), starts[first:last] - starts[first])
        _write(store, rows, overrides, results, slice(first, last))
        first = last
    if store.numeric.name == "float64":
        _override(store, rows, overrides, values, starts, ends)
    if checksum:
        for entry, start, end in zip(store.entries, starts, ends, strict=True):
            rows["checksum"][entry] = CHECKSUMS[checksum]([values[start:end]])
            rows["flags"][entry] |= int(HAS_CHECKSUM)


def _write(store: _Store, rows: Rows, overrides: Overrides, results: Any, part: slice) -> None:
    entries = store.entries[part]
    if store.numeric.itemsize == 8 and not store.numeric.is_float:
        for i, entry in enumerate(entries):
            partial = Partial(**{name: int(result[i]) for name, result in results.items()})
            if exact := write_partial(rows, entry, partial):
                overrides.setdefault(entry, {}).update(exact)
        return
    for name, result in results.items():
        rows[name][entries] = result
    rows["flags"][entries] |= np.uint64(MEASURED)


def _override(
    store: _Store, rows: Rows, overrides: Overrides, values: Any, starts: Any, ends: Any
) -> None:
    taken = rows[store.entries]
    largest = np.maximum(np.abs(taken["max"]), np.abs(taken["min"]))
    doubtful = ~np.isfinite(taken["sum"]) | ~np.isfinite(taken["sum_of_squares"])
    doubtful |= (taken["sum_of_squares"] < 1e-280) & (largest > 0)
    for i in np.flatnonzero(doubtful):
        piece = values[starts[i] : ends[i]]
        partial = Partial(*(taken[name][i].item() for name in Partial._fields))
        if found := scaled_overrides(partial, [piece], piece.size):
            overrides.setdefault(store.entries[i], {}).update(found)
