"""What a process recorded, in memory that outlives it: the other half of every comparison."""

import mmap
import os
import struct
import threading
import time
from pathlib import Path

_LAYOUT = struct.Struct("<Qdd")  # events whose recording returned, times of the first and the last


class Journal:
    """Counts the calls of Recorder.event in this process, in a file of its own per pid."""

    def __init__(self, folder):
        path = Path(folder) / f"{os.getpid()}.journal"
        path.write_bytes(bytes(_LAYOUT.size))
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._count = 0
        self._first = 0.0
        self._guard = threading.Lock()

    def watch(self, recorder_class):
        """Count from now on. Each event is on record as soon as it is recorded."""
        record = recorder_class.event

        def event(*arguments, **named):
            record(*arguments, **named)
            with self._guard:
                self._count += 1
                last = time.time()
                self._first = self._first or last
                _LAYOUT.pack_into(self._memory, 0, self._count, self._first, last)

        recorder_class.event = event


def read_journals(folder):
    """pid -> (events recorded, time of the first, time of the last)."""
    return {
        int(path.stem): _LAYOUT.unpack(path.read_bytes()) for path in Path(folder).glob("*.journal")
    }
