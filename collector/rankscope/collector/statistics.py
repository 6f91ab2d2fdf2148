"""The statistics of the tensor leaves of a batch, from the wire to columns over all leaves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope.collector.columns import (
    Rows,
    hex_texts,
    read_column,
    read_ids,
    sparse_column,
    sparse_texts,
)
from rankscope.collector.outlines import MalformedBatch
from rankscope.v1 import collector_pb2 as pb

#: Columns that the JSON object of a tensor leaf may override.
OVERRIDABLE = ("max", "min", "mean", "norm", "sum", "sum_of_squares")

_ALL_FLAGS = 31
_DIGEST_BYTES = 32
_SPECIAL = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}

_Numbers = npt.NDArray[Any]
_Valid = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TensorLeaves:
    """Which of the `count` leaves of a batch are tensors, their sizes and own value objects."""

    rows: Rows
    count: int
    elements: npt.NDArray[np.int64]
    value_ids: npt.NDArray[np.uint32]  # 1-based, 0: none


class Statistics:
    """Reads and checks everything the batch says per tensor leaf; raises MalformedBatch."""

    def __init__(self, columns: pb.Columns, leaves: TensorLeaves, values: Sequence[Any]) -> None:
        self._columns = columns
        self._leaves = leaves
        self._count = len(leaves.rows)
        self.flags = read_column("flags", columns.flags, "u1", self._count)
        if self._count and int(self.flags.max()) > _ALL_FLAGS:
            raise MalformedBatch("columns.flags", f"{self.flags.max()} has unknown bits")
        self._numbers = self._ranges_and_sums() | self._counts()
        self._override(values)

    @property
    def captured(self) -> Rows:
        """Rows (among all leaves) of the captured tensors."""
        return self._leaves.rows[self._has(pb.IS_CAPTURED)]

    def arrow_columns(self, summary_mode: str) -> dict[str, pa.Array]:
        """The statistics columns of RECORDS over all leaves."""
        columns = {name: self._spread(*column) for name, column in self._numbers.items()}
        everywhere = np.ones(self._count, np.bool_)
        columns["elements"] = self._spread(self._leaves.elements, everywhere)
        columns["checksum"] = self._checksums(summary_mode)
        columns["digest"] = self._digests()
        return columns

    def _has(self, flag: int) -> _Valid:
        has: _Valid = (self.flags & flag) != 0
        return has

    def _spread(self, values: _Numbers, valid: _Valid) -> pa.Array:
        return sparse_column(values, valid, self._leaves.rows, self._leaves.count)

    def _read(self, field: str, dtype: str) -> _Numbers:
        column: _Numbers = read_column(field, getattr(self._columns, field), dtype, self._count)
        return column

    def _ranges_and_sums(self) -> dict[str, tuple[_Numbers, _Valid]]:
        has_range, has_sums = self._has(pb.HAS_RANGE), self._has(pb.HAS_SUMS)
        total, squares = self._read("sum", "<f8"), self._read("sum_of_squares", "<f8")
        elements = self._leaves.elements
        with np.errstate(all="ignore"):
            mean, norm = total / elements, np.sqrt(squares)
        return {
            "max": (self._read("max", "<f8"), has_range),
            "min": (self._read("min", "<f8"), has_range),
            "mean": (mean, has_sums & (elements > 0)),
            "norm": (norm, has_sums),
            "sum": (total, has_sums),
            "sum_of_squares": (squares, has_sums),
        }

    def _counts(self) -> dict[str, tuple[_Numbers, _Valid]]:
        valid = self._has(pb.HAS_COUNTS)
        counts = {}
        for field in ("nan_count", "inf_count", "zero_count"):
            column = self._read(field, "<i8")
            if np.any(valid & (column < 0)):
                raise MalformedBatch(f"columns.{field}", f"{column.min()} is negative")
            counts[field] = (column, valid)
        return counts

    def _override(self, values: Sequence[Any]) -> None:
        """Lays the numbers of the leaves' own value objects over the columns."""
        ids = self._leaves.value_ids
        distinct, inverse = np.unique(ids, return_inverse=True)
        objects = [_override_object(values[i - 1]) if i else {} for i in distinct.tolist()]
        for name in OVERRIDABLE:
            given = np.array([name in item for item in objects], np.bool_)
            if not given.any():
                continue
            numbers = [_number(name, item.get(name)) for item in objects]
            valid = np.array([number is not None for number in numbers], np.bool_)
            filled = np.array([number or 0.0 for number in numbers], np.float64)
            old_numbers, old_valid = self._numbers[name]
            rows = given[inverse]
            self._numbers[name] = (
                np.where(rows, filled[inverse], old_numbers),
                np.where(rows, valid[inverse], old_valid),
            )

    def _checksums(self, summary_mode: str) -> pa.Array:
        has_checksum = self._has(pb.HAS_CHECKSUM)
        if not self._columns.checksum and not has_checksum.any():
            return pa.nulls(self._leaves.count, pa.string())
        checksums = self._read("checksum", "<u8")[has_checksum]
        if summary_mode == "md5":
            if np.any(checksums > 0xFFFFFFFF):
                raise MalformedBatch("columns.checksum", f"{checksums.max()} is no CRC-32")
            texts = hex_texts(checksums, 8)
        else:
            texts = hex_texts(checksums, 16, b"0x")
        return sparse_texts(texts, self._leaves.rows[has_checksum], self._leaves.count)

    def _digests(self) -> pa.Array:
        digests = self._columns.digests
        if any(len(digest) != _DIGEST_BYTES for digest in digests):
            raise MalformedBatch("columns.digests", f"a digest has not {_DIGEST_BYTES} bytes")
        if not self._columns.digest:
            return pa.nulls(self._leaves.count, pa.string())
        ids = read_ids("digest", self._columns.digest, self._count, len(digests) + 1)
        texts = pa.array([digest.hex() for digest in digests], pa.string())
        chosen = ids > 0
        wanted = texts.take(pa.array(ids[chosen].astype(np.int64) - 1))
        return sparse_texts(wanted, self._leaves.rows[chosen], self._leaves.count)


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
