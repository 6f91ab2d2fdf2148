"""Replacing many data files of a table by one, safely against appends and others that do the same.

Two processes that replace the same files from stale views would both succeed and double the rows.
So each replacement carries a transaction of its own name whose version rises by one: delta-rs
refuses the second of two at once, and a later one sees that the version moved on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from rankscope.collector.store.errors import CommitConflict, StoreUnavailable
from rankscope.collector.store.files import (
    DataFile,
    count_rows,
    file_name,
    remove_files,
    write_file,
)
from rankscope.collector.store.reading import read_live
from rankscope.collector.store.rows import concatenated, in_order, with_ranks
from rankscope.collector.store.tables import Replacement, Table

_ATTEMPTS = 5
_Step = TypeVar("_Step", int, None)


@dataclass(frozen=True)
class Replaced:
    """`rows` that the files hold now; `old` files that no view after this one names."""

    rows: int
    old: tuple[str, ...] = ()


def seal_steps(
    table: Table, steps: Sequence[int], ranks: Mapping[str, int], collector_id: str
) -> dict[int, Replaced]:
    """One file for each step, sorted by (rank, process, seq, leaf), with the ranks of `ranks`; all
    in one commit, which costs as much as a small step itself.
    """

    def sealed(rows: pa.Table) -> pa.Table:
        return in_order(with_ranks(rows, ranks), by_rank=True)

    def is_sealed(files: list[str]) -> bool:
        if len(files) != 1 or "/seal-" not in files[0]:
            return False
        keys = read_live(table, files[0], ("process", "rank"))
        return bool(with_ranks(keys, ranks)["rank"].equals(keys["rank"]))

    app_ids = {step: f"seal/{step}" for step in steps}
    return _replace(table, app_ids, sealed, is_sealed, collector_id)


def fold(table: Table, collector_id: str, most_files: int) -> Replaced:
    """One file for a table without partitions, when it has more than `most_files`."""
    return _replace(
        table, {None: "fold"}, lambda rows: rows, lambda f: len(f) <= most_files, collector_id
    )[None]


def _replace(
    table: Table,
    app_ids: Mapping[_Step, str],
    change: Callable[[pa.Table], pa.Table],
    is_done: Callable[[list[str]], bool],
    collector_id: str,
) -> dict[_Step, Replaced]:
    """`app_ids`: of each step that is to be replaced, None for a table without partitions."""
    for _ in range(_ATTEMPTS):
        with table.lock:
            table.refresh()
            before = {
                step: (table.files(step), table.transaction(app_id))
                for step, app_id in app_ids.items()
            }
        replaced: dict[_Step, Replaced] = {}
        written: list[Replacement] = []
        try:
            for step, (files, version) in before.items():
                if not files or is_done(files):
                    replaced[step] = Replaced(sum(count_rows(table.root, f) for f in files))
                    continue
                new = _rewrite(table, step, files, change, collector_id)
                written.append(Replacement(files, new, app_ids[step], version + 1))
                replaced[step] = Replaced(new.rows, tuple(files))
        except FileNotFoundError:  # replaced by another collector, and their grace is over
            _remove(table, written)
            continue
        except BaseException:
            _remove(table, written)
            raise
        try:
            if written:
                _commit(table, written)
        except CommitConflict:
            _remove(table, written)
            continue
        return replaced
    names = ", ".join(app_ids.values())
    raise StoreUnavailable(f"{table.root}: {names} was overtaken {_ATTEMPTS} times")


def _rewrite(
    table: Table,
    step: int | None,
    files: Sequence[str],
    change: Callable[[pa.Table], pa.Table],
    collector_id: str,
) -> DataFile:
    rows = change(concatenated([read_live(table, name) for name in files], table.schema))
    kind = "part" if step is None else "seal"
    return write_file(table.root, file_name(kind, collector_id, step), rows, step)


def _remove(table: Table, written: Sequence[Replacement]) -> None:
    remove_files(table.root, [item.new.name for item in written])


def _commit(table: Table, written: Sequence[Replacement]) -> None:
    with table.lock:
        table.refresh()
        for item in written:
            if table.transaction(item.app_id) != item.version - 1:
                raise CommitConflict(f"{table.root}: {item.app_id} was done by another collector")
        table.replace(written)
