"""What the search for the first divergence knows about each pair of leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from . import operations
from .figures import Bools
from .pairing import Ints, Pairs, texts

_INPUT_PARTS = ("input_args", "input_kwargs", "input", "parameters")


@dataclass(frozen=True)
class FlowRows:
    """One row a pair. A group is one record of one unit."""

    groups: Ints
    group_count: int
    group_rounds: Bools  # the operation's result depends on the machine
    group_contains: Bools  # other records ran inside of it
    group_common: Bools  # both sides have the record
    is_input: Bools  # parameters of a module count as its inputs
    ignored: Bools  # what stands there means nothing
    parent: Ints  # code of the record it ran inside of, -1 at the top
    parts: Sequence[str]
    part: Ints
    paths: Sequence[str]
    path: Ints
    names: Sequence[str]

    def argument(self, row: int) -> str:
        """The leaf's part and path: "input_args.0"."""
        path = self.paths[self.path[row]] if self.path[row] >= 0 else ""
        return f"{self.parts[self.part[row]]}.{path}" if path else self.parts[self.part[row]]


def flow_rows(a: pa.Table, b: pa.Table, pairs: Pairs) -> FlowRows:
    """Read what the two sides say about the rows; A's word counts where both have one."""
    part, path, parent = (texts(a, b, name) for name in ("part", "path", "parent"))
    parts, paths, parents = (_either(t.a, t.b, pairs) for t in (part, path, parent))
    key = pairs.unit * (len(pairs.names) + 1) + pairs.record
    unique, groups = np.unique(key, return_inverse=True)
    rounds = np.array([operations.rounds(name) for name in pairs.names], bool)
    is_input = np.isin(parts, [i for i, n in enumerate(part.names) if n in _INPUT_PARTS])
    codes: Mapping[str, int] = {name: i for i, name in enumerate(pairs.names)}
    parent_codes = np.array([codes.get(name, -1) for name in parent.names] + [-1], np.int64)
    inside = parent_codes[parents]
    both = (pairs.a >= 0) & (pairs.b >= 0)
    common = np.bincount(groups.ravel()[both], minlength=len(unique)) > 0
    outer = (pairs.unit * (len(pairs.names) + 1) + inside)[inside >= 0]
    return FlowRows(
        groups.ravel(), len(unique), rounds[unique % (len(pairs.names) + 1)],
        np.isin(unique, outer), common, is_input,
        _ignored(pairs, is_input, parts, part.names, paths, path.names), inside,
        part.names, parts, path.names, paths, pairs.names,
    )  # fmt: skip


def _ignored(
    pairs: Pairs,
    is_input: Bools,
    parts: Ints,
    part_names: Sequence[str],
    paths: Ints,
    path_names: Sequence[str],
) -> Bools:
    names = [operations.api_name(name) for name in pairs.names]
    empty = np.array([name in operations.UNINITIALIZED for name in names], bool)
    overwritten = np.array([name in operations.OVERWRITES for name in names], bool)
    first = np.isin(paths, [i for i, n in enumerate(path_names) if n == "0"])
    positional = np.isin(parts, [i for i, n in enumerate(part_names) if n == "input_args"])
    return (empty[pairs.record] & ~is_input) | (overwritten[pairs.record] & first & positional)


def _either(a: Ints, b: Ints, pairs: Pairs) -> Ints:
    from_a = a[pairs.a] if len(a) else np.full(len(pairs.a), -1, np.int64)
    from_b = b[pairs.b] if len(b) else np.full(len(pairs.b), -1, np.int64)
    return np.where(pairs.a >= 0, from_a, from_b)
