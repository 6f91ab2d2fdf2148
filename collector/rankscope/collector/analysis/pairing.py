"""Which leaves of two sides belong together.

Steps are paired by number, places (ranks) by number or as the caller says, records by name, leaves
by their part and path. Where the two sides called an API a different number of times, call numbers
are shifted: then calls are aligned by their order, so that one call too many does not make all
later ones look wrong.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
_MODULE_CALL = re.compile(
    r"^Module\.(?P<path>.+)\.[^.]+\.(?P<call>(?:forward|backward|parameters_grad)\.\d+)$"
)
_API = re.compile(r"^(?P<base>.+)\.(?P<number>\d+)\.(?P<direction>forward|backward)$")


@dataclass(frozen=True)
class Unit:
    """A step and place of A beside those of B; None where a side has none."""

    step: int
    a: tuple[int, int] | None
    b: tuple[int, int] | None

    @property
    def rank(self) -> int:
        """The place that names the unit: A's, else B's."""
        one = self.a or self.b
        assert one is not None
        return one[1]


@dataclass(frozen=True)
class Texts:
    """A text column of both sides as numbers: `names[code]`, -1 for null."""

    a: Ints
    b: Ints
    names: list[str]


@dataclass(frozen=True)
class Pairs:
    """Rows of A and B that belong together: `a[i]` and `b[i]` are row numbers, -1 where a side has
    no such row. In A's order; rows that only B has stand behind what precedes them in B."""

    a: Ints
    b: Ints
    unit: Ints
    record: Ints  # code of the record's name, as A calls it
    names: list[str]


@dataclass
class Names:
    """How B's records are called in A: `renamed` maps parts of A's names to parts of B's."""

    renamed: Mapping[str, str] = field(default_factory=dict)

    def of_b(self, name: str) -> str:
        """The name that A gives to a record of B."""
        for ours, theirs in self.renamed.items():
            name = re.sub(rf"(?<![^.]){re.escape(theirs)}(?![^.])", ours.replace("\\", r"\\"), name)
        return name


def units(
    a: Sequence[tuple[int, int]],
    b: Sequence[tuple[int, int]],
    ranks: Mapping[int, int] | None = None,
) -> tuple[list[Unit], list[str]]:
    """Pairs of (step, place), and notes on what has no partner.

    Two sides with one step each are paired whatever its number, and so are two with one place each.
    A step that a rank has on one side only is a unit without partner; a rank that only one side has
    is noted and left out. `ranks` maps places of A to those of B.
    """
    notes = []
    steps_a, steps_b = sorted({s for s, _ in a}), sorted({s for s, _ in b})
    places_a, places_b = sorted({p for _, p in a}), sorted({p for _, p in b})
    shift = steps_b[0] - steps_a[0] if len(steps_a) == len(steps_b) == 1 else 0
    if shift:
        notes.append(f"step {steps_a[0]} of A is compared with step {steps_b[0]} of B")
    if ranks is None:
        one_each = len(places_a) == len(places_b) == 1
        ranks = dict(zip(places_a, places_b, strict=True)) if one_each else {p: p for p in places_a}
    missing = [p for p in places_a if ranks.get(p) not in places_b]
    extra = [p for p in places_b if p not in {ranks.get(q) for q in places_a}]
    if missing:
        notes.append(f"ranks only in A: {', '.join(map(str, missing))}")
    if extra:
        notes.append(f"ranks only in B: {', '.join(map(str, extra))}")
    there_a, there_b = set(a), set(b)
    back = {ranks[p]: p for p in places_a if p not in missing}
    result = []
    for step, place in sorted(there_a):
        if place in missing:
            continue
        other = (step + shift, ranks[place])
        result.append(Unit(step, (step, place), other if other in there_b else None))
    for step, place in sorted(there_b):
        if place in back and (step - shift, back[place]) not in there_a:
            result.append(Unit(step - shift, None, (step, place)))
    return sorted(result, key=lambda u: (u.step, u.rank)), notes


def texts(
    a: pa.Table, b: pa.Table, column: str, rename: Callable[[str], str] | None = None
) -> Texts:
    """The column of both tables over one list of names; `rename` is applied to B's."""
    codes_a, names_a = _coded(a[column])
    codes_b, names_b = _coded(b[column])
    if rename is not None:
        names_b = [rename(name) for name in names_b]
    numbers: dict[str, int] = {}
    for name in (*names_a, *names_b):
        numbers.setdefault(name, len(numbers))
    return Texts(_mapped(codes_a, names_a, numbers), _mapped(codes_b, names_b, numbers), [*numbers])


def unit_of(table: pa.Table, numbers: Mapping[tuple[int, int], int]) -> Ints:
    """The unit of each row, -1 where it belongs to none."""
    step, place = table["step"].to_numpy(), table["place"].to_numpy()
    if not len(step):
        return np.zeros(0, np.int64)
    keys, inverse = np.unique(np.stack([step, place]), axis=1, return_inverse=True)
    found = [numbers.get((int(s), int(p)), -1) for s, p in keys.T]
    return np.array(found, np.int64)[inverse.ravel()]


