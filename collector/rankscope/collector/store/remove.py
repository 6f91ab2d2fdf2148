"""Taking steps out of a run's tables, beside collectors that append, seal and fold.

The files of a step are replaced by an empty one, by the rules of a seal: of a seal and a removal at
once the second is refused and looks again. What comes of the step afterwards stays.
"""

import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rankscope.collector.schema import STEPS
from rankscope.collector.store.errors import CommitConflict, StoreUnavailable
from rankscope.collector.store.files import file_name, remove_files, write_file
from rankscope.collector.store.reader import tables_path
from rankscope.collector.store.reading import read_live
from rankscope.collector.store.rows import concatenated
from rankscope.collector.store.tables import Replacement, Table

_ATTEMPTS = 10
_Change = Callable[[Table, list[str]], pa.Table]


def remove_steps(run_path: Path, steps: Collection[int]) -> None:
    """Remove the rows of steps; a row "removed" in `steps` says of each that it was there."""
    root = tables_path(run_path)
    writer = f"rm{uuid.uuid4().hex}"
    tables = {name: Table(root, name) for name in ("records", "nodes", "steps")}
    for table in tables.values():
        table.add_later_columns()
    for name in ("records", "nodes"):
        table = tables[name]
        for step in sorted(steps):
            _replace(table, step, f"seal/{step}", _nothing, writer)
    _replace(tables["steps"], None, "fold", lambda t, f: _without(t, f, steps), writer)


def _nothing(table: Table, files: list[str]) -> pa.Table:
    return table.schema.empty_table()


def _without(table: Table, files: list[str], steps: Collection[int]) -> pa.Table:
    rows = concatenated([read_live(table, name) for name in files], table.schema)
    going = pc.is_in(rows["step"], pa.array(steps, pa.int64()))
    empty: Mapping[str, Any] = dict.fromkeys(STEPS.names)
    told = [{**empty, "step": s, "event": "removed", "time": time.time()} for s in sorted(steps)]
    kept = rows.filter(pc.invert(pc.fill_null(going, False)))
    return pa.concat_tables([kept, pa.Table.from_pylist(told, STEPS)])


def _replace(table: Table, step: int | None, app_id: str, change: _Change, writer: str) -> None:
    for _ in range(_ATTEMPTS):
        with table.lock:
            table.refresh()
            files, version = table.files(step), table.transaction(app_id)
        if not files:
            return
        try:
            rows = change(table, files)
        except FileNotFoundError:  # replaced meanwhile
            continue
        kind = "part" if step is None else "seal"
        new = write_file(table.root, file_name(kind, writer, step), rows, step)
        try:
            with table.lock:
                table.refresh()
                if table.transaction(app_id) != version:
                    raise CommitConflict(f"{table.root}: {app_id} was done by another")
                table.replace([Replacement(files, new, app_id, version + 1)])
        except CommitConflict:
            remove_files(table.root, [new.name])
            continue
        remove_files(table.root, files)
        return
    raise StoreUnavailable(f"{table.root}: {app_id} was overtaken {_ATTEMPTS} times")
