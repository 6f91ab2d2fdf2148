"""Columns off the wire into numpy and Arrow: checked reading, gather and a few vectorised texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope.collector.outlines import MalformedBatch

Ids = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.int64]
_Indices = npt.NDArray[np.int32]

_NO_TEXT = np.full(1, -1, np.int32)
_HEX = np.array([b"%02x" % byte for byte in range(256)]).view(np.uint16)


def read_column(field: str, data: bytes, dtype: str, count: int) -> npt.NDArray[Any]:
    """`count` little-endian numbers of `dtype`; raises MalformedBatch for another length."""
    width = np.dtype(dtype).itemsize
    if len(data) != count * width:
        reason = f"{len(data)} bytes where {count} entries of {width} bytes belong"
        raise MalformedBatch(f"columns.{field}", reason)
    return np.frombuffer(data, dtype)


def read_ids(field: str, data: bytes, count: int, size: int) -> Ids:
    """`count` uint32 ids below `size`; raises MalformedBatch."""
    ids: Ids = read_column(field, data, "<u4", count)
    if count and int(ids.max()) >= size:
        raise MalformedBatch(f"columns.{field}", f"id {ids.max()} where ids are below {size}")
    return ids


def read_codes(field: str, data: bytes, count: int, first: int, last: int) -> npt.NDArray[np.uint8]:
    """`count` enum numbers from `first` to `last`; raises MalformedBatch."""
    codes = read_column(field, data, "u1", count)
    if count and not (first <= int(codes.min()) and int(codes.max()) <= last):
        reason = f"{codes.min()} to {codes.max()}, allowed: {first} to {last}"
        raise MalformedBatch(f"columns.{field}", reason)
    return codes


class Texts:
    """Strings (or nulls) without repeats, to be gathered into long dictionary columns.

    Repeats are removed because Parquet's dictionary pages must not have any.
    """

    def __init__(self, texts: Sequence[str | None]) -> None:
        known = [text for text in dict.fromkeys(texts) if text is not None]
        self.dictionary = pa.array(known, pa.string())
        self._indices: _Indices | None = None  # None: text i stands at i
        self._has_nulls = False
        if len(known) != len(texts):
            positions: dict[str | None, int] = {text: i for i, text in enumerate(known)}
            indices = [positions.get(text, -1) for text in texts]
            self._indices = np.array(indices, np.int32)
            self._has_nulls = -1 in indices

    def take(self, ids: npt.NDArray[Any]) -> pa.DictionaryArray:
        """The texts of 0-based ids."""
        indices = ids.astype(np.int32) if self._indices is None else self._indices[ids]
        mask = indices < 0 if self._has_nulls else None
        return pa.DictionaryArray.from_arrays(pa.array(indices, mask=mask), self.dictionary)

    def take_optional(self, ids: Ids) -> pa.DictionaryArray:
        """The texts of 1-based ids, null for 0; the texts have no nulls."""
        indices = ids.astype(np.int32) - 1
        mask = indices < 0
        if self._indices is not None:
            indices = np.concatenate((self._indices, _NO_TEXT))[indices]
        return pa.DictionaryArray.from_arrays(pa.array(indices, mask=mask), self.dictionary)


def constant_column(text: str, count: int) -> pa.DictionaryArray:
    """One text, `count` times."""
    indices = pa.array(np.zeros(count, np.int32))
    return pa.DictionaryArray.from_arrays(indices, pa.array([text], pa.string()))


def sparse_texts(texts: pa.Array, rows: Rows, count: int) -> pa.Array:
    """A string column of `count` rows: texts[i] at rows[i], null elsewhere."""
    positions = np.full(count, -1, np.int64)
    positions[rows] = np.arange(len(rows))
    return texts.take(pa.array(positions, mask=positions < 0))


def hex_texts(values: npt.NDArray[Any], digits: int, prefix: bytes = b"") -> pa.Array:
    """The last `digits` (an even number) hex digits of each uint64, after `prefix`."""
    raw = values.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 8 - digits // 2 :]
    text = _HEX[raw].view(np.uint8).reshape(len(values), digits)
    head = np.broadcast_to(np.frombuffer(prefix, np.uint8), (len(values), len(prefix)))
    data = np.hstack((head, text))
    offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(data.shape[1])
    buffers = pa.py_buffer(offsets.tobytes()), pa.py_buffer(data.tobytes())
    return pa.StringArray.from_buffers(len(values), *buffers)
