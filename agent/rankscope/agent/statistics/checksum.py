"""Checksums of a tensor's bytes as they lie in row-major order."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .memory import array_at

Array = npt.NDArray[Any]

_crc32: Callable[..., int]
try:
    from isal import isal_zlib
except ImportError:  # a platform without its wheel
    _crc32 = zlib.crc32
else:
    _crc32 = isal_zlib.crc32

_WORD_BITS = 64
_COPIED_BYTES = 1 << 14


def crc32(pieces: Iterable[Array | bytes]) -> int:
    """CRC-32 of the bytes of all pieces together; 0 for none."""
    value = 0
    for piece in pieces:
        value = _crc32(_bytes_of(piece), value)
    return value


def xor64(pieces: Iterable[Array | bytes]) -> int:
    """XOR of the little-endian 64-bit words of all bytes together, zero-padded at the end."""
    value = 0
    offset = 0
    for piece in pieces:
        data = _bytes_of(piece)
        value ^= _rotated(_xor_words(data), 8 * (offset % 8))
        offset += len(data)
    return value


def crc32_at(address: int, size: int) -> int:
    """CRC-32 of `size` bytes of memory."""
    if size <= _COPIED_BYTES:  # cheaper to copy than to make a view of
        return _crc32(ctypes.string_at(address, size))
    return _crc32(array_at(address, np.dtype("u1"), (size,)))


def _bytes_of(piece: Array | bytes) -> Array:
    if isinstance(piece, bytes):
        return np.frombuffer(piece, np.uint8)
    return piece.reshape(-1).view(np.uint8)


def _xor_words(data: Array) -> int:
    whole = len(data) // 8 * 8
    words = data[:whole].view("<u8")
    return int(np.bitwise_xor.reduce(words)) ^ int.from_bytes(data[whole:].tobytes(), "little")


def _rotated(word: int, bits: int) -> int:
    """A piece that starts inside a word gives its bytes moved up, around the end of the word."""
    return ((word << bits) | (word >> (_WORD_BITS - bits))) & ((1 << _WORD_BITS) - 1)


CHECKSUMS: dict[str, Callable[[Iterable[Array | bytes]], int]] = {"md5": crc32, "xor": xor64}
