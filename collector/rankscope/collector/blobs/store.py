"""The tensors of one run: RUN.rankscope/blobs/.

A large tensor is a .pt file `{first two digits}/{digest}.pt`, which layouts link to. Small ones lie
in packs, because a file each would cost a hundred times as much. Nothing stands under a final name
before its digest was verified and its bytes are on the disk.
"""

import ctypes
import errno
import fcntl
import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rankscope.collector.blobs.checksum import crc32
from rankscope.collector.blobs.container import LARGE_OFFSET, around, described
from rankscope.collector.blobs.digest import DIGEST_BYTES, Tensor, hasher
from rankscope.collector.blobs.packs import Packs
from rankscope.collector.store.files import fsync

#: Tensors of so many bytes and more are files of their own.
LARGE_BYTES = 32 << 10
_PIECE_BYTES = 8 << 20
_VERIFIED_BYTES = 512 << 10  # read, digested and summed while it is in the processor's cache
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_of_thread = threading.local()
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP)


class Corrupt(ValueError):
    """Bytes that are not what their digest says."""


class Adopted(NamedTuple):
    """A verified .pt file that waits to be synced and named."""

    digest: bytes
    path: Path
    is_own: bool = False
    """Made by the store, to be removed."""


class BlobReader:
    """Gives out what is stored, whoever stores meanwhile. Any thread may call."""

    def __init__(self, side_path: Path, collector_id: str = "") -> None:
        self.root = side_path / "blobs"
        self._lock = threading.Lock()
        self._packs = Packs(self.root / "packs", collector_id)

    def path(self, digest: bytes) -> Path:
        """Where a large tensor stands, if it does."""
        name = digest.hex()
        return self.root / name[:2] / f"{name}.pt"

    def container(self, digest: bytes) -> bytes:
        """The .pt file of a small tensor; KeyError when it is not stored."""
        tensor, data = self._small(digest)
        head, tail = around(tensor.dtype, tensor.shape, tensor.size, crc32(data))
        return head + data + tail

    def tensor(self, digest: bytes) -> Tensor:
        """What is stored under a digest; KeyError when nothing is."""
        try:
            with open(self.path(digest), "rb") as file:
                return Tensor(digest, *described(file.read(LARGE_OFFSET)))
        except FileNotFoundError:
            return self._small(digest)[0]

    def pieces(self, digest: bytes) -> Iterator[bytes]:
        """The bytes of a tensor, some MiB at a time; KeyError when it is not stored."""
        try:
            file = open(self.path(digest), "rb")
        except FileNotFoundError:
            yield self._small(digest)[1]
            return
        with file:
            left = self.tensor(digest).size
            file.seek(LARGE_OFFSET)
            while left and (piece := file.read(min(left, _PIECE_BYTES))):
                left -= len(piece)
                yield piece

    def sizes(self) -> dict[bytes, int]:
        """Bytes on the disk of each tensor that is stored."""
        with self._lock:
            self._packs.look()
            found = self._packs.sizes()
        for path in self.root.glob("??/*.pt"):
            with suppress(FileNotFoundError, ValueError):
                found[bytes.fromhex(path.stem)] = path.stat().st_blocks * 512
        return found

    def _small(self, digest: bytes) -> tuple[Tensor, bytes]:
        with self._lock:
            if digest not in self._packs:
                self._packs.look()
            return self._packs.read(digest)


