"""The statistics of the tensor leaves of a batch, from the wire to columns over all leaves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope.collector.columns import (
    Ids,
    Rows,
    hex_texts,
    read_column,
    read_ids,
    sparse_texts,
)
from rankscope.collector.outlines import MalformedBatch
from rankscope.v1 import collector_pb2 as pb

#: Columns that the JSON object of a tensor leaf may override.
OVERRIDABLE = ("max", "min", "mean", "norm", "sum", "sum_of_squares")

_ALL_FLAGS = 31
_DIGEST_BYTES = 32
_SAMPLES = pa.list_(pa.float64())
_SPECIAL = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}

_Numbers = npt.NDArray[Any]
_Mask = npt.NDArray[np.bool_]


class Statistics:
    """Reads and checks everything the batch says per tensor leaf; raises MalformedBatch.

    `tensors` are the rows of the tensor leaves, ascending. `elements` and `value_ids` (1-based
    into `values`) have an entry for every leaf. So have all arrays inside, zero where a leaf is no
    tensor.
    """

    def __init__(
        self,
        columns: pb.Columns,
        tensors: Rows,
        elements: npt.NDArray[np.int64],
        value_ids: Ids,
        values: Sequence[Any],
    ) -> None:
        self._columns = columns
        self._tensors = tensors
        self._elements = elements
        self._flags = self._read("flags", "u1")
        if len(tensors) and int(self._flags.max()) > _ALL_FLAGS:
            raise MalformedBatch("columns.flags", f"{self._flags.max()} has unknown bits")
        self._numbers = self._ranges_and_sums() | self._counts()
        self._override(value_ids[tensors], values)

    @property
    def captured(self) -> Rows:
        """Rows of the captured tensors."""
        return np.flatnonzero(self._has(pb.IS_CAPTURED))

    def arrow_columns(self, summary_mode: str) -> dict[str, pa.Array]:
        """The statistics columns of RECORDS."""
        columns = {
            name: pa.array(numbers, mask=missing)
            for name, (numbers, missing) in self._numbers.items()
        }
        no_tensor = np.ones(len(self._flags), np.bool_)
        no_tensor[self._tensors] = False
        columns["elements"] = pa.array(self._elements, mask=no_tensor)
        columns["samples"] = self._samples()
        columns["checksum"] = self._checksums(summary_mode)
        columns["digest"] = self._digests()
        return columns

    def _has(self, flag: int) -> _Mask:
        has: _Mask = (self._flags & flag) != 0
        return has

    def _lacks(self, flag: int) -> _Mask:
        lacks: _Mask = (self._flags & flag) == 0
        return lacks

    def _read(self, field: str, dtype: str) -> _Numbers:
        """A column of the batch, over all leaves."""
        column = read_column(field, getattr(self._columns, field), dtype, len(self._tensors))
        return self._spread(column)

    def _spread(self, column: _Numbers) -> _Numbers:
        if len(column) == len(self._elements):
            return column
        spread = np.zeros(len(self._elements), column.dtype)
        spread[self._tensors] = column
        return spread

    def _ranges_and_sums(self) -> dict[str, tuple[_Numbers, _Mask]]:
        no_range, no_sums = self._lacks(pb.HAS_RANGE), self._lacks(pb.HAS_SUMS)
        total, squares = self._read("sum", "<f8"), self._read("sum_of_squares", "<f8")
        with np.errstate(all="ignore"):
            mean, norm = total / self._elements, np.sqrt(squares)
        return {
            "max": (self._read("max", "<f8"), no_range),
            "min": (self._read("min", "<f8"), no_range),
            "mean": (mean, no_sums | (self._elements == 0)),
            "norm": (norm, no_sums),
            "sum": (total, no_sums),
            "sum_of_squares": (squares, no_sums),
            "std": self._std(no_sums | (self._elements == 0)),
        }

    def _std(self, missing: _Mask) -> tuple[_Numbers, _Mask]:
        if not self._columns.std:  # not recorded
            return np.zeros(len(missing)), np.ones(len(missing), np.bool_)
        return self._read("std", "<f8"), missing

    def _samples(self) -> pa.Array:
        """A list a tensor that has samples."""
        columns = self._columns
        if not columns.sample_count:
            return pa.nulls(len(self._elements), _SAMPLES)
        counts = self._read("sample_count", "<u2")
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        values = read_column("samples", columns.samples, "<f8", int(offsets[-1]))
        if offsets[-1] >= 2**31:
            raise MalformedBatch("columns.samples", f"{offsets[-1]} numbers")
        starts = pa.array(offsets.astype(np.int32))
        return pa.ListArray.from_arrays(starts, pa.array(values), mask=pa.array(counts == 0))

    def _counts(self) -> dict[str, tuple[_Numbers, _Mask]]:
        missing = self._lacks(pb.HAS_COUNTS)
        counts = {}
        for field in ("nan_count", "inf_count", "zero_count"):
            column = self._read(field, "<i8")
            if len(column) and int(column.min()) < 0:
                raise MalformedBatch(f"columns.{field}", f"{column.min()} is negative")
            counts[field] = (column, missing)
        return counts

    def _override(self, value_ids: Ids, values: Sequence[Any]) -> None:
        """Lays the numbers of the leaves' own value objects over the columns."""
        if not value_ids.any():
            return
        distinct, inverse = np.unique(value_ids, return_inverse=True)
        objects = [_override_object(values[i - 1]) if i else {} for i in distinct.tolist()]
        for name in OVERRIDABLE:
            given = np.array([name in item for item in objects], np.bool_)[inverse]
            if not given.any():
                continue
            numbers = [_number(name, item.get(name)) for item in objects]
            filled = np.array([number or 0.0 for number in numbers])[inverse]
            missing = np.array([number is None for number in numbers])[inverse]
            rows = self._tensors[given]
            column, mask = (array.copy() for array in self._numbers[name])
            column[rows], mask[rows] = filled[given], missing[given]
            self._numbers[name] = column, mask

    def _checksums(self, summary_mode: str) -> pa.Array:
        has_checksum = self._has(pb.HAS_CHECKSUM)
        if not self._columns.checksum and not has_checksum.any():
            return pa.nulls(len(has_checksum), pa.string())
        rows = np.flatnonzero(has_checksum)
        checksums = self._read("checksum", "<u8")[rows]
        if summary_mode == "md5":
            if np.any(checksums > 0xFFFFFFFF):
                raise MalformedBatch("columns.checksum", f"{checksums.max()} is no CRC-32")
            return sparse_texts(hex_texts(checksums, 8), rows, len(has_checksum))
        return sparse_texts(hex_texts(checksums, 16, b"0x"), rows, len(has_checksum))

    def _digests(self) -> pa.Array:
        digests = self._columns.digests
        if any(len(digest) != _DIGEST_BYTES for digest in digests):
            raise MalformedBatch("columns.digests", f"a digest has not {_DIGEST_BYTES} bytes")
        if not self._columns.digest:
            return pa.nulls(len(self._flags), pa.string())
        ids = read_ids("digest", self._columns.digest, len(self._tensors), len(digests) + 1)
        positions = self._spread(ids).astype(np.int64) - 1
        texts = pa.array([digest.hex() for digest in digests], pa.string())
        return texts.take(pa.array(positions, mask=positions < 0))


def _override_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedBatch("columns.values", f"{str(value)[:80]} of a tensor is no JSON object")
    return value


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    if not isinstance(value, bool | int | float):
        allowed = "a number, null or one of " + ", ".join(_SPECIAL)
        raise MalformedBatch("columns.values", f"{name} is {value!r}, allowed: {allowed}")
    try:
        return float(value)
    except OverflowError:
        raise MalformedBatch("columns.values", f"{name} is above any float64") from None
