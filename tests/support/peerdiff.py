"""A dump of ours beside one of msProbe's of the same script: equal, or different by a known rule.

Rows are compared one by one: a *value* row for each value of a record, an *order* row for each
record's place, a *tree* row for each entry of construct.json, a *stack* row for each record's
group in stack.json. A row that is not equal must fit one of `RULES`, which stand in
docs/differences.md with their reasons; what fits none is unexplained.
"""

import json
import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from dumpdiff import _folders, _mirrored, _number, _same

EPSILON = {"torch.bfloat16": 2.0**-7, "torch.float16": 2.0**-10}
LARGEST = {"torch.float16": 65504.0}
STATISTICS = ("Max", "Min", "Mean", "Norm")
MISSING = "missing"


@dataclass
class Row:
    """One thing that both dumps say, or one of them: `MISSING` where it says nothing."""

    kind: str
    record: str
    path: tuple
    peer: object
    ours: object
    rule: object = None


@dataclass
class Report:
    records: int = 0
    equal: int = 0
    by_rule: Counter = field(default_factory=Counter)
    unexplained: list = field(default_factory=list)


@dataclass
class Dump:
    """The documents of one process and step."""

    data: dict
    tree: dict
    stacks: dict
    frames: dict
    level: str

    @classmethod
    def read(cls, folder):
        head = json.loads((folder / "dump.json").read_text())
        tree = json.loads((folder / "construct.json").read_text())
        groups = json.loads((folder / "stack.json").read_text())
        stacks = {name: tuple(sorted(names)) for names, _ in groups.values() for name in names}
        frames = {name: stack for names, stack in groups.values() for name in names}
        return cls(head["data"], tree, stacks, frames, head["level"])


def compare(peer, ours, rules, changed=False):
    """A Report on two folders with step{N}/. `changed`: msProbe changed results of this run."""
    report = Report()
    left, right = _folders(Path(peer)), _folders(Path(ours))
    assert left
    assert left.keys() == right.keys(), (sorted(left), sorted(right))
    for name in sorted(left):
        a, b = Dump.read(left[name]), Dump.read(right[name])
        report.records += len(b.data)
        context = Context(a, b, changed)
        for row, equal in rows(a, b, context, rules):
            if equal:
                report.equal += 1
                continue
            rule = row.rule or next((r for r in rules if r.fits(row, context)), None)
            if rule is None:
                report.unexplained.append(f"{name} {describe(row)}")
            else:
                report.by_rule[rule.name] += 1
    return report


@dataclass(eq=False)
class Context:
    peer: Dump
    ours: Dump
    changed: bool

    @property
    def both(self):
        return (self.peer, self.ours)


def describe(row):
    where = ".".join(map(str, (row.record, *row.path)))
    return f"{row.kind} {where}: {_short(row.peer)} != {_short(row.ours)}"


def _short(value):
    return str(value)[:120]


def rows(a, b, context, rules):
    for record in {**a.data, **b.data}:
        if record not in b.data or record not in a.data:
            there = [MISSING if record not in x.data else "there" for x in (a, b)]
            yield Row("record", record, (), *there), False
            continue
        flat, other = dict(leaves(a.data[record])), dict(leaves(b.data[record]))
        for path in {**flat, **other}:
            row = Row("value", record, path, flat.get(path, MISSING), other.get(path, MISSING))
            yield row, MISSING not in (row.peer, row.ours) and same_leaf(row.peer, row.ours)
        fields = [list(x.data[record]) for x in (a, b)]
        if fields[0] != fields[1]:
            yield Row("fields", record, (), *fields), False
    yield from _order(a, b, context, rules)
    for record in {**a.tree, **b.tree}:
        one, two = (x.tree.get(record, MISSING) for x in (a, b))
        if (record in a.data) == (record in b.data):
            yield Row("tree", record, (), one, two), one == two or two == _mirrored(a.tree, record)
    common = a.data.keys() & b.data.keys()
    for record in common & (a.stacks.keys() | b.stacks.keys()):
        one, two = (tuple(n for n in x.stacks.get(record, ()) if n in common) for x in (a, b))
        yield Row("stack", record, (), one, two), one == two


def _order(a, b, context, rules):
    """Records that no rule lets move stand in the same order. Of all, those are in their place that
    belong to a longest run which both have.
    """
    left, right = [n for n in a.data if n in b.data], [n for n in b.data if n in a.data]
    if left == right:
        for name in right:
            yield Row("order", name, (), "", ""), True
        return
    free = {n: r for n in right if (r := next((r for r in rules if r.moves(n, context)), None))}
    fixed = [[n for n in names if n not in free] for names in (left, right)]
    in_place = _in_place(left, right)
    strict = _in_place(*fixed)
    for index, name in enumerate(right):
        row = Row(
            "order", name, (), f"after {left[left.index(name) - 1]}", f"after {right[index - 1]}"
        )
        row.rule = free.get(name)
        yield row, name in (in_place if name in free else strict)


def _in_place(left, right):
    places = {name: index for index, name in enumerate(left)}
    stay = longest_increasing([places[n] for n in right])
    return {right[index] for index in stay}


def longest_increasing(values):
    """Indices of a longest increasing subsequence."""
    tails, at, previous = [], [], [None] * len(values)
    for index, value in enumerate(values):
        place = bisect_left(tails, value)
        previous[index] = at[place - 1] if place else None
        tails[place : place + 1] = [value]
        at[place : place + 1] = [index]
    found, index = set(), at[-1] if at else None
    while index is not None:
        found.add(index)
        index = previous[index]
    return found


def leaves(value, path=()):
    """(path, leaf): entries with a type, scalars, null and empty containers."""
    if isinstance(value, dict) and value and not isinstance(value.get("type"), str):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def same_leaf(a, b):
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return _same(_number(a), _number(b))
    if list(a) != list(b):
        return False
    return all(
        (close(key, a, b) if "dtype" in a and key in STATISTICS else _same_deep(a[key], b[key]))
        for key in a
    )


def _same_deep(a, b):
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_deep, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(_same_deep(a[k], b[k]) for k in a)
    return _same(_number(a), _number(b))


def close(key, a, b):
    """Whether a statistic of two tensor entries agrees within the rounding of its own type."""
    x, y, dtype = _number(a[key]), _number(b[key]), a["dtype"]
    if _same(x, y):
        return True
    if x is None or y is None or key in ("Max", "Min") or not math.isfinite(y):
        return False
    size = max(1, math.prod(a["shape"]))
    largest = max(abs(_number(b[k])) for k in ("Max", "Min"))
    if not math.isfinite(x):
        # msProbe's sum, of squares for the norm, left the range of the type.
        limit = LARGEST.get(dtype, 3.4e38)
        return largest * size * 1.001 >= (math.sqrt(limit) if key == "Norm" else limit)
    scale = max(abs(x), abs(y))
    if key == "Mean" and b["Norm"] is not None:
        # Sums cancel: the error is that of the elements, not of the mean.
        scale = max(scale, _number(b["Norm"]) / math.sqrt(size))
    elif largest < 2.0**-60:
        return True  # squares of the elements are below the smallest float32
    return abs(x - y) <= max(2e-6, EPSILON.get(dtype, 0.0)) * scale
