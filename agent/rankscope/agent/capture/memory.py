"""Memory for copies of tensors: a ring of fixed size, so that the bound holds.

Copies are mostly freed in the order they were made. The ring goes on at its start as soon as there
is room again, and not in pages that were never used: those cost ten times a copy. So a loop whose
tensors are written as fast as they come uses a small part of it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

_ALIGNMENT = 64
#: Less than this takes less time than getting the interpreter's lock back from another thread.
_BRIEF_BYTES = 256 << 10

_held, _released = ctypes.PyDLL(None), ctypes.CDLL(None)
for _library in (_held, _released):
    for _function in (_library.memcpy, _library.memcmp):
        _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _library.memcpy.restype = None


def copy(to: int, address: int, size: int) -> None:
    """Copy memory; large pieces let other threads run."""
    (_held if size < _BRIEF_BYTES else _released).memcpy(to, address, size)


def is_equal(one: int, other: int, size: int) -> bool:
    """Whether two pieces of memory hold the same bytes; large pieces let other threads run."""
    return not (_held if size < _BRIEF_BYTES else _released).memcmp(one, other, size)


def room_for(size: int) -> int:
    """What a tensor takes of the ring."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(eq=False)
class Region:
    """Memory that is held. `address` is valid until it is given back."""

    address: int
    view: memoryview
    size: int
    start: int = -1  # in the ring; -1: memory of its own
    freed: bool = False


class Memory:
    """At most `limit_bytes`, but for one event larger than that at a time. Any thread may call."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.used = 0
        self.freed_count = 0
        self._ring: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._base = 0
        self._touched = 0  # bytes of the ring that have pages
        self._regions: deque[Region] = deque()
        self._outside = 0
        self._changed = threading.Condition(threading.Lock())

    def take(self, size: int, ahead: int = 0, alone: bool = False) -> Region | None:
        """Memory for so many bytes, or None when there is none now.

        `ahead` is the room (see `room_for`) that this tensor and those that follow it in its event
        need together: they are laid where all of them fit. `alone`: the event is larger than the
        limit and has the memory to itself.
        """
        with self._changed:
            start = -1 if alone else self._find(max(ahead, size))
            if start < 0 and not alone:
                start = self._find(size)
            if start >= 0:
                if self._ring is None:
                    self._open()
                self._touched = max(self._touched, start + size)
                view = self._view[start : start + size]
                region = Region(self._base + start, view, size, start)
                self._regions.append(region)
            elif alone or (size > self.limit and not self._outside):
                buffer = np.empty(size, np.uint8)
                region = Region(buffer.ctypes.data, buffer.data, size)
                self._outside += size
            else:
                return None
            self.used += size
            return region

    def count(self, size: int) -> Region | None:
        """Have memory that the caller made count; None when there is no room for it now."""
        with self._changed:
            if self.used and self.used + size > self.limit:
                return None
            self.used += size
            self._outside += size
            return Region(0, memoryview(b""), size)

    def give_back(self, region: Region) -> None:
        """It is not used any more."""
        with self._changed:
            if region.freed:
                return
            region.freed = True
            region.view = memoryview(b"")
            self.used -= region.size
            if region.start < 0:
                self._outside -= region.size
            while self._regions and self._regions[0].freed:
                self._regions.popleft()
            self.freed_count += 1
            self._changed.notify_all()

    def wait(self, size: int, patience_seconds: float) -> bool:
        """Wait for room; False when nothing was given back for so long."""
        with self._changed:
            while not self._has_room(size):
                count, deadline = self.freed_count, time.monotonic() + patience_seconds
                while self.freed_count == count:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    self._changed.wait(left)
            return True

    def has_room(self, size: int) -> bool:
        """Whether so much can be taken now; for sizes above the limit, once nothing is held."""
        with self._changed:
            return self._has_room(size)

    def _has_room(self, size: int) -> bool:
        return not self.used if size > self.limit else self._find(size) >= 0

    def _find(self, size: int) -> int:
        """Where in the ring so many bytes are free, -1 for nowhere."""
        if self.used + size > self.limit:
            return -1
        if not self._regions:
            return 0
        first, last = self._regions[0].start, self._regions[-1]
        end = room_for(last.start + last.size)
        if last.start < first:
            return end if end + size <= first else -1
        if end + size > self._touched and size <= first:
            return 0  # pages used before are many times faster than new ones
        if end + size <= self.limit:
            return end
        return -1

    def _open(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._ring = mmap.mmap(-1, self.limit, flags=flags)
        for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(OSError, AttributeError):
                self._ring.madvise(getattr(mmap, name))
        self._view = memoryview(self._ring)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._ring))
