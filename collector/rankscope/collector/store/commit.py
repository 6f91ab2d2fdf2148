"""Commits a group over several tables so that each row is stored exactly once.

Each table's commit carries, for every process of the group, the highest sequence it now holds.
`nodes` comes last: what it says of a process is whole in all tables. After a failure or crash in
between, the same batches come again, and a table that has them already (by its own sequence) is
left alone.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from rankscope.collector.store.errors import CommitConflict, StoreError, StoreUnavailable
from rankscope.collector.store.files import DataFile, file_name, remove_files, write_file
from rankscope.collector.store.group import ORDER, Group, Row, by_step
from rankscope.collector.store.tables import Table

_ATTEMPTS = 5


class Committer:
    """For one thread at a time; `pool` writes data files in parallel."""

    def __init__(self, tables: Mapping[str, Table], collector_id: str, pool: Executor) -> None:
        self._tables = tables
        self._id = collector_id
        self._pool = pool
        # Loose rows that landed in a commit whose group is not complete yet: a repeated call brings
        # them again, and no sequence tells.
        self._landed: dict[str, list[Row]] = {"steps": [], "processes": []}
        self._doubtful: tuple[str, Sequence[DataFile], Sequence[Row]] | None = None

    def commit(self, group: Group) -> None:
        """Stores the group durably. Raises StoreUnavailable; the call may then be repeated."""
        for _ in range(_ATTEMPTS):
            try:
                self._commit(group)
            except CommitConflict:
                continue
            return
        raise StoreUnavailable(f"other writers came first {_ATTEMPTS} times")

    def _commit(self, group: Group) -> None:
        self._settle_doubt()
        loose = {name: self._loose_rows(name, group) for name in self._landed}
        files = self._write(group, loose)
        pending = [name for name in ORDER if files[name] or self._lacks_nodes(name, group)]
        try:
            while pending:
                name = pending[0]
                self._append(name, files[name], group, loose.get(name, ()))
                pending.pop(0)
        except BaseException:
            self._remove(files, pending[1:])
            self._doubtful = pending[0], files[pending[0]], loose.get(pending[0], ())
            with suppress(StoreError):
                self._settle_doubt()
            raise
        for landed in self._landed.values():
            landed.clear()

    def _settle_doubt(self) -> None:
        """Finds out whether a failed commit is in the log after all; if not, drops its files."""
        if self._doubtful is None:
            return
        name, files, loose = self._doubtful
        table = self._tables[name]
        table.reload()
        if files and files[0].name in table.files():
            self._landed.get(name, []).extend(loose)
        else:
            remove_files(table.root, [file.name for file in files])
        self._doubtful = None

    def _lacks_nodes(self, name: str, group: Group) -> bool:
        return name == "nodes" and bool(self._raised(name, group))

    def _raised(self, name: str, group: Group) -> dict[str, int]:
        """Sequences that a commit of the group raises in this table; none is ever lowered."""
        if name == "processes":
            return {}
        stored = self._tables[name].stored_sequence
        return {
            process: sequence
            for process, sequence in group.sequences.items()
            if sequence > stored(process)
        }

    def _loose_rows(self, name: str, group: Group) -> list[Row]:
        rows = group.loose_rows(name)
        for landed in self._landed[name]:
            if landed in rows:
                rows.remove(landed)
        return rows

    def _write(self, group: Group, loose: Mapping[str, Sequence[Row]]) -> dict[str, list[DataFile]]:
        """Writes all data files of the group, several at a time, or none."""
        writing = []
        for name in ORDER:
            table = self._tables[name]
            if name != "processes":
                table.learn(group.sequences)
            rows = group.rows(name, table.stored_sequence, loose.get(name, ()))
            for step, part in by_step(name, rows):
                new = file_name("part", self._id, step)
                writing.append((name, self._pool.submit(write_file, table.root, new, part, step)))
        files: dict[str, list[DataFile]] = {name: [] for name in ORDER}
        failures = []
        for name, future in writing:
            try:
                files[name].append(future.result())
            except StoreError as error:
                failures.append(error)
        if failures:
            self._remove(files, ORDER)
            raise failures[0]
        return files

    def _append(
        self, name: str, files: Sequence[DataFile], group: Group, loose: Sequence[Row]
    ) -> None:
        table = self._tables[name]
        transactions = self._raised(name, group)
        if loose:
            transactions[self._loose_id] = table.transaction(self._loose_id) + 1
        table.append(files, transactions)
        if loose:
            self._landed[name].extend(loose)

    def _remove(self, files: Mapping[str, Sequence[DataFile]], names: Sequence[str]) -> None:
        for name in names:
            remove_files(self._tables[name].root, [file.name for file in files[name]])

    @property
    def _loose_id(self) -> str:
        return f"rows/{self._id}"
