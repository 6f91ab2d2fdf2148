"""Small tensors, many to a file. A pack is only appended to and says by itself what is in it.

It is the magic `RSBLOBS1`, then frames: digest (32 bytes), lengths of description and data (u32
each), CRC-32 of both (u32), all little-endian, the description `<dtype> <size>,<size>,...` and the
data. What is behind the first frame that is cut off or fails its CRC was never durable.
"""

import os
import struct
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from rankscope.collector.blobs.checksum import crc32
from rankscope.collector.blobs.digest import Tensor
from rankscope.collector.store.files import fsync

MAGIC = b"RSBLOBS1"
FRAME = struct.Struct("<32sIII")
PACK_BYTES = 256 << 20


class Place(NamedTuple):
    """Where a frame begins, and the CRC-32 of its data."""

    path: Path
    offset: int


class Packs:
    """All packs of a folder; one of them may be appended to. One thread at a time."""

    def __init__(self, folder: Path, collector_id: str) -> None:
        """`collector_id` names the packs written here; they are this collector's alone."""
        self._folder, self._id = folder, collector_id
        self._places: dict[bytes, Place] = {}
        self._read_up_to: dict[str, int] = {}  # by file name: where its known frames end
        self._fd = -1
        self._path = folder
        self._size = 0
        self.look()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    def __len__(self) -> int:
        return len(self._places)

    def digests(self) -> list[bytes]:
        """Everything that is known."""
        return list(self._places)

    def look(self) -> None:
        """Take notice of what others have written meanwhile."""
        for path in sorted(self._folder.glob("*.pack")):
            if path != self._path:
                self._index(path)

    def sizes(self) -> dict[bytes, int]:
        """What each tensor takes in its pack, description and all."""
        found = {}
        for digest, (path, offset) in self._places.items():
            with open(path, "rb") as file:
                file.seek(offset)
                _, described, size, _ = FRAME.unpack(file.read(FRAME.size))
            found[digest] = FRAME.size + described + size
        return found

    def read(self, digest: bytes) -> tuple[Tensor, bytes]:
        """A tensor and its bytes; KeyError when it is unknown, OSError when its file is gone."""
        try:
            return self._read(digest)
        except FileNotFoundError:  # packs were written anew without what nobody needs
            self._forget_gone()
            self.look()
            return self._read(digest)

    def rewrite(self, keep: Callable[[bytes], bool]) -> None:
        """Write packs anew that hold what is not to be kept. Nobody may append meanwhile."""
        self.close()
        for path in sorted(self._folder.glob("*.pack")):
            here = [digest for digest, place in self._places.items() if place.path == path]
            kept = [digest for digest in here if keep(digest)]
            if len(kept) == len(here):
                continue
            if kept:
                other = Packs(self._folder, self._id)
                other.append([self._read(digest) for digest in kept])
                other.close()
            path.unlink()
            fsync(self._folder)
        self._forget_gone()
        self.look()

    def _forget_gone(self) -> None:
        there = set(self._folder.glob("*.pack"))
        self._places = {
            digest: place for digest, place in self._places.items() if place.path in there
        }

    def _read(self, digest: bytes) -> tuple[Tensor, bytes]:
        path, offset = self._places[digest]
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, described, size, _ = FRAME.unpack(os.pread(fd, FRAME.size, offset))
            content = os.pread(fd, described + size, offset + FRAME.size)
        finally:
            os.close(fd)
        return Tensor.parse(digest, content[:described].decode(), size), content[described:]

    def append(self, tensors: Iterable[tuple[Tensor, bytes]]) -> None:
        """Add tensors; durable and known when this returns. Raises OSError, then adds nothing."""
        if self._fd < 0 or self._size >= PACK_BYTES:
            self._begin()
        content = bytearray()
        places = {}
        for tensor, data in tensors:
            places[tensor.digest] = Place(self._path, self._size + len(content))
            described = tensor.description.encode()
            crc = crc32(data, crc32(described))
            content += FRAME.pack(tensor.digest, len(described), len(data), crc) + described + data
        try:
            _write_all(self._fd, content)
            os.fdatasync(self._fd)
        except OSError:
            self.close()  # what is torn ends this file
            raise
        self._size += len(content)
        self._places.update(places)

    def close(self) -> None:
        """Append to this pack no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._read_up_to[self._path.name] = self._size

    def _begin(self) -> None:
        self.close()
        path = self._folder / f"{self._id}-{uuid.uuid4().hex}.pack"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(path, flags, 0o644)
        try:
            _write_all(fd, MAGIC)
            fsync(self._folder)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._fd, self._path, self._size = fd, path, len(MAGIC)

    def _index(self, path: Path) -> None:
        offset = self._read_up_to.get(path.name, len(MAGIC))
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return
            left = os.fstat(file.fileno()).st_size - offset
            file.seek(offset)
            while len(header := file.read(FRAME.size)) == FRAME.size:
                digest, described, size, crc = FRAME.unpack(header)
                left -= FRAME.size + described + size
                if left < 0 or crc32(file.read(described + size)) != crc:
                    break
                self._places.setdefault(digest, Place(path, offset))
                offset += FRAME.size + described + size
        self._read_up_to[path.name] = offset


def _write_all(fd: int, content: bytes | bytearray) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
