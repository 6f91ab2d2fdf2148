"""The rows of one side as arrays, for analyses that look at one run."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from . import operations
from .figures import Bools, Figures, Floats, figures
from .flow_rows import FlowRows, flow_rows
from .pairing import Ints, Pairs, Unit, distinct_units, pair, texts, unit_of
from .pairing import Texts as Texts


@dataclass(frozen=True)
class Leaves:
    """Rows in order; of a leaf that was measured twice the later one."""

    table: pa.Table
    units: list[Unit]
    figures: Figures
    rows: FlowRows

    @property
    def pairs(self) -> Pairs:
        """The rows, each paired with itself."""
        return self.figures.pairs

    def column(self, name: str) -> Floats:
        """A number column of the rows, NaN for null."""
        column = self.table[name].combine_chunks().cast(pa.float64()).fill_null(np.nan)
        values: Floats = column.to_numpy(zero_copy_only=False)[self.pairs.a]
        return values

    @cached_property
    def shapes(self) -> list[list[int] | None]:
        """Of each row."""
        shapes: list[list[int] | None] = (
            self.table["shape"].take(pa.array(self.pairs.a)).to_pylist()
        )
        return shapes

    @cached_property
    def contents(self) -> list[str | None]:
        """Digest or checksum of each row, None where there is none."""
        name = "digest" if self.table["digest"].null_count < self.table.num_rows else "checksum"
        contents: list[str | None] = self.table[name].take(pa.array(self.pairs.a)).to_pylist()
        return contents

    @cached_property
    def api(self) -> list[str]:
        """The short name of each record, by record code."""
        return [operations.api_name(name) for name in self.pairs.names]

    @cached_property
    def start(self) -> Ints:
        """First row of each unit, and the end."""
        starts: Ints = np.searchsorted(self.pairs.unit, np.arange(len(self.units) + 1))
        return starts

    def name(self, row: int) -> str:
        """The record of a row."""
        name: str = self.pairs.names[self.pairs.record[row]]
        return name

    def same_record(self, row: int) -> Ints:
        """Rows of the same record, step and rank."""
        unit = int(self.pairs.unit[row])
        start, end = self.start[unit], self.start[unit + 1]
        own: Ints = np.flatnonzero(self.pairs.record[start:end] == self.pairs.record[row]) + start
        return own

    def position(self, row: int) -> int:
        """Rows of its step and rank before it."""
        return int(row - self.start[self.pairs.unit[row]])

    def with_names(self, names: set[str]) -> Bools:
        """Rows of APIs with such a short name."""
        wanted = np.array([name in names for name in self.api], bool)
        chosen: Bools = wanted[self.pairs.record]
        return chosen


def leaves(table: pa.Table) -> Leaves:
    """The rows of a side's table."""
    all_units = [Unit(step, (step, place), (step, place)) for step, place in distinct_units(table)]
    numbers = {unit.a: number for number, unit in enumerate(all_units) if unit.a}
    number = unit_of(table, numbers)
    unit = Texts(number, number, [])
    record, part, path = (texts(table, table, name) for name in ("record", "part", "path"))
    pairs = pair(unit, record, part, path)
    return Leaves(table, all_units, figures(table, table, pairs), flow_rows(table, table, pairs))