def pair(unit: Texts, record: Texts, part: Texts, path: Texts) -> Pairs:
    """Rows with equal unit, record, part and path. Of several equal rows of a side the last counts:
    an asynchronous call is measured again when it is done. `unit` has no names."""
    key_a, key_b = (
        _keys(*codes, sizes=(len(record.names), len(part.names), len(path.names)))
        for codes in (
            (unit.a, record.a, part.a, path.a),
            (unit.b, record.b, part.b, path.b),
        )
    )
    rows_a, rows_b = _last_of_each(key_a, unit.a), _last_of_each(key_b, unit.b)
    order = rows_b[np.argsort(key_b[rows_b], kind="stable")]
    sorted_keys = key_b[order]
    at = np.searchsorted(sorted_keys, key_a[rows_a])
    at_clipped = np.minimum(at, max(len(order) - 1, 0))
    hit = np.zeros(len(rows_a), bool)
    if len(order):
        hit = sorted_keys[at_clipped] == key_a[rows_a]
    partner = np.where(hit, order[at_clipped] if len(order) else -1, -1)
    only_b = np.setdiff1d(rows_b, partner[hit], assume_unique=False)
    return _merged(rows_a, partner, only_b, unit, record)


def _merged(rows_a: Ints, partner: Ints, only_b: Ints, unit: Texts, record: Texts) -> Pairs:
    """A's rows in order. Rows that only B has stand behind their predecessor in B and what only A
    has there, before the next common row."""
    position = np.full(len(unit.b), -1, np.int64)
    common = np.flatnonzero(partner >= 0)
    position[partner[common]] = common
    position = np.maximum.accumulate(position) if len(position) else position
    at_b = position[only_b] if len(only_b) else np.zeros(0, np.int64)
    units_a = unit.a[rows_a]
    # What only B has before the first common row of a unit belongs to that unit all the same.
    starts = np.searchsorted(units_a, unit.b[only_b], side="left")
    ends = np.searchsorted(units_a, unit.b[only_b], side="right")
    at_b = np.maximum(at_b, starts - 1)
    behind = np.append(common, len(rows_a))[np.searchsorted(common, at_b, side="right")]
    place = np.concatenate([np.arange(len(rows_a), dtype=float), np.minimum(behind, ends) - 0.5])
    a = np.concatenate([rows_a, np.full(len(only_b), -1, np.int64)])
    b = np.concatenate([partner, only_b])
    units_all = np.concatenate([units_a, unit.b[only_b]])
    names_all = np.concatenate([record.a[rows_a], record.b[only_b]])
    order = np.lexsort((place, units_all))
    return Pairs(a[order], b[order], units_all[order], names_all[order], record.names)


def _keys(unit: Ints, record: Ints, part: Ints, path: Ints, sizes: Sequence[int]) -> Ints:
    records, parts, paths = sizes
    return ((unit * (records + 1) + record) * (parts + 1) + part) * (paths + 1) + path


def _last_of_each(keys: Ints, unit: Ints) -> Ints:
    """Row numbers, ascending, of the last row of each key that belongs to a unit."""
    _, first_from_behind = np.unique(keys[::-1], return_index=True)
    rows = np.sort(len(keys) - 1 - first_from_behind)
    return rows[unit[rows] >= 0]


def _coded(column: pa.ChunkedArray) -> tuple[Ints, list[str]]:
    encoded = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    elif isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, encoded.dictionary.to_pylist()


def _mapped(codes: Ints, names: Sequence[str], numbers: Mapping[str, int]) -> Ints:
    table = np.array([numbers[name] for name in names] + [-1], np.int64)
    return table[codes]


# ----------------------------------------------------------------------- modules of another class


def reclassed(unit: Texts, record: Texts) -> Texts:
    """The records, where a module of B that has another class than A's counts as the same module:
    Module.act.ReLU.forward.0 as Module.act.GELU.forward.0."""
    modules: dict[tuple[str, str], str] = {}
    here = set(np.unique(record.a[unit.a >= 0]).tolist())
    for code in here:
        if match := _MODULE_CALL.match(record.names[code]):
            modules[match["path"], match["call"]] = record.names[code]
    numbers = {name: code for code, name in enumerate(record.names)}
    table = np.arange(len(record.names) + 1)
    for code in np.unique(record.b[unit.b >= 0]).tolist():
        match = None if code in here else _MODULE_CALL.match(record.names[code])
        other = modules.get((match["path"], match["call"])) if match else None
        if other is not None:
            table[code] = numbers[other]
    return Texts(record.a, table[record.b], record.names)


# ------------------------------------------------------------------------- calls that are shifted


