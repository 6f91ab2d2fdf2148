"""The first divergence of each step and rank, by data flow.

Rows are walked in the order in which the values were seen. The first that counts as different is
where the divergence starts: either a result whose inputs agree, or a value that no recorded
operation made (data, a parameter, an argument of the call). A few cases need a second look:

- A module takes its input before the records inside it. The innermost record that takes the
  differing value is named.
- Gradients of parameters arrive before the module's own backward record; where the gradient that
  came into the module differs already, that record is named.
- Masks may differ as they like as long as nothing comes of it. When the one run makes NaN from
  them, the record that made the NaN is named.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from . import operations
from .figures import Bools, Figures, Floats, Hard
from .flow_rows import FlowRows
from .noise import JUMP, LARGEST_NOISE, SAME, Noise

#: An error that grew by itself, without a jump, counts from here on.
DRIFTED = 0.3


@dataclass(frozen=True)
class Candidate:
    """Where a unit diverges first: a row of the pairs."""

    unit: int
    row: int
    position: int  # rows of the unit before it


def bad_rows(figures: Figures, rows: FlowRows, noise: Noise) -> Bools:
    """The rows that count as different."""
    counted = int(~Hard.CONTENT) & (-1 if not noise.precision_differs else ~int(Hard.DTYPE))
    hard = figures.hard & counted != 0
    if noise.deterministic:
        content = (figures.hard & Hard.CONTENT > 0) & (figures.error <= SAME)
        bad = hard | content | (figures.error > noise.floor)
    else:
        bad = hard | _jumps(figures, rows, noise)
    result: Bools = bad & ~rows.ignored
    return result


def candidates(figures: Figures, rows: FlowRows, bad: Bools) -> list[Candidate]:
    """The first divergence of each unit that has one, by unit."""
    pairs = figures.pairs
    places = np.flatnonzero(bad)
    units, first = np.unique(pairs.unit[places], return_index=True)
    starts = np.searchsorted(pairs.unit, units, side="left")
    ends = np.searchsorted(pairs.unit, units, side="right")
    result = []
    for unit, at, start, end in zip(
        units.tolist(), first.tolist(), starts.tolist(), ends.tolist(), strict=True
    ):
        look = _Look(figures, rows, bad, start, end)
        row = look.settled(int(places[at]))
        result.append(Candidate(unit, row, row - start))
    return result


class _Look:
    """A closer look at one unit, the rows from `start` to `end`."""

    def __init__(self, figures: Figures, rows: FlowRows, bad: Bools, start: int, end: int) -> None:
        self.figures, self.rows = figures, rows
        self.start, self.end = start, end
        self.bad = np.flatnonzero(bad[start:end]) + start

    def settled(self, row: int) -> int:
        """The row that is to be named when `row` is the first that is bad."""
        row = self._that_matters(row)
        row = self._maker_of_nan(row)
        row = self._gradient_that_came_in(row)
        around = self._around(row)
        if around is not None:
            return around
        return self._telling(self._innermost(row))

    def _that_matters(self, row: int) -> int:
        """Past records that only one side has and that the difference does not come from."""
        common = [r for r in self.bad.tolist() if self.rows.group_common[self.rows.groups[r]]]
        lone = [
            r
            for r in self.bad[self.bad >= row].tolist()
            if not self.rows.group_common[self.rows.groups[r]]
            and self._api(r) not in operations.KEEPS_VALUES
        ]
        if not common:
            return lone[0] if lone else row
        if not lone or lone[0] > common[0]:
            return int(common[0])
        record = self.figures.pairs.record
        same = self.bad[record[self.bad] == record[common[0]]]
        flows = self.rows.is_input[same] & self.figures.is_tensor[same]
        if flows.any() or self._inside(lone[0], common[0]):
            return int(lone[0])
        return int(common[0])

    def _inside(self, row: int, other: int) -> bool:
        """Whether a row's record ran inside the module that is another row's record."""
        module = operations.module_of(self.rows.names[self.figures.pairs.record[other]])
        parent = self.rows.parent[row]
        around = operations.module_of(self.rows.names[parent]) if parent >= 0 else None
        if module is None or around is None:
            return False
        return f"{around[0]}.".startswith(f"{module[0]}.")

    def _api(self, row: int) -> str:
        return operations.api_name(self.rows.names[self.figures.pairs.record[row]])

    def _around(self, row: int) -> int | None:
        """Where a module gets its input from unrecorded code of the module around it: the result of
        that one, if its own inputs agree."""
        pairs, rows = self.figures.pairs, self.rows
        inside = operations.module_of(rows.names[pairs.record[row]])
        outer = rows.parent[row]
        if inside is None or outer < 0 or not rows.is_input[row] or self._is_parameter(row):
            return None
        own = self.bad[pairs.record[self.bad] == outer]
        if not len(own) or rows.is_input[own].any():
            return None
        return int(own[0])

    def _is_parameter(self, row: int) -> bool:
        part: str = self.rows.parts[self.rows.part[row]]
        return part == "parameters"

    def _maker_of_nan(self, row: int) -> int:
        figures, rows = self.figures, self.rows
        nan = self.bad[figures.hard[self.bad] & Hard.NAN > 0]
        made = [r for r in nan.tolist() if not rows.is_input[r]]
        if not made or not self._is_soft(row):
            return row
        maker: int = made[0]
        record = figures.pairs.record
        before = self.bad[self.bad < maker]
        if all(self._is_soft(r) or record[r] == record[maker] for r in before.tolist()):
            return maker
        return row

    def _is_soft(self, row: int) -> bool:
        name = self.rows.names[self.figures.pairs.record[row]]
        if self.figures.hard[row] & (Hard.ONLY_A | Hard.ONLY_B):
            return operations.api_name(name) in operations.MASKING
        masking = self._api(row) in operations.MASKING
        return masking or bool(self.figures.soft[row])

    def _gradient_that_came_in(self, row: int) -> int:
        name = self.rows.names[self.figures.pairs.record[row]]
        module = operations.module_of(name)
        if module is None or module[2] != "parameters_grad":
            return row
        stem = f"Module.{module[0]}.{module[1]}.backward."
        for other in self.bad.tolist():
            if not self.rows.is_input[other]:
                continue
            if self.rows.names[self.figures.pairs.record[other]].startswith(stem):
                return int(other)
        return row

    def _innermost(self, row: int) -> int:
        """Of a module's input, the place where a record inside it takes the same value."""
        pairs, rows = self.figures.pairs, self.rows
        while rows.is_input[row] and not self._is_parameter(row):
            inside = [
                other
                for other in self.bad[self.bad > row].tolist()
                if rows.parent[other] == pairs.record[row]
                and rows.is_input[other]
                and self._same_values(row, other)
            ]
            if not inside:
                return row
            row = inside[0]
        return row

    def _same_values(self, one: int, other: int) -> bool:
        figures = self.figures
        for side in (figures.a, figures.b):
            for values in side.values():
                x, y = values[one], values[other]
                if not (x == y or (np.isnan(x) and np.isnan(y))):
                    return False
        return bool(figures.hard[one] == figures.hard[other])

    def _telling(self, row: int) -> int:
        """The argument that says most: of one record, an input before what follows from it."""
        record = self.figures.pairs.record
        same = self.bad[record[self.bad] == record[row]]
        inputs = same[self.rows.is_input[same]]
        if self.rows.is_input[row] or not len(inputs):
            return row
        name = self.rows.names[record[row]]
        return int(inputs[0]) if name.startswith("Module.") else row


