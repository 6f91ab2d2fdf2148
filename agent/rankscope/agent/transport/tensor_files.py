"""Bytes of captured tensors beside the spool's segments, until their batch is acknowledged.

A large tensor is a file of its own, `{process_uuid}-{number}.tensor`, whose first 4 KiB are left to
the collector: it makes a .pt file of it in place. Small ones share `{process_uuid}-{number}
.tensors`. Each batch says which files it needs and where in them its tensors lie.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rankscope.v1 import collector_pb2 as pb

HEAD_BYTES = 4096
CHUNK_BYTES = 1 << 20
LARGE_BYTES = 32 << 10
_PIECE_BYTES = 8 << 20
_NAME = re.compile(r"([0-9a-f]{32})-\d{20}\.tensors?")


@dataclass(frozen=True)
class TensorPlace:
    """Where the bytes of a tensor lie."""

    path: Path
    offset: int
    size: int


@dataclass
class _File:
    path: Path
    size: int
    digests: list[bytes]


class TensorFiles:
    """Files of one process. One thread writes, another acknowledges and reads."""

    def __init__(
        self,
        folder: Path,
        process_uuid: str,
        has_room: Callable[[int], bool],
        patience_seconds: float,
    ) -> None:
        """When `has_room(bytes)` says no, writing waits as long as acknowledgements come, else
        `patience_seconds`.
        """
        self.size_bytes = 0
        self.hurry = False
        """Wait for room no more: the process is being stopped."""
        self.refused = False
        """The collector's quota is used up: nothing new is to be captured."""
        self._folder, self._uuid = folder, process_uuid
        self._has_room, self._patience = has_room, patience_seconds
        self._number = 0
        self._open: list[_File] = []  # of the batch that is being made
        self._kept: deque[tuple[int, list[_File]]] = deque()
        self._places: dict[bytes, TensorPlace] = {}
        self._changed = threading.Condition()
        self._acked_files = 0
        self._stuck_since = -1  # files acknowledged when waiting was given up

    def keep(self, tensors: Sequence[tuple[pb.Blob, memoryview]]) -> int:
        """Write tensors and fill in `file` and `offset`; how many of them fitted."""
        small: list[tuple[pb.Blob, memoryview]] = []
        done = 0
        for blob, data in tensors:
            if not self._await_room(HEAD_BYTES + blob.size):
                break
            if blob.size < LARGE_BYTES:
                small.append((blob, data))
            elif not self._write([(blob, data)], HEAD_BYTES):
                break
            done += 1
        if small and not self._write(small, 0):
            return self._without(tensors, small)
        return done

    def sealed(self, sequence: int) -> None:
        """What was kept since the last call belongs to this batch."""
        with self._changed:
            if self._open:
                self._kept.append((sequence, self._open))
                self._open = []

    def discard(self) -> None:
        """The batch that was being made never will be."""
        with self._changed:
            files, self._open = self._open, []
        self._remove(files)

    def acknowledge(self, sequence: int) -> None:
        """Everything up to this batch is at the collector."""
        files: list[_File] = []
        with self._changed:
            while self._kept and self._kept[0][0] <= sequence:
                files += self._kept.popleft()[1]
        self._remove(files)

    def find(self, digest: bytes) -> TensorPlace | None:
        """Where a tensor lies that is not acknowledged yet."""
        return self._places.get(digest)

    def _without(
        self, tensors: Sequence[tuple[pb.Blob, memoryview]], small: list[tuple[pb.Blob, memoryview]]
    ) -> int:
        """Only what comes before the first small tensor is there."""
        return next(i for i, (blob, _) in enumerate(tensors) if blob is small[0][0])

    def _await_room(self, size: int) -> bool:
        deadline = time.monotonic() + self._patience
        with self._changed:
            seen = self._acked_files
            while not self._has_room(size):
                left = deadline - time.monotonic()
                if left <= 0 or self.hurry or seen == self._stuck_since:
                    self._stuck_since = seen
                    return False
                self._changed.wait(min(left, 0.1))
                if self._acked_files != seen:
                    seen, deadline = self._acked_files, time.monotonic() + self._patience
        return True

    def _write(self, tensors: Sequence[tuple[pb.Blob, memoryview]], begin: int) -> bool:
        self._number += 1
        ending = "tensor" if begin else "tensors"
        path = self._folder / f"{self._uuid}-{self._number:020d}.{ending}"
        total = begin + sum(blob.size for blob, _ in tensors)
        try:
            write_file(path, (data for _, data in tensors), total, begin)
        except OSError:  # no space, quota, or the disk went away: the same to a recorder
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return False
        offset = begin
        places = {}
        for blob, _ in tensors:
            blob.file, blob.offset = path.name, offset
            places[blob.digest] = TensorPlace(path, offset, blob.size)
            offset += blob.size
        with self._changed:
            self._places.update(places)
            self._open.append(_File(path, total, list(places)))
            self.size_bytes += total
        return True

    def _remove(self, files: list[_File]) -> None:
        for file in files:
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
        with self._changed:
            for file in files:
                self.size_bytes -= file.size
                for digest in file.digests:
                    self._places.pop(digest, None)
            self._acked_files += len(files)
            self._changed.notify_all()


class TensorReader:
    """Gives out one tensor in chunks; one that is not there any more as a chunk that says so."""

    def __init__(self, digest: bytes, place: TensorPlace | None) -> None:
        self.done = False
        self._digest, self._place = digest, place
        self._fd = -1
        self._sent = 0
        if place is not None:
            with suppress(OSError):
                self._fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)

    def next(self) -> pb.TensorChunk:
        """The next chunk, until `done`."""
        chunk = pb.TensorChunk(digest=self._digest, offset=self._sent)
        if self._place is not None and self._fd >= 0:
            chunk.total = self._place.size
            size = min(CHUNK_BYTES, self._place.size - self._sent)
            with suppress(OSError):
                chunk.data = os.pread(self._fd, size, self._place.offset + self._sent)
        self._sent += len(chunk.data)
        chunk.missing = not chunk.data
        self.done = chunk.missing or self._sent >= chunk.total
        return chunk

    def close(self) -> None:
        """Read no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_file(path: Path, pieces: Iterable[memoryview], total: int, begin: int) -> None:
    """A file of `total` bytes whose first `begin` are a hole."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if total >= _PIECE_BYTES // 8:
            with suppress(OSError):  # twice as fast where the file system can do it
                os.posix_fallocate(fd, 0, total)
        os.lseek(fd, begin, os.SEEK_SET)
        for piece in _joined(pieces):
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(fd, rest[:_PIECE_BYTES]) :]
    finally:
        os.close(fd)


def _joined(pieces: Iterable[memoryview]) -> Iterator[memoryview | bytearray]:
    """Small pieces together, large ones as they are."""
    joined = bytearray()
    for piece in pieces:
        if len(piece) >= LARGE_BYTES:
            yield piece
            continue
        joined += piece
        if len(joined) >= 1 << 20:
            yield joined
            joined = bytearray()
    if joined:
        yield joined


def files_of(folder: Path, process_uuid: str) -> list[Path]:
    """Tensor files of a process in a spool folder."""
    return [path for path in folder.glob(f"{process_uuid}-*") if _NAME.fullmatch(path.name)]


def places_in(folder: Path, batches: Iterable[pb.Batch]) -> dict[bytes, TensorPlace]:
    """Where the tensors lie that these batches bring."""
    return {
        blob.digest: TensorPlace(folder / blob.file, blob.offset, blob.size)
        for batch in batches
        for blob in batch.blobs
        if _NAME.fullmatch(blob.file)
    }
