"""Reading a run, also while collectors write to it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope.collector.schema import TABLES
from rankscope.collector.store.caches import SmallTable, Stacks
from rankscope.collector.store.reading import read_live, retry_once
from rankscope.collector.store.rows import (
    concatenated,
    in_order,
    only_batches_of,
    only_processes,
)
from rankscope.collector.store.tables import Table


def side_path(run_path: Path) -> Path:
    """The folder beside a run that holds everything but its step folders."""
    return run_path.with_name(run_path.name + ".rankscope")


def tables_path(run_path: Path) -> Path:
    return side_path(run_path) / "tables"


def open_readonly(run_path: Path) -> "RunReader":
    """A reader of a run, also while a collector writes to it; raises StoreGone without one."""
    root = tables_path(run_path)
    return RunReader({name: Table(root, name) for name in TABLES})


class RunReader:
    """The tables of one run. Each call sees what is committed by then; any thread may call."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = tables
        self._processes = SmallTable(tables["processes"])
        self._steps = SmallTable(tables["steps"])
        self._stacks = Stacks(tables["stacks"])

    def read_step(
        self, step: int, processes: Collection[str] | None = None
    ) -> tuple[pa.Table, pa.Table]:
        """(nodes, records) of a step, of all or some processes, by (process, seq, leaf).

        Both have the same batches: records whose nodes are not committed yet are left out.
        """
        # Nodes first: they are committed after their records, so none of those is missing later.
        nodes = self._read("nodes", step, processes)
        return nodes, only_batches_of(nodes, self._read("records", step, processes))

    def stacks(self, processes: Collection[str]) -> dict[int, list[str]]:
        """Stack id -> frames, innermost first, of all stacks that these processes have sent."""
        return self._stacks.of(processes)

    def processes(self) -> list[dict[str, Any]]:
        """The newest revision of each process."""
        newest: dict[str, dict[str, Any]] = {}
        for row in self._processes.rows().to_pylist():
            known = newest.get(row["process"])
            if known is None or row["revision"] >= known["revision"]:
                newest[row["process"]] = row
        return list(newest.values())

    def steps_rows(self) -> pa.Table:
        """All rows of `steps`, in no particular order."""
        return self._steps.rows()

    def step_numbers(self) -> list[int]:
        """The steps that have events, ascending."""
        table = self._tables["nodes"]
        table.refresh()
        return sorted({int(name.split("/")[0].removeprefix("step=")) for name in table.files()})

    def files(self, table: str) -> list[Path]:
        """The live data files of a table; they may be replaced and, a minute later, vanish."""
        self._tables[table].refresh()
        return [self._tables[table].root / name for name in self._tables[table].files()]

    def _read(self, name: str, step: int, processes: Collection[str] | None) -> pa.Table:
        table = self._tables[name]

        def read() -> pa.Table:
            table.refresh()
            parts = [read_live(table, file) for file in table.files(step, processes)]
            if processes is not None:
                parts = [only_processes(part, processes) for part in parts]
            return in_order(concatenated(parts, table.schema))

        return retry_once(read)