def _jumps(figures: Figures, rows: FlowRows, noise: Noise) -> Bools:
    """Rows whose error is far above what the record's inputs bring and what was usual before."""
    error, floor = figures.error, noise.floor
    error = error * _weight(figures, rows, noise)
    brought = np.zeros(rows.group_count)
    parameters = np.array([name == "parameters" for name in rows.parts] + [False], bool)
    # A parameter that differs is a cause of its own, not something that was brought.
    inputs = rows.is_input & ~rows.ignored & ~parameters[rows.part]
    np.maximum.at(brought, rows.groups[inputs], error[inputs])
    result = np.zeros(len(error), bool)
    unit = figures.pairs.unit
    bounds = np.flatnonzero(np.diff(unit, prepend=-1, append=-2)).tolist()
    for start, end in pairwise(bounds):
        _jumps_of_unit(error, floor, brought[rows.groups], rows, start, end, result)
    return result


def _weight(figures: Figures, rows: FlowRows, noise: Noise) -> Floats:
    """How much a row's own error says: what is tiny beside the other tensors of its record is their
    rounding, such as the gradient of a bias that cancels."""
    norm = np.fmax(np.abs(figures.a["norm"]), np.abs(figures.b["norm"]))
    norm = np.where(np.isfinite(norm) & figures.is_tensor, norm, 0.0)
    largest = np.zeros(rows.group_count)
    np.maximum.at(largest, rows.groups, norm)
    threshold = np.minimum(noise.floor, LARGEST_NOISE) * largest[rows.groups]
    return np.where(figures.is_tensor & (norm < threshold), 0.0, 1.0)


def _jumps_of_unit(
    error: Floats,
    floor: Floats,
    brought: Floats,
    rows: FlowRows,
    start: int,
    end: int,
    result: Bools,
) -> None:
    usual = 0.0
    columns = (error, floor, brought, rows.is_input, rows.ignored)
    walked = zip(*(column[start:end].tolist() for column in columns), strict=True)
    for row, (off, least, arrived, is_input, ignored) in enumerate(walked, start):
        if off == 0.0 or ignored:
            continue
        known = usual if is_input else max(usual, arrived)
        if off > max(least, JUMP * known) or off > max(DRIFTED, JUMP * least):
            result[row] = True
        else:
            usual = max(usual, off)
