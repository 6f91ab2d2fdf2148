"""Where batches wait until they are acknowledged: what a spool promises, and one in memory.

One thread appends (the pump), another reads and acknowledges (the stream). The spool gives out the
sequence numbers: a batch that does not fit never gets one, so what is kept has no gaps.
"""

import threading
from collections import deque
from pathlib import Path
from typing import Protocol

from rankscope.agent.transport.segment import Stored, crc32
from rankscope.agent.transport.tensor_files import TensorFiles, TensorPlace


class Outbox(Protocol):
    """What a stream sends from."""

    last_sequence: int
    """Highest sequence kept so far, 0 when there was none."""

    def read(self, sequence: int) -> Stored | None:
        """The first batch at or after `sequence`; None when there is none."""

    def acknowledge(self, sequence: int) -> None:
        """Everything up to `sequence` is durable at the collector and need not be kept."""

    def tensor(self, digest: bytes) -> TensorPlace | None:
        """Where the bytes of a tensor lie that an unacknowledged batch brings."""


class Spool(Outbox, Protocol):
    """An outbox that grows."""

    folder: Path | None
    tensors: TensorFiles | None
    """None: there is no disk to keep whole tensors on."""
    hello: bytes
    """Serialized Hello for segments begun from now on."""

    def append(self, payload: bytes, reserve: int = 0) -> bool:
        """Keep a batch under the next sequence; False when full, `reserve` bytes over the limit."""

    def close(self) -> None:
        """Remove what is acknowledged, leave the rest, let others see that nobody owns it."""

    def abandon(self) -> None:
        """In a forked child: forget the files without touching them."""


class MemorySpool:
    """The same in memory, for hosts without a usable disk; does not survive the process."""

    folder: Path | None = None
    tensors: TensorFiles | None = None

    def __init__(self, hello: bytes, limit_bytes: int) -> None:
        self.hello = hello
        self.last_sequence = 0
        self.size_bytes = 0
        self._limit = limit_bytes
        self._kept: deque[Stored] = deque()
        self._guard = threading.Lock()

    def append(self, payload: bytes, reserve: int = 0) -> bool:
        with self._guard:
            if self.size_bytes + len(payload) > self._limit + reserve:
                return False
            self.last_sequence += 1
            self.size_bytes += len(payload)
            self._kept.append(Stored(self.last_sequence, payload, crc32(payload)))
            return True

    def read(self, sequence: int) -> Stored | None:
        with self._guard:
            if not self._kept:
                return None
            index = max(sequence - self._kept[0].sequence, 0)
            return self._kept[index] if index < len(self._kept) else None

    def acknowledge(self, sequence: int) -> None:
        with self._guard:
            while self._kept and self._kept[0].sequence <= sequence:
                self.size_bytes -= len(self._kept.popleft().payload)

    def tensor(self, digest: bytes) -> TensorPlace | None:
        return None

    def close(self) -> None:
        """Nothing outlives the process."""

    def abandon(self) -> None:
        """Nothing is shared with the parent."""
