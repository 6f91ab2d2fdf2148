"""What is kept in memory of the small tables, brought up to date by reading only new files."""

import threading
from collections.abc import Collection

import pyarrow as pa

from rankscope.collector.store.reading import read_live, retry_once
from rankscope.collector.store.tables import Table


class SmallTable:
    """All rows of a table that has few."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._parts: dict[str, pa.Table] = {}

    def rows(self) -> pa.Table:
        """All rows, in no particular order."""
        with self._lock:
            retry_once(self._update)
            return pa.concat_tables([self._table.schema.empty_table(), *self._parts.values()])

    def _update(self) -> None:
        self._table.refresh()
        live = self._table.files()
        parts = {
            name: self._parts[name] if name in self._parts else read_live(self._table, name)
            for name in live
        }
        self._parts = parts


class Stacks:
    """The call stacks of a run, by process."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._read: set[str] = set()
        self._frames: dict[int, list[str]] = {}
        self._ids: dict[str, set[int]] = {}

    def of(self, processes: Collection[str]) -> dict[int, list[str]]:
        """Stack id -> frames, innermost first, of all stacks these processes have sent."""
        with self._lock:
            retry_once(self._update)
            ids = set().union(*(self._ids.get(process, ()) for process in processes))
            return {stack: self._frames[stack] for stack in ids}

    def _update(self) -> None:
        self._table.refresh()
        live = set(self._table.files())
        for name in live - self._read:
            rows = read_live(self._table, name)
            columns = (rows[column].to_pylist() for column in ("process", "stack", "frames"))
            for process, stack, frames in zip(*columns, strict=True):
                self._frames[stack] = frames
                self._ids.setdefault(process, set()).add(stack)
            self._read.add(name)
        self._read &= live
