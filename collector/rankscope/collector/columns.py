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

    def __init__(self, texts: Sequence[str | None] | pa.Array) -> None:
        encoded = pa.array(texts, pa.string()).dictionary_encode()
        self.dictionary = encoded.dictionary
        self._indices: _Indices = encoded.indices.fill_null(-1).to_numpy()
        self._has_nulls = encoded.null_count > 0

    def take(self, ids: npt.NDArray[Any]) -> pa.DictionaryArray:
        """The texts of 0-based ids."""
        indices = self._indices[ids]
        mask = indices < 0 if self._has_nulls else None
        return pa.DictionaryArray.from_arrays(pa.array(indices, mask=mask), self.dictionary)

    def take_optional(self, ids: Ids) -> pa.DictionaryArray:
        """The texts of 1-based ids, null for 0."""
        indices = np.concatenate((np.full(1, -1, np.int32), self._indices))[ids]
        return pa.DictionaryArray.from_arrays(pa.array(indices, mask=indices < 0), self.dictionary)


def constant_column(text: str, count: int) -> pa.DictionaryArray:
    """One text, `count` times."""
    return Texts([text]).take(np.zeros(count, np.int32))


def sparse_column(
    values: npt.NDArray[Any], valid: npt.NDArray[np.bool_], rows: Rows, count: int
) -> pa.Array:
    """A column of `count` rows: values[i] at rows[i] where valid[i], null elsewhere."""
    if len(rows) == count:
        return pa.array(values, mask=~valid)
    spread = np.zeros(count, values.dtype)
    mask = np.ones(count, np.bool_)
    spread[rows] = values
    mask[rows] = ~valid
    return pa.array(spread, mask=mask)


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
