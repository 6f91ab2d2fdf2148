"""The spool's file format.

A segment is the magic `RSSPOOL1`, then frames: length (u32), CRC-32 of the payload (u32), sequence
(u64), all little-endian, and the payload. The first frame has sequence 0 and holds a serialized
Hello; each other one holds a serialized Batch. A frame that is cut off or fails its CRC ends the
file.
"""

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

try:  # several times faster on x86 and ARM
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # pragma: no cover - platforms without a wheel
    _crc32 = zlib.crc32

MAGIC = b"RSSPOOL1"
HEADER = struct.Struct("<IIQ")
SUFFIX = ".spool"
crc32: Callable[[bytes], int] = _crc32

_NAME = re.compile(r"([0-9a-f]{32})-(\d{20})\.spool")


class Stored(NamedTuple):
    """One batch as the spool keeps it."""

    sequence: int
    payload: bytes
    crc32: int


class Frame(NamedTuple):
    """One intact frame of a segment file; `offset` is that of its header."""

    stored: Stored
    offset: int


def segment_name(process_uuid: str, first_sequence: int) -> str:
    return f"{process_uuid}-{first_sequence:020d}{SUFFIX}"


def parse_name(name: str) -> tuple[str, int] | None:
    """(process_uuid, first sequence) of a segment's file name, None for any other name."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def write_frame(fd: int, stored: Stored, prefix: bytes = b"") -> int:
    """Append one frame and return the bytes written; raises OSError, perhaps after a part of it."""
    header = HEADER.pack(len(stored.payload), stored.crc32, stored.sequence)
    total = len(prefix) + len(header) + len(stored.payload)
    written = os.writev(fd, [prefix, header, stored.payload])
    if written < total:  # the disk is nearly full: the rest raises ENOSPC, or fits after all
        rest = memoryview(prefix + header + stored.payload)[written:]
        while rest:
            rest = rest[os.write(fd, rest) :]
    return total


def read_frames(path: Path) -> Iterator[Frame]:
    """Intact frames of a segment, the Hello first; ends without an error at a torn tail."""
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        left = os.fstat(file.fileno()).st_size - len(MAGIC)
        offset = len(MAGIC)
        while len(header := file.read(HEADER.size)) == HEADER.size:
            length, crc, sequence = HEADER.unpack(header)
            left -= HEADER.size
            if length > left:
                return
            payload = file.read(length)
            if len(payload) < length or crc32(payload) != crc:
                return
            yield Frame(Stored(sequence, payload, crc), offset)
            left -= length
            offset += HEADER.size + length


def read_at(fd: int, offset: int) -> Stored | None:
    """The frame whose header lies at `offset`, or None when it is not whole."""
    header = os.pread(fd, HEADER.size, offset)
    if len(header) < HEADER.size:
        return None
    length, crc, sequence = HEADER.unpack(header)
    payload = os.pread(fd, length, offset + HEADER.size)
    return Stored(sequence, payload, crc) if len(payload) == length else None
