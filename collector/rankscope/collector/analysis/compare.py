"""Comparing two sides: everything that the reports show, and the first divergence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from rich.progress import Progress

from . import advice, flow, operations, origin
from .elementwise import Errors, compare_tensors
from .figures import Bools, Figures, Hard, figures
from .finding import First
from .flow_rows import FlowRows, flow_rows
from .noise import Noise, measure
from .pairing import (
    Ints,
    Names,
    Pairs,
    Texts,
    Unit,
    distinct_units,
    pair,
    reclassed,
    shapes_as_text,
    shifted,
    texts,
    unit_of,
    units,
)
from .sides import AnalysisError, Side


@dataclass(frozen=True)
class Options:
    """How two sides are compared."""

    ranks: Mapping[int, int] | None = None  # places of A to places of B
    names: Mapping[str, str] = field(default_factory=dict)  # parts of A's names to parts of B's
    fuzzy: bool = False
    equal_nan: bool = True


DEFAULTS = Options()


@dataclass(frozen=True)
class View:
    """Pairs of leaves and what is known about them."""

    figures: Figures
    rows: FlowRows
    noise: Noise
    bad: Bools


@dataclass(frozen=True)
class Comparison:
    """Two sides, compared. `view` pairs records by their names, which is what tables show."""

    a: Side
    b: Side
    options: Options
    units: list[Unit]
    view: View
    first: First | None
    advice: list[str]
    candidates: dict[int, First]  # by unit
    notes: list[str]
    origins: list[int]  # rows of `view` where ranks diverge first


def compare(
    a: Side, b: Side, options: Options = DEFAULTS, progress: Progress | None = None
) -> Comparison:
    """Compare two sides; AnalysisError when nothing of them belongs together. `progress` shows how
    far the reading of whole tensors is."""
    pairs_of_units, notes = units(distinct_units(a.table), distinct_units(b.table), options.ranks)
    if not any(unit.a and unit.b for unit in pairs_of_units):
        raise AnalysisError(
            f"{a.name} and {b.name} have no step and rank in common: "
            f"{_span(a)} in A, {_span(b)} in B"
        )
    keys = _Keys(a.table, b.table, pairs_of_units, options)
    same = _same_setup(a, b)
    tensors = _Tensors(a, b, progress)
    by_name = _view(a, b, keys.pairs(keys.record), options, same, tensors)
    aligned = reclassed(keys.unit, keys.record)
    moved = shifted(keys.unit, aligned, keys.shape(), options.fuzzy)
    search = by_name
    if moved is not None:
        aligned = Texts(aligned.a, moved, aligned.names)
    if not np.array_equal(aligned.b, keys.record.b):
        search = _view(a, b, keys.pairs(aligned), options, same, tensors)
        if options.fuzzy:
            by_name = search
    found = _search(search, pairs_of_units)
    first, ranks = found.origin
    named = None
    if first is not None:
        named = _first(search, first.row, first.step, ranks)
    notes = [*_notes(search.noise, moved is not None, a, b), *notes]
    words = [] if first is None else advice.words(search.figures, search.rows, first.row)
    each = {}
    for one in found.candidates:
        unit = pairs_of_units[one.unit]
        each[one.unit] = _first(search, one.row, unit.step, [unit.rank])
    origins = [one.row for one in found.candidates] if search is by_name else []
    return Comparison(a, b, options, pairs_of_units, by_name, named, words, each, notes, origins)


class _Keys:
    """The columns by which rows are paired."""

    def __init__(
        self, a: pa.Table, b: pa.Table, all_units: Sequence[Unit], options: Options
    ) -> None:
        self._tables = (a, b)
        numbers_a = {u.a: i for i, u in enumerate(all_units) if u.a}
        numbers_b = {u.b: i for i, u in enumerate(all_units) if u.b}
        self.unit = Texts(unit_of(a, numbers_a), unit_of(b, numbers_b), [])
        rename = Names(options.names).of_b if options.names else None
        self.record = texts(a, b, "record", rename)
        self.part, self.path = texts(a, b, "part"), texts(a, b, "path")

    def shape(self) -> Texts:
        """Shapes as texts: calls of one API are told apart by them."""
        a, b = self._tables
        return texts(shapes_as_text(a), shapes_as_text(b), "shape")

    def pairs(self, record: Texts) -> Pairs:
        return pair(self.unit, record, self.part, self.path)


class _Tensors:
    """Errors of whole tensors, each pair read once."""

    def __init__(self, a: Side, b: Side, progress: Progress | None) -> None:
        self._a, self._b, self._progress = a, b, progress
        self._known: dict[tuple[int, int], Errors] = {}
        self._captured = [
            side.table["data_name"].combine_chunks().is_valid().to_numpy(zero_copy_only=False)
            for side in (a, b)
        ]

    def of(self, pairs: Pairs) -> Mapping[tuple[int, int], Errors]:
        """Errors of the pairs of which both sides captured the tensor."""
        x, y = self._captured
        if not x.any() or not y.any():
            return {}
        both = np.flatnonzero((pairs.a >= 0) & (pairs.b >= 0))
        both = both[x[pairs.a[both]] & y[pairs.b[both]]]
        keys = zip(pairs.a[both].tolist(), pairs.b[both].tolist(), strict=True)
        lacking = [key for key in keys if key not in self._known]
        self._known |= compare_tensors(self._a, self._b, lacking, self._progress)
        return self._known


def _view(
    a: Side, b: Side, pairs: Pairs, options: Options, same_setup: bool, tensors: _Tensors
) -> View:
    numbers = figures(a.table, b.table, pairs, options.equal_nan, tensors.of(pairs))
    rows = flow_rows(a.table, b.table, pairs)
    noise = measure(numbers, rows, same_setup)
    return View(numbers, rows, noise, flow.bad_rows(numbers, rows, noise))


@dataclass(frozen=True)
class _Found:
    candidates: list[flow.Candidate]
    origin: tuple[origin.Lead | None, list[int]]


def _search(view: View, all_units: Sequence[Unit]) -> _Found:
    candidates = flow.candidates(view.figures, view.rows, view.bad)
    leads = [_lead(view, one, all_units[one.unit]) for one in candidates]
    numbers = {(unit.step, unit.rank): i for i, unit in enumerate(all_units)}
    pairs = view.figures.pairs

    def position_of(lead: origin.Lead, record: str) -> int | None:
        unit = numbers[lead.step, lead.rank]
        start, end = np.searchsorted(pairs.unit, [unit, unit + 1])
        there = [i for i, name in enumerate(pairs.names) if name == record]
        if not there:
            return None
        at = np.flatnonzero(pairs.record[start:end] == there[0])
        return int(at[0]) if len(at) else None

    return _Found(candidates, origin.origin(leads, position_of))


def _lead(view: View, candidate: flow.Candidate, unit: Unit) -> origin.Lead:
    figures_, rows, row = view.figures, view.rows, candidate.row
    record = rows.names[figures_.pairs.record[row]]
    start, end = np.searchsorted(figures_.pairs.unit, [candidate.unit, candidate.unit + 1])
    own = np.arange(start, end)[figures_.pairs.record[start:end] == figures_.pairs.record[row]]
    missing = bool(figures_.hard[row] & (Hard.ONLY_A | Hard.ONLY_B))
    received = (
        operations.is_communication(record)
        and not rows.is_input[row]
        and not missing
        and not view.bad[own[rows.is_input[own]]].any()
    )
    values = [figures_.values[code] for code in figures_.value[0][own].tolist() if code >= 0]
    return origin.Lead(
        unit.step, unit.rank, record, candidate.position, received, origin.members(values), row
    )


def _first(view: View, row: int, step: int, ranks: list[int]) -> First:
    name = view.rows.names[view.figures.pairs.record[row]]
    why = advice.why(view.figures, view.rows, view.bad, row)
    return First(step, ranks, name.replace("*", ""), view.rows.argument(row), why)


def _same_setup(a: Side, b: Side) -> bool:
    """Both sides say that they ran with the same versions on the same kind of device."""

    def setup(side: Side) -> set[Any]:
        return {
            (p.get("versions"), str(p.get("device") or "").split(":")[0])
            for p in side.processes.values()
        }

    return bool(a.processes) and bool(b.processes) and len(setup(a) | setup(b)) == 1


def _notes(noise: Noise, moved: bool, a: Side, b: Side) -> list[str]:
    notes = []
    if noise.precision_differs:
        notes.append("the sides differ in dtype throughout: dtypes are not counted as differences")
    if not noise.deterministic:
        notes.append(
            "the sides differ by rounding throughout: only jumps of the error count as divergence"
        )
    if moved:
        notes.append("an API was called a different number of times: calls are aligned by order")
    if a.summary_mode != b.summary_mode:
        notes.append(f"A has summary_mode {a.summary_mode}, B {b.summary_mode}")
    return notes


def _span(side: Side) -> str:
    pairs = distinct_units(side.table)
    steps, places = sorted({s for s, _ in pairs}), sorted({p for _, p in pairs})
    return f"steps {steps[:5]} and ranks {places[:5]}" if pairs else "nothing"


def row_unit(view: View) -> Ints:
    """The unit of each row."""
    return view.figures.pairs.unit
