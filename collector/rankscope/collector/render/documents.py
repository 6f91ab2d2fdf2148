"""The documents of one process and step, built from its events in order.

A record is inserted when its first part arrives. A module's record is taken out and appended again
when its output arrives, so that it stands after everything that ran inside it, and that of its
parameters' gradients with each one that arrives; all others keep their first place.

The layout is JSON with an indent of 2, UTF-8, without a newline at the end. msProbe indents by 1,
which costs 4 to 8 times as much here and changes no value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from . import columns, leaves

#: Nesting after which a subtree is written compactly: orjson refuses more than 254 levels at once.
DEEPEST_INDENTED = 100

NO_FRAMES = ["stack text was not received"]

EVENT_COLUMNS = ["seq", "record", "kind", "direction", "what", "structure", "stack", "parent"]


@dataclass(frozen=True)
class Header:
    """What dump.json says about the whole document, and what decides how values are written."""

    task: str
    level: str
    summary_mode: str
    precision: str
    extra_info: bool
    dump_data_dir: str | None


class _Event(NamedTuple):
    record: str
    kind: str | None
    direction: str | None
    what: str | None
    structure: Any
    stack: int | None
    parent: str | None
    first_leaf: int
    end_leaf: int

    @property
    def takes_place(self) -> bool:
        """Whether the record stands in construct.json from here on."""
        return self.what == "node" or (self.what == "output" and self.kind == "api")


def render(
    nodes: pa.Table, records: pa.Table, stacks: Mapping[int, Sequence[str]], header: Header
) -> dict[str, bytes]:
    """The documents of one process and step by file name: the same rows give the same bytes.

    `nodes` and `records` hold the rows of that process and step alone, in any order, with the
    columns of `schema`. ValueError names the event when rows of one are missing.
    """
    nodes = columns.ordered(nodes, EVENT_COLUMNS, ["seq"])
    records = columns.ordered(records, ["seq", "leaf", *leaves.COLUMNS], ["seq", "leaf"])
    events = _events(nodes, records)
    mode = header.task if header.task == "nan_check" else header.summary_mode
    entries = leaves.entries(records, mode, header.precision == "high")
    data = _data(events, entries)
    if header.task == "overflow_check":
        data = _overflowing(data, events, leaves.not_finite(records))
    head = {
        "task": header.task,
        "level": header.level,
        "framework": "pytorch",
        "dump_data_dir": header.dump_data_dir,
    }
    if header.level == "debug":
        return {"debug.json": _dumps(head | {"data": data})}
    documents = {"dump.json": _dumps(head | {"data": data})}
    if header.extra_info:
        documents["stack.json"] = _dumps(_stacks(events, stacks))
        documents["construct.json"] = _dumps(_construct(events, header.level))
    return documents


def _dumps(document: Any) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2)


def _events(nodes: pa.Table, records: pa.Table) -> list[_Event]:
    sequence = columns.numbers(nodes, "seq")[0]
    leaf_sequence = columns.numbers(records, "seq")[0]
    fields = zip(
        columns.texts(nodes, "record"),
        columns.texts(nodes, "kind"),
        columns.texts(nodes, "direction"),
        columns.texts(nodes, "what"),
        columns.converted(nodes, "structure", orjson.loads),
        columns.plain(nodes, "stack"),
        columns.texts(nodes, "parent"),
        np.searchsorted(leaf_sequence, sequence, side="left").tolist(),
        np.searchsorted(leaf_sequence, sequence, side="right").tolist(),
        strict=True,
    )
    return [_Event(*values) for values in fields]


def _data(events: Sequence[_Event], entries: Sequence[Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for event in events:
        if event.what == "node" or event.structure is None:
            continue
        fields = _filled(event, entries)
        if event.kind == "save":
            data[event.record] = _merged(data.get(event.record), fields)
            continue
        if not isinstance(fields, dict):
            raise ValueError(f"{event.record}: an event of kind {event.kind} must add named fields")
        moves = event.kind in ("module", "parameters_grad") and event.what == "output"
        record = data.pop(event.record, {}) if moves else data.setdefault(event.record, {})
        record.update(fields)
        data[event.record] = record
    return data


def _overflowing(
    data: dict[str, Any], events: Sequence[_Event], not_finite: Sequence[int]
) -> dict[str, Any]:
    """The records in which a tensor holds NaN or infinity."""
    found = {event.record for event in events if any(not_finite[event.first_leaf : event.end_leaf])}
    return {name: record for name, record in data.items() if name in found}


def _merged(known: Any, news: Any) -> Any:
    """Two values of one shape, the newer one where it is not null."""
    if isinstance(known, dict) and isinstance(news, dict) and known.keys() == news.keys():
        return {key: _merged(known[key], news[key]) for key in known}
    if isinstance(known, list) and isinstance(news, list) and len(known) == len(news):
        return [_merged(*pair) for pair in zip(known, news, strict=True)]
    return known if news is None else news


def _filled(event: _Event, entries: Sequence[Any]) -> Any:
    """The event's structure with each number replaced by the entry of that leaf."""
    own = entries[event.first_leaf : event.end_leaf]
    try:
        return _fill(event.structure, own, 0)
    except IndexError:
        message = f"{event.record}: its {event.what} event has {len(own)} leaves and names more"
        raise ValueError(message) from None


def _fill(part: Any, own: Sequence[Any], depth: int) -> Any:
    # Plain loops: a comprehension would cost a second stack frame on each level.
    if isinstance(part, int):
        return own[part]
    filled: Any
    if isinstance(part, list):
        filled = []
        for item in part:
            filled.append(own[item] if isinstance(item, int) else _fill(item, own, depth + 1))
    else:
        filled = {}
        for key, item in part.items():
            filled[key] = own[item] if isinstance(item, int) else _fill(item, own, depth + 1)
    if depth and depth % DEEPEST_INDENTED == 0:
        return orjson.Fragment(orjson.dumps(filled))
    return filled


def _construct(events: Sequence[_Event], level: str) -> dict[str, str | None]:
    if level == "L1":
        return {}  # msProbe keeps no call tree at L1; the table `nodes` does
    tree: dict[str, str | None] = {}
    for event in events:
        if event.takes_place:
            tree.setdefault(event.record, event.parent)
    return {record: _standing(tree, parent) for record, parent in tree.items()}


def _standing(tree: Mapping[str, str | None], parent: str | None) -> str | None:
    """The nearest enclosing backward record that is there: a module that was run again for a
    checkpoint awaits gradients that may never come.
    """
    while parent is not None and ".backward." in parent and parent not in tree:
        enclosing = tree.get(parent.replace(".backward.", ".forward."))
        parent = enclosing and enclosing.replace(".forward.", ".backward.")
    return parent


def _stacks(events: Sequence[_Event], stacks: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Names of forward records by stack, numbered in the order in which stacks first appear."""
    groups: dict[int, dict[str, None]] = {}
    calls = [e for e in events if e.kind in ("api", "module") and e.direction == "forward"]
    complete = {event.record for event in calls if event.takes_place}
    for event in calls:
        # A function that raised has its input and nothing else.
        interrupted = event.kind == "api" and event.record not in complete
        if event.stack and (event.takes_place or interrupted):
            groups.setdefault(event.stack, {})[event.record] = None
    return {
        str(number): [list(names), list(stacks.get(stack, NO_FRAMES))]
        for number, (stack, names) in enumerate(groups.items())
    }
