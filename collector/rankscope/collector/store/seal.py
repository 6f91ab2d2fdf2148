"""Replacing many data files of a table by one, safely against appends and others that do the same.

Two processes that replace the same files from stale views would both succeed and double the rows.
So each replacement carries a transaction of its own name whose version rises by one: delta-rs
refuses the second of two at once, and a later one sees that the version moved on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from rankscope.collector.store.errors import CommitConflict, StoreUnavailable
from rankscope.collector.store.files import count_rows, file_name, remove_files, write_file
from rankscope.collector.store.reading import read_live
from rankscope.collector.store.rows import concatenated, in_order, with_ranks
from rankscope.collector.store.tables import Table

_ATTEMPTS = 5


@dataclass(frozen=True)
class Replaced:
    """`rows` that the files hold now; `old` files that no view after this one names."""

    rows: int
    old: tuple[str, ...] = ()


def seal_step(table: Table, step: int, ranks: Mapping[str, int], collector_id: str) -> Replaced:
    """One file for the step, sorted by (rank, process, seq, leaf), with the ranks of `ranks`."""

    def sealed(rows: pa.Table) -> pa.Table:
        return in_order(with_ranks(rows, ranks), by_rank=True)

    def is_sealed(files: list[str]) -> bool:
        if len(files) != 1 or "/seal-" not in files[0]:
            return False
        keys = read_live(table, files[0], ("process", "rank"))
        return bool(with_ranks(keys, ranks)["rank"].equals(keys["rank"]))

    return _replace(table, step, f"seal/{step}", sealed, is_sealed, collector_id)


def fold(table: Table, collector_id: str, most_files: int) -> Replaced:
    """One file for a table without partitions, when it has more than `most_files`."""
    return _replace(
        table, None, "fold", lambda rows: rows, lambda files: len(files) <= most_files, collector_id
    )


def _replace(
    table: Table,
    step: int | None,
    app_id: str,
    change: Callable[[pa.Table], pa.Table],
    is_done: Callable[[list[str]], bool],
    collector_id: str,
) -> Replaced:
    for _ in range(_ATTEMPTS):
        with table.lock:
            table.refresh()
            files, version = table.files(step), table.transaction(app_id)
        try:
            if not files or is_done(files):
                return Replaced(sum(count_rows(table.root, name) for name in files))
            rows = change(concatenated([read_live(table, name) for name in files], table.schema))
        except FileNotFoundError:  # replaced by another collector, and their grace is over
            continue
        kind = "part" if step is None else "seal"
        new = write_file(table.root, file_name(kind, collector_id, step), rows, step)
        try:
            with table.lock:
                table.refresh()
                if table.transaction(app_id) != version:
                    raise CommitConflict(f"{table.root}: {app_id} was done by another collector")
                table.replace(files, new, app_id, version + 1)
        except CommitConflict:
            remove_files(table.root, [new.name])
            continue
        return Replaced(new.rows, tuple(files))
    raise StoreUnavailable(f"{table.root}: {app_id} was overtaken {_ATTEMPTS} times")
