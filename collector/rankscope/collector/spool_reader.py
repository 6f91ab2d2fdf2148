"""Reads what dead processes left in a spool folder on this host.

A segment `{process_uuid}-{first_sequence:020d}.spool` is the magic `RSSPOOL1`, then frames: length
(u32), CRC-32 of the payload (u32) and sequence (u64), little-endian, and the payload. Sequence 0
holds a serialized Hello, each other one a serialized Batch. A torn frame ends the file. A living
owner holds a lock on `{process_uuid}.lock`.
"""

import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from rankscope.v1 import collector_pb2 as pb

MAGIC = b"RSSPOOL1"
HEADER = struct.Struct("<IIQ")
_NAME = re.compile(r"([0-9a-f]{32})-(\d{20})\.spool")
_TENSORS = re.compile(r"([0-9a-f]{32})-\d{20}\.tensors?")


class Frame(NamedTuple):
    """One batch as the spool keeps it; its CRC was right."""

    sequence: int
    payload: bytes
    crc32: int


def left_over(folder: Path) -> dict[str, list[Path]]:
    """Segments in the folder by process, in order; those of living processes too."""
    found: dict[str, list[tuple[int, Path]]] = {}
    with suppress(OSError):
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.setdefault(match[1], []).append((int(match[2]), path))
    return {process: [path for _, path in sorted(paths)] for process, paths in found.items()}


def read_hello(segments: list[Path]) -> pb.Hello | None:
    """The Hello at the head of the first readable segment."""
    for segment in reversed(segments):
        for frame in _frames(segment):
            if frame.sequence:
                break
            with suppress(DecodeError):
                return pb.Hello.FromString(frame.payload)
    return None


def read_batches(segments: list[Path], after: int = 0) -> Iterator[Frame]:
    """Intact batches behind a sequence, in order."""
    for segment in segments:
        for frame in _frames(segment):
            if frame.sequence > after:
                yield frame


def is_owned(folder: Path, process: str) -> bool | None:
    """Whether the living owner still holds the lock, None when there is no lock to ask."""
    with _lock(folder, process) as free:
        return None if free is None else not free


def remove(folder: Path, process: str, durable: int) -> None:
    """Remove what a dead process left, unless it holds a batch behind the durable sequence."""
    with _lock(folder, process) as free:
        if free is False:
            return
        segments = left_over(folder).get(process, [])
        if any(True for _ in read_batches(segments, after=durable)):
            return
        for path in [*segments, *_tensor_files(folder, process)]:
            path.unlink(missing_ok=True)
        (folder / f"{process}.lock").unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove tensors that no batch brings: their process was killed before it wrote the batch."""
    with suppress(OSError):
        owners = {match[1] for path in folder.iterdir() if (match := _TENSORS.fullmatch(path.name))}
        for process in owners:
            remove(folder, process, -1)


def _tensor_files(folder: Path, process: str) -> list[Path]:
    return [path for path in folder.glob(f"{process}-*") if _TENSORS.fullmatch(path.name)]


@contextmanager
def _lock(folder: Path, process: str) -> Iterator[bool | None]:
    try:
        fd = os.open(folder / f"{process}.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except OSError:
        free = False
    try:
        yield free
    finally:
        os.close(fd)


def _frames(path: Path) -> Iterator[Frame]:
    try:
        file = open(path, "rb")
    except OSError:
        return
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        left = os.fstat(file.fileno()).st_size - len(MAGIC)
        while len(header := file.read(HEADER.size)) == HEADER.size:
            length, crc, sequence = HEADER.unpack(header)
            left -= HEADER.size + length
            if left < 0:
                return
            payload = file.read(length)
            if len(payload) < length or zlib.crc32(payload) != crc:
                return
            yield Frame(sequence, payload, crc)