class BlobStore(BlobReader):
    """The same for a collector, which stores. Several may share the folder."""

    def __init__(self, side_path: Path, collector_id: str) -> None:
        """Opens the folder, made if missing; what an earlier life left unfinished is removed."""
        self.root = side_path / "blobs"
        self._incoming = self.root / "incoming"
        self._id = collector_id
        for folder in (self.root, self._incoming, self.root / "packs"):
            folder.mkdir(exist_ok=True)
            fsync(folder.parent)
        for left in self._incoming.glob(f"{collector_id}-*"):
            left.unlink(missing_ok=True)
        self._unsettled: set[bytes] = set()
        self._lock_fd = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # no locks here: then nobody removes small tensors either
            fcntl.flock(self._lock_fd, fcntl.LOCK_SH)  # see `removal.py`
        super().__init__(side_path, collector_id)
        self._stored_bytes = -1

    @property
    def stored_bytes(self) -> int:
        """What all tensors take on the disk: looked up once, then counted."""
        if self._stored_bytes < 0:
            self._stored_bytes = sum(self.sizes().values())
        return self._stored_bytes

    def has(self, digest: bytes) -> bool:
        """Whether a tensor is stored durably."""
        with self._lock:
            if digest in self._packs:
                return True
            if digest in self._unsettled:
                return False
        try:
            os.utime(self.path(digest))  # what was asked for of late is not removed
        except OSError:
            return self.path(digest).exists()
        return True

    def new_file(self) -> Path:
        """Where bytes from elsewhere are gathered, from LARGE_OFFSET on, for `adopt`."""
        return self._incoming / f"{self._id}-{uuid.uuid4().hex}"

    def adopt(self, path: Path, tensor: Tensor, offset: int = LARGE_OFFSET) -> Adopted:
        """Verify a large tensor whose bytes lie in a file; stored once `settle` returned.

        The file itself becomes the blob where links work, else a copy does; `path` stays. Raises
        Corrupt when the bytes are not what the digest says, OSError when the disk refuses.
        """
        target = self.path(tensor.digest)
        with self._lock:
            self._unsettled.add(tensor.digest)
        if target.exists():
            return Adopted(tensor.digest, target)
        if offset == LARGE_OFFSET:
            self._complete(path, tensor)
            return Adopted(tensor.digest, path)
        aside = self.new_file()
        try:
            copy_range(path, offset, aside, LARGE_OFFSET, tensor.size)
            self._complete(aside, tensor)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        return Adopted(tensor.digest, aside, is_own=True)

    def settle(self, adopted: Iterable[Adopted]) -> None:
        """Make what was adopted durable and give it its name.

        Everything is synced before anything is linked; the first sync commits the file system's
        journal for all of them, the first of a folder for all folders.
        """
        adopted = list(adopted)
        try:
            new = [a for a in adopted if a.path != self.path(a.digest)]
            for one in new:
                fsync(one.path)
            for one in new:
                _make_folder(self.path(one.digest).parent)
                self._place(one.path, self.path(one.digest))
            self._count(sum(one.path.stat().st_size for one in new))
        finally:
            for one in adopted:
                if one.is_own:
                    one.path.unlink(missing_ok=True)
        for folder in {self.path(one.digest).parent for one in adopted}:
            fsync(folder)
        with self._lock:
            self._unsettled.difference_update(one.digest for one in adopted)

    def add_small(self, tensors: Iterable[tuple[Tensor, bytes]]) -> None:
        """Store small tensors; durable when this returns. Raises Corrupt or OSError."""
        checked = {}
        for tensor, data in tensors:
            if len(data) != tensor.size:
                raise Corrupt(f"{len(data)} bytes of {tensor.size} of tensor {tensor.digest.hex()}")
            found = hasher(tensor.dtype, tensor.shape)
            found.update(data)
            _check(found.digest(), tensor)
            checked[tensor.digest] = (tensor, data)
        with self._lock:
            new = [item for digest, item in checked.items() if digest not in self._packs]
            if new:
                self._packs.append(new)
        self._count(sum(len(data) for _, data in new))

    def _count(self, size: int) -> None:
        with self._lock:
            if self._stored_bytes >= 0:
                self._stored_bytes += size

    def close(self) -> None:
        """Nothing more will be stored."""
        with self._lock:
            self._packs.close()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1

    def _complete(self, path: Path, tensor: Tensor) -> None:
        """Verify the bytes in a file and make it a .pt file around them, not yet synced."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            crc = _verify(fd, LARGE_OFFSET, tensor)
            head, tail = around(tensor.dtype, tensor.shape, tensor.size, crc, LARGE_OFFSET)
            os.pwrite(fd, head, 0)
            os.pwrite(fd, tail, LARGE_OFFSET + tensor.size)
            os.ftruncate(fd, LARGE_OFFSET + tensor.size + len(tail))
            os.fchmod(fd, 0o644)
            begin_writing(fd)
        finally:
            os.close(fd)

    def _place(self, path: Path, target: Path) -> None:
        try:
            os.link(path, target)
        except FileExistsError:
            pass  # another process brought the same
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._copy(path, target)

    def _copy(self, path: Path, target: Path) -> None:
        aside = self.new_file()
        try:
            copy_range(path, 0, aside, 0, path.stat().st_size)
            fsync(aside)
            os.chmod(aside, 0o644)
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)


def begin_writing(fd: int) -> None:
    """Have the kernel write a file to the disk, without waiting; a sync later has less to do."""
    if function := getattr(ctypes.CDLL(None), "sync_file_range", None):  # Linux
        function(fd, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_WRITE))


def copy_range(source: Path, offset: int, target: Path, at: int, size: int) -> None:
    """Copy bytes from a place in one file to a place in another, which is made if missing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    read_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        write_fd = os.open(target, flags, 0o644)
        try:
            with suppress(OSError):
                os.posix_fallocate(write_fd, 0, at + size)
            buffer = bytearray(min(_PIECE_BYTES, max(size, 1)))
            done = 0
            while done < size:
                got = os.preadv(read_fd, [memoryview(buffer)[: size - done]], offset + done)
                if not got:
                    raise Corrupt(f"{source} is cut off at {offset + done}")
                done += os.pwrite(write_fd, memoryview(buffer)[:got], at + done)
        finally:
            os.close(write_fd)
    finally:
        os.close(read_fd)


def _verify(fd: int, offset: int, tensor: Tensor) -> int:
    """The CRC-32 of a tensor's bytes in a file; raises Corrupt when they are others."""
    if os.fstat(fd).st_size < offset + tensor.size:
        raise Corrupt(f"the file of tensor {tensor.digest.hex()} is cut off")
    found = hasher(tensor.dtype, tensor.shape)
    buffer = _buffer()
    crc = done = 0
    while done < tensor.size:  # not mapped: a file that shrinks would kill the process
        got = os.preadv(fd, [buffer[: tensor.size - done]], offset + done)
        if not got:
            raise Corrupt(f"the file of tensor {tensor.digest.hex()} was cut off")
        found.update(buffer[:got])
        crc = crc32(buffer[:got], crc)
        done += got
    _check(found.digest(), tensor)
    return crc


def _buffer() -> memoryview:
    """One a thread: fresh pages for every tensor would cost more than reading it."""
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = memoryview(bytearray(_VERIFIED_BYTES))
    return _of_thread.buffer  # type: ignore[no-any-return]


def _check(found: bytes, tensor: Tensor) -> None:
    if len(tensor.digest) != DIGEST_BYTES or found != tensor.digest:
        raise Corrupt(f"the bytes of tensor {tensor.digest.hex()} have the digest {found.hex()}")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir()
    except FileExistsError:
        return
    fsync(path.parent)
