"""Where events become columns: called at every record, emptied into batches by the transport's
thread.

Nothing here makes an object per row. An event is eight integers appended to one array, its values
are ids, its tensors go to the statistics. `take` swaps the arrays under the lock and encodes them
outside it.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope.agent.capture import Capture, room_of
from rankscope.agent.objects import Objects
from rankscope.agent.outline import Outlines, Parts, TensorEntry
from rankscope.agent.stacks import StackTable
from rankscope.agent.statistics import (
    DetailedPending,
    DetailedStatistics,
    Pending,
    TensorStatistics,
    Wanted,
)
from rankscope.v1 import collector_pb2 as pb

NODE, INPUT, OUTPUT = pb.NODE, pb.INPUT, pb.OUTPUT
API, MODULE, PARAMETERS_GRAD, SCOPE, SAVE = pb.API, pb.MODULE, pb.PARAMETERS_GRAD, pb.SCOPE, pb.SAVE
FORWARD, BACKWARD = pb.FORWARD, pb.BACKWARD

#: What the tables call the fields of a record, where it is not by their own names.
_PARTS: dict[int, str] = {PARAMETERS_GRAD: "parameters_grad", SAVE: "save"}

_now = time.time
_COLUMNS = 8  # step, name, what, kind, direction, outline, parent, stack
_Ints = npt.NDArray[np.int64]


class StepCost(NamedTuple):
    """What a step cost, as the contract has it."""

    agent_seconds: float
    wall_seconds: float
    shed: str


class Recorder:
    """Collects the events of one process. Every method may be called from any thread."""

    def __init__(
        self, checksum: str = "", capture: Capture | None = None, wanted: Wanted | None = None
    ) -> None:
        """`wanted` asks for more figures of each tensor than are always taken."""
        self.lock = threading.RLock()
        self.capture = capture  # of whole tensors; None: none is
        self.stacks = StackTable()
        self.outlines = Outlines()
        self._checksum = checksum
        self._statistics = (
            DetailedStatistics(wanted, checksum) if wanted else TensorStatistics(checksum)
        )
        self.objects: Objects | None = None  # None: the names of module objects are not recorded
        self._names: dict[str, int] = {"": 0}
        self.names: list[str] = [""]  # by id
        self._events = array("q")
        self._times = array("d")
        self._values = array("q")
        self._first_event = 0
        self.events_with_data = 0  # so far
        self._step_events: Counter[int] = Counter()  # of batches already taken
        self._announced: set[int] = set()  # stacks whose text has been sent
        self._control = pb.Batch()
        self._after: list[Callable[[], None]] = []

    # ------------------------------------------------------------------------------------ hot path

    def name_id(self, name: str) -> int:
        """Id of a record name; 0 is the empty name."""
        found = self._names.get(name)
        if found is None:
            with self.lock:
                found = self._names.setdefault(name, len(self.names))
                if found == len(self.names):
                    self.names.append(name)
        return found

    def event(
        self,
        step: int,
        name: int,
        what: int,
        kind: int,
        direction: int,
        parent: int = 0,
        stack: int = 0,
        parts: Parts = (),
    ) -> None:
        """Append one event; the tensors of `parts` are measured before this returns."""
        outline = 0
        if parts:
            tensors: list[TensorEntry] = []
            values: list[int] = []
            part, outlines = _PARTS.get(kind, ""), self.outlines
            outline = outlines.scan(parts, part, tensors, values)
        capture, captured, needed = self.capture, False, 0
        if capture is not None and outline:
            captured = kind == SAVE or capture.wants(name, self.names[name])
            if captured:
                needed = room_of(tensors)
        with self._locked_with_room(capture, needed) if capture is not None else self.lock:
            if outline:
                self.events_with_data += 1
                if outlines is not self.outlines:  # begun anew since
                    del tensors[:], values[:]
                    outline = self.outlines.scan(parts, part, tensors, values)
                if tensors:
                    self._statistics.add_all(tensors)
                self._values.extend(values)
                if capture is not None:
                    capture.add(step, tensors, captured)
            self._events.extend((step, name, what, kind, direction, outline, parent, stack))
            self._times.append(_now())
        if self._after:
            self._run_deferred()

    @contextmanager
    def _locked_with_room(self, capture: Capture, needed: int) -> Iterator[None]:
        """The lock, held while the memory for whole tensors has room for an event, or no more is
        waited for it.
        """
        while True:
            if needed:
                capture.make_room(needed)
            with self.lock:
                if needed and capture.lacks_room(needed):
                    continue  # another thread was faster
                yield
                return

    # ------------------------------------------------------------------------------ control events

    def step_event(
        self, step: int, kind: pb.StepEvent.Kind, reason: str = "", cost: StepCost | None = None
    ) -> None:
        """Say that a step began, paused, ended or was skipped; it travels in order with the step's
        events. `cost` belongs to the end of a step.
        """
        with self.lock:
            events = 0
            if kind == pb.StepEvent.END:
                steps = np.frombuffer(self._events, dtype=np.int64)[::_COLUMNS]
                events = self._step_events.pop(step, 0) + int(np.count_nonzero(steps == step))
            self._control.steps.add(
                step=step,
                kind=kind,
                events=events,
                time=time.time(),
                reason=reason,
                **(cost._asdict() if cost is not None else {}),
            )

    def rank_learned(self, rank: pb.Rank) -> None:
        with self.lock:
            self._control.rank.CopyFrom(rank)

    def recording_changed(self, recording: pb.Recording) -> None:
        with self.lock:
            self._control.recording.CopyFrom(recording)

    def drop(self, step: int, events: int, reason: str) -> None:
        """Count events that will never be sent."""
        with self.lock:
            for known in self._control.drops:
                if known.step == step and known.reason == reason and not known.last_sequence:
                    known.events += events
                    return
            self._control.drops.add(step=step, events=events, reason=reason)

    def when_free(self, action: Callable[[], None]) -> bool:
        """Run `action` once this thread is out of the recorder; False when it is out already. For
        signal handlers.
        """
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            return False
        self._after.append(action)
        return True

    def _run_deferred(self) -> None:
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            actions, self._after = self._after, []
            for action in actions:
                action()

    @property
    def pending_bytes(self) -> int:
        """Rough size of what waits for `take`."""
        return 8 * (len(self._events) + len(self._values))

    # -------------------------------------------------------------------------------- batch source

    def take(self) -> pb.Batch | None:
        """Everything recorded since the last call, or None. One thread at a time."""
        with self.lock:
            control = self._control
            if not self._events and not control.ByteSize():
                return None
            events, times, values = self._events, self._times, self._values
            pending = self._statistics.take()
            captured = self.capture.take() if self.capture is not None else []
            steps = np.frombuffer(events, dtype=np.int64)[::_COLUMNS]
            for step, number in zip(*np.unique(steps, return_counts=True), strict=True):
                self._step_events[int(step)] += int(number)
            first, self._first_event = self._first_event, self._first_event + len(times)
            self._events, self._times, self._values = array("q"), array("d"), array("q")
            self._control = pb.Batch()
            outlines = self.outlines
            if outlines.is_full:
                self.outlines = Outlines()
        if times:
            self._encode(control, outlines, first, events, times, values, pending)
            if self.capture is not None:
                self.capture.finish(control, captured)
        return control

    def lost(self, batch: pb.Batch, reason: str) -> None:
        """A batch of `take` will never be sent: count it, send its stacks and step events again."""
        if self.capture is not None:
            self.capture.lost(batch.blobs)
        with self.lock:
            self._announced.difference_update(stack.id for stack in batch.stacks)
            steps = np.frombuffer(batch.columns.event_step, dtype="<i8")
            for step, events in zip(*np.unique(steps, return_counts=True), strict=True):
                self.drop(int(step), int(events), reason)
            for known in batch.drops:
                self.drop(known.step, known.events, known.reason)
            merged = pb.Batch(steps=batch.steps)
            if batch.HasField("rank"):
                merged.rank.CopyFrom(batch.rank)
            if batch.HasField("recording"):
                merged.recording.CopyFrom(batch.recording)
            merged.MergeFrom(self._control)
            self._control = merged

    def _encode(
        self,
        batch: pb.Batch,
        known: Outlines,
        first: int,
        events: array[int],
        times: array[float],
        values: array[int],
        pending: Pending | DetailedPending,
    ) -> None:
        table = np.frombuffer(events, dtype=np.int64).reshape(-1, _COLUMNS)
        step, name, what, kind, direction, outline, parent, stack = table.T
        columns = batch.columns
        columns.first_event, columns.event_count = first, len(table)

        names, (name_index, parent_index) = _localize((name, parent))
        columns.names.extend(self.names[i] for i in names)
        outlines, (outline_index,) = _localize((outline,))
        columns.outlines.extend(known.payloads[i] for i in outlines)
        value_ids = np.frombuffer(values, dtype=np.int64)
        texts, (value_index,) = _localize((value_ids,))
        columns.values.extend(known.texts[i] for i in texts)

        columns.event_step = _bytes(step, "<i8")
        columns.event_name = _bytes(name_index - 1, "<u4")
        columns.event_what = _bytes(what, "u1")
        columns.event_kind = _bytes(kind, "u1")
        columns.event_direction = _bytes(direction, "u1")
        columns.event_outline = _bytes(outline_index, "<u4")
        columns.event_parent = _bytes(parent_index, "<u4")
        columns.event_stack = _bytes(stack, "<i8")
        columns.event_time = times.tobytes()
        if self.objects is not None:
            self.objects.encode(columns, step, name)
        self._statistics_columns(columns, value_index, outline_index, pending)
        self._announce(batch, np.unique(stack).tolist())

    def _statistics_columns(
        self,
        columns: pb.Columns,
        value_index: _Ints,
        outline_index: _Ints,
        pending: Pending | DetailedPending,
    ) -> None:
        figures = pending.reduce()
        if figures.overrides:
            value_index = self._override(columns, value_index, outline_index, figures.overrides)
        columns.leaf_value = _bytes(value_index, "<u4")
        columns.flags = _bytes(figures.flags, "u1")
        columns.max = _bytes(figures.max, "<f8")
        columns.min = _bytes(figures.min, "<f8")
        columns.sum = _bytes(figures.sum, "<f8")
        columns.sum_of_squares = _bytes(figures.sum_of_squares, "<f8")
        columns.nan_count = _bytes(figures.nan_count, "<i8")
        columns.inf_count = _bytes(figures.inf_count, "<i8")
        columns.zero_count = _bytes(figures.zero_count, "<i8")
        if self._checksum:
            columns.checksum = _bytes(figures.checksum, "<u8")
        if figures.std is not None:
            columns.std = _bytes(figures.std, "<f8")
        if figures.samples is not None and figures.sample_count is not None:
            columns.sample_count = _bytes(figures.sample_count, "<u2")
            columns.samples = _bytes(figures.samples, "<f8")

    def _override(
        self,
        columns: pb.Columns,
        value_index: _Ints,
        outline_index: _Ints,
        overrides: dict[int, dict[str, object]],
    ) -> _Ints:
        """Give tensor leaves whose figures do not fit the columns a JSON value."""
        import json

        masks = [np.zeros(0, dtype=bool)]
        for payload in columns.outlines:
            leaves = pb.Outline.FromString(payload).leaves
            masks.append(np.fromiter((leaf.form == pb.TENSOR for leaf in leaves), dtype=bool))
        is_tensor = np.concatenate([masks[i] for i in outline_index])
        leaf_of_tensor = np.flatnonzero(is_tensor)
        value_index = value_index.copy()
        for entry, figures in overrides.items():
            columns.values.append(json.dumps(figures))
            value_index[leaf_of_tensor[entry]] = len(columns.values)
        return value_index

    def _announce(self, batch: pb.Batch, stacks: Iterable[int]) -> None:
        for stack in stacks:
            if stack and stack not in self._announced:
                self._announced.add(stack)
                batch.stacks.add(id=stack, frames=self.stacks.frames(stack))


def _localize(columns: Sequence[_Ints]) -> tuple[list[int], list[_Ints]]:
    """The distinct non-zero ids of some columns, and the columns as 1-based indices into them (0
    stays 0).
    """
    lengths = [len(column) for column in columns]
    distinct, inverse = np.unique(np.concatenate(columns), return_inverse=True)
    if not len(distinct) or distinct[0] != 0:
        inverse = inverse + 1
        ids = distinct
    else:
        ids = distinct[1:]
    split = np.split(inverse, np.cumsum(lengths)[:-1])
    return ids.tolist(), [np.asarray(part, dtype=np.int64) for part in split]


def _bytes(column: npt.NDArray[np.generic], dtype: str) -> bytes:
    return column.astype(dtype).tobytes()
