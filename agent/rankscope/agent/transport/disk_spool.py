"""The spool on a local disk: segment files, a lock that says whose they are."""

import fcntl
import os
import threading
from array import array
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from rankscope.agent.transport.descriptor import Descriptor
from rankscope.agent.transport.segment import (
    HEADER,
    MAGIC,
    Stored,
    crc32,
    read_at,
    segment_name,
    write_frame,
)
from rankscope.agent.transport.tensor_files import TensorFiles, TensorPlace

RECENT_BYTES = 2 << 20
"""Of the newest batches this much is kept in memory too, for a stream that keeps up."""


@dataclass
class Segment:
    """One file; offsets[i] is where the frame of sequence first_sequence + i begins."""

    path: Path
    first_sequence: int
    size: int = 0
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))

    @property
    def last_sequence(self) -> int:
        return self.first_sequence + len(self.offsets) - 1


class DiskSpool:
    """Segments `{process_uuid}-{first_sequence}.spool` beside a locked `{process_uuid}.lock`."""

    def __init__(
        self,
        folder: Path,
        process_uuid: str,
        hello: bytes,
        limit_bytes: int,
        segment_bytes: int = 64 << 20,
        tensor_patience_seconds: float = 5.0,
    ) -> None:
        """Claim the folder; raises OSError when it cannot be made, written or trusted."""
        self.folder: Path | None = folder
        self.hello = hello
        self.last_sequence = 0
        self._uuid = process_uuid
        self._limit = limit_bytes
        self._segment_bytes = min(segment_bytes, max(limit_bytes // 4, 1))
        self._acked = 0
        self._segments: deque[Segment] = deque()
        self._recent: deque[Stored] = deque()
        self._recent_bytes = 0
        self._file = Descriptor()  # of the last segment; closed: the next append begins one
        self._guard = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        self._folder = folder
        self._files = TensorFiles(
            folder,
            process_uuid,
            lambda size: self.size_bytes + size <= limit_bytes,
            tensor_patience_seconds,
        )
        self.tensors: TensorFiles | None = self._files
        self._lock_path = folder / f"{process_uuid}.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock = Descriptor(os.open(self._lock_path, flags, 0o600))
        try:
            fcntl.flock(self._lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin_segment()  # a disk without space shows now, while there is a choice
        except OSError:
            self._lock.close()
            self._lock_path.unlink(missing_ok=True)
            raise

    @property
    def size_bytes(self) -> int:
        return self._files.size_bytes + sum(segment.size for segment in list(self._segments))

    def append(self, payload: bytes, reserve: int = 0) -> bool:
        limit = self._limit + reserve
        needed = HEADER.size + len(payload)
        if self.size_bytes + needed > limit:
            self._free(include_current=True)
            if self.size_bytes + needed > limit:
                return False
        try:
            if not self._file.is_open:
                self._begin_segment()
            self._write(Stored(self.last_sequence + 1, payload, crc32(payload)))
        except OSError:  # no space, quota, or the disk went away: the same to a recorder
            self._cut_torn_tail()
            return False
        return True

    def read(self, sequence: int) -> Stored | None:
        while sequence <= self.last_sequence:
            with self._guard:
                if (recent := self._recall(sequence)) is not None:
                    return recent
                segment = self._segment_of(sequence)
                if segment is None:
                    return None
                sequence = max(sequence, segment.first_sequence)
                stored = _read_from(segment, sequence)
            if stored is not None:
                return stored
            sequence = segment.last_sequence + 1  # the file is gone or cut: go on behind it
        return None

    def acknowledge(self, sequence: int) -> None:
        with self._guard:
            self._acked = max(self._acked, sequence)
            self._forget()
        self._files.acknowledge(sequence)
        self._free(include_current=False)

    def tensor(self, digest: bytes) -> TensorPlace | None:
        return self._files.find(digest)

    def close(self) -> None:
        self._end_segment()
        self._free(include_current=True)
        with self._guard:
            empty = not self._segments
        if empty and self._lock.number >= 0:
            self._lock_path.unlink(missing_ok=True)
        self._lock.close()

    def abandon(self) -> None:
        # Closing the child's copies leaves the parent's file and lock alone, and lets the lock go
        # when the parent dies although the child lives on.
        self._file.close()
        self._lock.close()

    def _begin_segment(self) -> None:
        path = self._folder / segment_name(self._uuid, self.last_sequence + 1)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._file = Descriptor(os.open(path, flags, 0o600))
        segment = Segment(path, self.last_sequence + 1)
        try:
            segment.size = write_frame(
                self._file.number, Stored(0, self.hello, crc32(self.hello)), MAGIC
            )
        except OSError:
            self._file.close()
            path.unlink(missing_ok=True)
            raise
        with self._guard:
            self._segments.append(segment)

    def _write(self, stored: Stored) -> None:
        segment = self._segments[-1]
        offset = segment.size
        written = write_frame(self._file.number, stored)
        with self._guard:
            segment.offsets.append(offset)
            segment.size += written
            self.last_sequence = stored.sequence
            self._recent.append(stored)
            self._recent_bytes += len(stored.payload)
            self._forget()
        if segment.size >= self._segment_bytes:
            self._end_segment()

    def _recall(self, sequence: int) -> Stored | None:
        if self._recent and sequence >= self._recent[0].sequence:
            return self._recent[sequence - self._recent[0].sequence]
        return None

    def _forget(self) -> None:
        while self._recent and (
            self._recent_bytes > RECENT_BYTES or self._recent[0].sequence <= self._acked
        ):
            self._recent_bytes -= len(self._recent.popleft().payload)

    def _cut_torn_tail(self) -> None:
        if not self._file.is_open:
            return
        try:
            os.ftruncate(self._file.number, self._segments[-1].size)
        except OSError:  # what is torn ends this file; the next batch begins another
            self._end_segment()

    def _end_segment(self) -> None:
        if self._file.is_open:
            self._file.close()
            self._free(include_current=True)

    def _free(self, include_current: bool) -> None:
        """Remove segments that are wholly acknowledged; only the appender may end the last."""
        removed = []
        with self._guard:
            while self._segments and self._segments[0].last_sequence <= self._acked:
                if len(self._segments) == 1 and self._file.is_open:
                    if not (include_current and self._segments[0].offsets):
                        break
                    self._file.close()
                removed.append(self._segments.popleft())
        for segment in removed:
            segment.path.unlink(missing_ok=True)

    def _segment_of(self, sequence: int) -> Segment | None:
        index = bisect_right(self._segments, sequence, key=lambda segment: segment.first_sequence)
        for segment in list(self._segments)[max(index - 1, 0) :]:
            if segment.last_sequence >= sequence:
                return segment
        return None


def _read_from(segment: Segment, sequence: int) -> Stored | None:
    """None when the file is gone or cut; other errors (no descriptors left) are the caller's."""
    try:
        fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        stored = read_at(fd, segment.offsets[sequence - segment.first_sequence])
    finally:
        os.close(fd)
    return stored if stored is not None and stored.sequence == sequence else None