def shifted(unit: Texts, record: Texts, shape: Texts, loosely: bool = False) -> Ints | None:
    """B's record codes after calls were aligned, or None where nothing is shifted.

    Calls are alike that have one name and, in their first row, one `shape`. `loosely` also takes an
    API for the same whatever its prefix (Functional.relu, Torch.relu). New names may have to be
    added: they are appended to `record.names`.
    """
    parsed = [_parse(name, loosely) for name in record.names]
    if not loosely and _same_calls(unit, record, parsed):
        return None
    codes = {name: i for i, name in enumerate(record.names)}
    result = record.b.copy()
    known: dict[Any, dict[int, int]] = {}
    for number in np.unique(unit.a[unit.a >= 0]).tolist():
        rows_a, rows_b = np.flatnonzero(unit.a == number), np.flatnonzero(unit.b == number)
        calls_a = _calls(record.a[rows_a], shape.a[rows_a], parsed)
        calls_b = _calls(record.b[rows_b], shape.b[rows_b], parsed)
        key = (tuple(calls_a.items()), tuple(calls_b.items()))
        if key not in known:
            known[key] = _alignment(calls_a, calls_b, record.names, parsed, codes)
        table = np.arange(max(len(record.names), len(codes)))
        for code, new in known[key].items():
            table[code] = new
        result[rows_b] = table[record.b[rows_b]]
    record.names.extend(list(codes)[len(record.names) :])
    return result


def shapes_as_text(table: pa.Table) -> pa.Table:
    """One column `shape`: "2,3"."""
    column = table["shape"].combine_chunks()
    words = pa.ListArray.from_arrays(column.offsets, column.values.cast(pa.string()))
    joined = pc.binary_join(words, ",")
    return pa.table({"shape": pc.if_else(column.is_valid(), joined, None)})


def _parse(name: str, loosely: bool) -> tuple[str, int] | None:
    """What an API call is a call of, and its number; None for other records."""
    match = None if name.startswith("Module.") else _API.match(name)
    if match is None:
        return None
    base = match["base"].rsplit(".", 1)[-1].strip("_") if loosely else match["base"]
    return base, int(match["number"])


def _same_calls(unit: Texts, record: Texts, parsed: Sequence[object]) -> bool:
    """Whether both sides have the same API records in all units."""
    is_api = np.array([one is not None for one in parsed], bool)

    def distinct(units: Ints, records: Ints) -> Any:
        kept = (units >= 0) & is_api[records]
        return np.unique(np.stack([units[kept], records[kept]]), axis=1)

    a, b = distinct(unit.a, record.a), distinct(unit.b, record.b)
    return a.shape == b.shape and bool(np.all(a == b))


def _calls(records: Ints, shapes: Ints, parsed: Sequence[tuple[str, int] | None]) -> dict[int, int]:
    """API records in the order of their first row, with the shape there."""
    codes, first = np.unique(records, return_index=True)
    order = np.argsort(first)
    seen = zip(codes[order].tolist(), shapes[first[order]].tolist(), strict=True)
    return {code: shape for code, shape in seen if parsed[code] is not None}


def _alignment(
    calls_a: Mapping[int, int],
    calls_b: Mapping[int, int],
    names: Sequence[str],
    parsed: Sequence[tuple[str, int] | None],
    codes: dict[str, int],
) -> dict[int, int]:
    """New code of each record of B; what A has not becomes a name of its own."""
    forward_a = [c for c in calls_a if names[c].endswith(".forward")]
    forward_b = [c for c in calls_b if names[c].endswith(".forward")]
    partner: dict[str, str] = {}
    for at_a, at_b, size in _blocks(
        [(_base(c, parsed), calls_a[c]) for c in forward_a],
        [(_base(c, parsed), calls_b[c]) for c in forward_b],
    ):
        for i in range(size):
            partner[_stem(names[forward_b[at_b + i]])] = _stem(names[forward_a[at_a + i]])
    taken = {_stem(names[c]) for c in forward_a}
    result = {}
    for code in calls_b:
        stem, direction = names[code].rsplit(".", 1)
        new = partner.get(stem)
        if new is None:
            # Its own name may be that of another call of A.
            new = f"{stem}*" if stem in taken else stem
        if new != stem:
            result[code] = codes.setdefault(f"{new}.{direction}", len(codes))
    return result


def _blocks(a: Sequence[Any], b: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Equal stretches of two lists: (start in a, start in b, length).

    What they begin and end with in common is taken first: models repeat their layers, and the
    longest common stretch alone may well be a layer too far.
    """
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    middle_a, middle_b = a[head : len(a) - tail], b[head : len(b) - tail]
    blocks = SequenceMatcher(None, middle_a, middle_b, False).get_matching_blocks()
    inner = [(head + m.a, head + m.b, m.size) for m in blocks if m.size]
    return [(0, 0, head), *inner, (len(a) - tail, len(b) - tail, tail)]


def _base(code: int, parsed: Sequence[tuple[str, int] | None]) -> str:
    found = parsed[code]
    assert found is not None
    return found[0]


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


def distinct_units(table: pa.Table) -> list[tuple[int, int]]:
    """The (step, place) pairs of a table."""
    if not table.num_rows:
        return []
    pairs = np.unique(np.stack([table["step"].to_numpy(), table["place"].to_numpy()]), axis=1)
    return [(int(step), int(place)) for step, place in pairs.T]


def is_null(table: pa.Table, column: str) -> npt.NDArray[np.bool_]:
    """Where a column is null."""
    mask: npt.NDArray[np.bool_] = pc.is_null(table[column]).to_numpy(zero_copy_only=False)
    return mask
