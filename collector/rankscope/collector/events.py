"""The event columns of a batch, checked, and their expansion into leaves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope.collector.columns import (
    Ids,
    Rows,
    Texts,
    constant_column,
    read_codes,
    read_column,
    read_ids,
)
from rankscope.collector.outlines import FORMS, MalformedBatch, parse_outline
from rankscope.collector.templates import templates_of
from rankscope.collector.wire import Malformed, count_parts
from rankscope.v1 import collector_pb2 as pb

#: More leaves, or more distinct steps, than any honest batch has.
MAX_ROWS = 1_000_000
MAX_DIMENSIONS_IN_ALL = 20_000_000
MAX_TEMPLATES = 200_000
MAX_TEXTS = 500_000
MAX_STEPS = 10_000
MAX_INT64 = 2**63 - 1

_LEAVES = pb.Outline.DESCRIPTOR.fields_by_name["leaves"].number
_WHATS = Texts([None, "node", "input", "output"])
_FORMS = Texts([None, *(FORMS[form] for form in sorted(FORMS))])
_KINDS = Texts([None, "api", "module", "parameters_grad", "scope", "save"])
_DIRECTIONS = Texts([None, "forward", "backward"])


class Events:
    """Reads and checks the event columns; raises MalformedBatch."""

    def __init__(self, columns: pb.Columns, process: str, sequence: int) -> None:
        self._origin = (process, sequence)
        count = self.count = columns.event_count
        self.step = read_column("event_step", columns.event_step, "<i8", count)
        if columns.first_event > MAX_INT64 - count:
            raise MalformedBatch("columns.first_event", f"{columns.first_event} is too large")
        self._seq = columns.first_event + np.arange(count, dtype=np.int64)
        for field in ("names", "values", "objects", "digests"):
            if (texts := len(getattr(columns, field))) > MAX_TEXTS:
                raise MalformedBatch(f"columns.{field}", f"{texts}, at most {MAX_TEXTS}")
        self._names = Texts(columns.names)
        names = len(columns.names)
        self.name = read_ids("event_name", columns.event_name, count, names)
        self._parent = read_ids("event_parent", columns.event_parent, count, names + 1)
        self.what = read_codes("event_what", columns.event_what, count, pb.NODE, pb.OUTPUT)
        self._kind = read_codes("event_kind", columns.event_kind, count, pb.API, pb.SAVE)
        self._direction = read_codes(
            "event_direction", columns.event_direction, count, pb.DIRECTION_NONE, pb.BACKWARD
        )
        self._stack = read_column("event_stack", columns.event_stack, "<i8", count)
        self._time = read_column("event_time", columns.event_time, "<f8", count)
        self._objects = Texts(columns.objects)
        self._object, self._object_call = self._read_objects(columns)
        self._read_outlines(columns)
        self.steps = self._distinct_steps()

    def _read_objects(self, columns: pb.Columns) -> tuple[Ids, npt.NDArray[np.int64]]:
        if not columns.event_object:  # their names are not recorded
            return np.zeros(self.count, np.uint32), np.zeros(self.count, np.int64)
        ids = read_ids("event_object", columns.event_object, self.count, len(columns.objects) + 1)
        field = "event_object_call"
        return ids, read_column(field, columns.event_object_call, "<i8", self.count)

    def _read_outlines(self, columns: pb.Columns) -> None:
        _check_templates(columns.outlines)
        outlines = tuple(parse_outline(outline) for outline in columns.outlines)
        self.outline = read_ids(
            "event_outline", columns.event_outline, self.count, len(outlines) + 1
        )
        if np.any((self.what == pb.NODE) & (self.outline != 0)):
            raise MalformedBatch("columns.event_outline", "a NODE event has data")
        self.templates = templates_of(outlines)
        self.leaves = self.templates.leaves[self.outline]

    def _distinct_steps(self) -> tuple[int, ...]:
        steps: tuple[int, ...] = tuple(np.unique(self.step).tolist())
        if steps and steps[0] < 0:
            raise MalformedBatch("columns.event_step", f"{steps[0]} is negative")
        if len(steps) > MAX_STEPS:
            reason = f"{len(steps)} distinct steps, at most {MAX_STEPS}"
            raise MalformedBatch("columns.event_step", reason)
        return steps

    def names_at(self, rows: Any) -> pa.DictionaryArray:
        """The record names of the events at `rows`."""
        return self._names.take(self.name[rows])

    def node_columns(self) -> dict[str, pa.Array]:
        """The columns of NODES."""
        return self.arrow_columns() | {
            "what": _WHATS.take(self.what),
            "structure": self.templates.structures.take_optional(self.outline),
            "leaves": pa.array(self.leaves.astype(np.int32)),
        }

    def arrow_columns(self, rows: Any = slice(None)) -> dict[str, pa.Array]:
        """The columns that nodes and records have in common, of the events at `rows`."""
        process, sequence = self._origin
        stack = self._stack[rows]
        count = len(stack)
        return {
            "step": pa.array(self.step[rows]),
            "rank": pa.nulls(count, pa.int32()),
            "process": constant_column(process, count),
            "batch": pa.array(np.full(count, sequence, np.int64)),
            "seq": pa.array(self._seq[rows]),
            "record": self.names_at(rows),
            "kind": _KINDS.take(self._kind[rows]),
            "direction": _DIRECTIONS.take(self._direction[rows]),
            "stack": pa.array(stack, mask=stack == 0),
            "parent": self._names.take_optional(self._parent[rows]),
            "object": self._objects.take_optional(self._object[rows]),
            "object_call": pa.array(self._object_call[rows], mask=self._object_call[rows] == 0),
            "time": pa.array(self._time[rows]),
        }


def _check_templates(outlines: Sequence[bytes]) -> None:
    """Before they are parsed, which makes them large."""
    if len(outlines) > MAX_TEMPLATES:
        raise MalformedBatch("outlines", f"{len(outlines)}, at most {MAX_TEMPLATES}")
    if sum(map(len, outlines)) < 2 * MAX_TEMPLATES:  # a leaf takes two bytes at the least
        return
    total = 0
    for outline in outlines:
        try:
            total += count_parts(outline, MAX_TEMPLATES).get(_LEAVES, 0)
        except Malformed as error:
            raise MalformedBatch("outlines", f"no Outline message: {error}") from None
        if total > MAX_TEMPLATES:
            raise MalformedBatch("outlines.leaves", f"more than {MAX_TEMPLATES} in a batch")


class Expansion:
    """All leaves of all events, one after another, as positions in events and leaf templates."""

    def __init__(self, events: Events) -> None:
        self.count = int(events.leaves.sum())
        if self.count > MAX_ROWS:
            reason = f"{self.count} leaves in all, at most {MAX_ROWS}"
            raise MalformedBatch("columns.event_outline", reason)
        first = np.cumsum(events.leaves) - events.leaves
        self.event: Rows = np.repeat(np.arange(events.count), events.leaves)
        self.leaf: Rows = np.arange(self.count) - first[self.event]
        self.templates = events.templates
        self.position: Rows = self.templates.first[events.outline][self.event] + self.leaf
        dimensions = int(self.templates.dimensions[self.position].sum())
        if dimensions > MAX_DIMENSIONS_IN_ALL:
            reason = f"{dimensions} dimensions of all leaves, at most {MAX_DIMENSIONS_IN_ALL}"
            raise MalformedBatch("outlines.leaves.shape", reason)
        self.form = self.templates.forms(self.position)
        self.tensors: Rows = np.flatnonzero(self.form == pb.TENSOR)

    def arrow_columns(self) -> dict[str, pa.Array]:
        """The columns of RECORDS that come from leaf templates."""
        return self.templates.arrow_columns(self.position) | {
            "leaf": pa.array(self.leaf.astype(np.int32)),
            "form": _FORMS.take(self.form),
        }
