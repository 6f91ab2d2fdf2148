"""Bringing tensors into the store: out of a spool on this host, or out of chunks off a stream.

Everything here blocks on the disk and runs in threads of the intake.
"""

import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rankscope.collector import liveness
from rankscope.collector.blobs.container import LARGE_OFFSET
from rankscope.collector.blobs.digest import Tensor
from rankscope.collector.blobs.store import LARGE_BYTES, Adopted, BlobStore, Corrupt
from rankscope.v1 import collector_pb2 as pb

_SMALL_BATCH_BYTES = 8 << 20


def spool_of(hello: pb.Hello) -> Path | None:
    """The folder of a process's spool if it can be read here.

    The lock in it bears the process's UUID, which nobody else can have guessed: same host, same
    folder.
    """
    folder = Path(hello.spool_path)
    if hello.boot_id != liveness.boot_id() or not folder.is_absolute():
        return None
    try:
        seen = (folder / f"{hello.process_uuid}.lock").stat()
    except OSError:
        return None
    return folder if stat.S_ISREG(seen.st_mode) and os.access(folder, os.R_OK | os.X_OK) else None


def bring(
    store: BlobStore, blobs: Sequence[pb.Blob], spool: Path | None, pool: ThreadPoolExecutor
) -> list[pb.Blob]:
    """Store tensors durably as far as the spool has them; returns those it lacks.

    What is damaged there counts as lacking. Raises OSError when the store's disk refuses.
    """
    wanted = list({blob.digest: blob for blob in blobs if not store.has(blob.digest)}.values())
    if spool is None or not wanted:
        return wanted
    lacking = _bring_small(store, [b for b in wanted if b.size < LARGE_BYTES], spool)
    large = [blob for blob in wanted if blob.size >= LARGE_BYTES]
    adopted = list(pool.map(partial(_adopt, store, spool), large))
    store.settle(one for one in adopted if one is not None)
    return lacking + [blob for blob, one in zip(large, adopted, strict=True) if one is None]


def _adopt(store: BlobStore, spool: Path, blob: pb.Blob) -> Adopted | None:
    path = spool / blob.file
    if path.is_symlink() or not os.access(path, os.R_OK | os.W_OK):
        return None
    try:
        return store.adopt(path, Tensor.of(blob), blob.offset)
    except (ValueError, FileNotFoundError):
        return None


def _bring_small(store: BlobStore, blobs: Iterable[pb.Blob], spool: Path) -> list[pb.Blob]:
    lacking: list[pb.Blob] = []
    by_file: dict[str, list[pb.Blob]] = {}
    for blob in blobs:
        by_file.setdefault(blob.file, []).append(blob)
    for name, members in by_file.items():
        try:
            fd = os.open(spool / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            lacking += members
            continue
        try:
            read = [(blob, os.pread(fd, blob.size, blob.offset)) for blob in members]
        finally:
            os.close(fd)
        try:
            store.add_small((Tensor.of(blob), data) for blob, data in read)
        except ValueError:
            lacking += members
    return lacking


class Receiver:
    """Puts chunks of one process together; one thread at a time."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._tensors: dict[bytes, Tensor] = {}
        self._files: dict[bytes, Path] = {}
        self._small: list[tuple[Tensor, bytes]] = []
        self._small_bytes = 0

    def expect(self, blobs: Iterable[pb.Blob]) -> None:
        """These were asked for."""
        self._tensors.update((blob.digest, Tensor.of(blob)) for blob in blobs)

    def chunk(self, chunk: pb.TensorChunk) -> list[bytes]:
        """Take a chunk; digests that are durable now. Raises ValueError or OSError."""
        tensor = self._tensors.get(chunk.digest)
        if tensor is None:
            return []
        if chunk.total != tensor.size or chunk.offset + len(chunk.data) > tensor.size:
            raise Corrupt(f"a chunk of tensor {tensor.digest.hex()} does not fit it")
        if tensor.size < LARGE_BYTES:
            if len(chunk.data) != tensor.size:
                raise Corrupt(f"a chunk of tensor {tensor.digest.hex()} is not the whole of it")
            del self._tensors[chunk.digest]
            self._small.append((tensor, chunk.data))
            self._small_bytes += tensor.size
            return self._flush()
        return self._write(tensor, chunk)

    def missing(self, digest: bytes) -> list[bytes]:
        """The process does not have it; digests that are durable now."""
        self._tensors.pop(digest, None)
        self._forget(digest)
        return self._flush()

    def drop(self) -> None:
        """Nothing more will come."""
        for digest in list(self._files):
            self._forget(digest)
        self._tensors.clear()
        self._small.clear()
        self._small_bytes = 0

    def _flush(self) -> list[bytes]:
        """Small tensors wait for others, because one sync serves them all."""
        others = any(tensor.size < LARGE_BYTES for tensor in self._tensors.values())
        if others and self._small_bytes < _SMALL_BATCH_BYTES:
            return []
        small, self._small, self._small_bytes = self._small, [], 0
        if small:
            self._store.add_small(small)
        return [tensor.digest for tensor, _ in small]

    def _write(self, tensor: Tensor, chunk: pb.TensorChunk) -> list[bytes]:
        path = self._files.get(tensor.digest)
        if path is None:
            path = self._files[tensor.digest] = self._store.new_file()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            rest, at = memoryview(chunk.data), LARGE_OFFSET + chunk.offset
            while rest:
                written = os.pwrite(fd, rest, at)
                rest, at = rest[written:], at + written
        finally:
            os.close(fd)
        if chunk.offset + len(chunk.data) < tensor.size:
            return []
        del self._tensors[tensor.digest]
        try:
            self._store.settle([self._store.adopt(path, tensor)])
        finally:
            self._forget(tensor.digest)
        return [tensor.digest]

    def _forget(self, digest: bytes) -> None:
        if path := self._files.pop(digest, None):
            path.unlink(missing_ok=True)
