"""One Delta table of a run: own Parquet files, delta-rs only for the log entries.

delta-rs never fsyncs, keeps statistics that mislead about NaN, does not move an open table forward
after a commit and gets slower the longer a table stays open. Each remedy stands at its place below.
"""

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from rankscope.collector.schema import PARTITIONED, TABLES
from rankscope.collector.store.errors import (
    CommitConflict,
    StoreError,
    StoreGone,
    StoreUnavailable,
    foreign_errors,
)
from rankscope.collector.store.files import DataFile, fsync, make_folder
from rankscope.collector.store.log import TableLog

CHECKPOINT_COMMITS = 50
_ATTEMPTS = 5

_CONFIGURATION = {
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.dataSkippingStatsColumns": "rank,process,batch,seq",
}
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


@dataclass(frozen=True)
class Replacement:
    """One file in the place of several with the same rows.

    `version` of `app_id` must rise by one with each replacement of the same rows, or two
    replacements at once would both stand.
    """

    old: Sequence[str]
    new: DataFile
    app_id: str
    version: int

    def actions(self) -> list[AddAction | RemoveAction]:
        step: dict[str, str | None] = {} if self.new.step is None else {"step": str(self.new.step)}
        now = int(time.time() * 1000)
        removes = [
            RemoveAction(name, data_change=False, deletion_timestamp=now, partition_values=step)
            for name in self.old
        ]
        return [self.new.add_action(data_change=False), *removes]


class Table:
    """A table and our newest view of it. All methods may be called from any thread."""

    def __init__(self, root: Path, name: str) -> None:
        """Loads an existing table; raises StoreGone when there is none."""
        self.root = root / name
        self.name = name
        self.schema: pa.Schema = TABLES[name]
        self.lock = threading.RLock()
        self._name_parts = 2 if name in PARTITIONED else 1
        self._partition_by = ["step"] if name in PARTITIONED else []
        self._versions: dict[str, int] = {}
        self._stale = False
        self._log = TableLog(self.root / "_delta_log")
        if not self._log.folder.exists():
            raise StoreGone(f"{self.root}: no such table")
        self._load()

    @classmethod
    def create_or_recover(cls, root: Path, name: str) -> "Table":
        """The table for a writer: made if missing, repaired after a power loss, with all columns
        of this version, all durable. Raises StoreError for a table of a newer version.
        """
        folder = root / name
        with foreign_errors(folder):
            make_folder(folder)
            log = TableLog(folder / "_delta_log")
            if log.folder.exists():
                log.repair()
            if not log.entry(0).exists() and log.newest_checkpoint() < 0:
                _create(folder, name)
            fsync(folder)
        table = cls(root, name)
        table.add_later_columns()
        with foreign_errors(folder):
            table._log.sync(table.version)
        return table

    def add_later_columns(self) -> None:
        """Gives a table that an older version made the columns that came later: for writers.

        Raises StoreError for a table with columns of a newer version: a seal would lose them.
        """
        for _ in range(_ATTEMPTS):
            stored = {field.name for field in self._view().schema().fields}
            if unknown := stored - set(self.schema.names):
                names = ", ".join(sorted(unknown))
                raise StoreError(
                    f"{self.root} has columns of a newer version of rankscope: {names}; "
                    "it can be read but not written by this one"
                )
            later = [field for field in self.schema if field.name not in stored]
            if not later:
                return
            try:
                self._add_columns(pa.schema(later))
            except CommitConflict:  # of another writer, who perhaps did the same
                self.reload()
        raise StoreUnavailable(f"{self.root}: other writers came first {_ATTEMPTS} times")

    def _add_columns(self, later: pa.Schema) -> None:
        with self.lock, foreign_errors(self.root):
            fields = Schema.from_arrow(_stored_schema(later)).fields
            self._view().alter.add_columns(fields, post_commithook_properties=_NO_HOOKS)
            self._load()
            self._log.sync(self.version)

    @property
    def version(self) -> int:
        """Of the newest log entry in our view."""
        return int(self._delta.version())

    def refresh(self) -> None:
        """Sees what has been committed until now, by whomever."""
        with self.lock, foreign_errors(self.root):
            if self._stale or self.version - self._loaded >= CHECKPOINT_COMMITS:
                self._load()
            else:
                self._update()

    def reload(self) -> None:
        """Sees what is there, durably, after a failure whose outcome is unknown."""
        with self.lock, foreign_errors(self.root):
            self._versions.clear()
            self._stale = True
            self.refresh()
            self._log.sync(self.version)

    def files(self, step: int | None = None, processes: Collection[str] | None = None) -> list[str]:
        """Names of the live files, of one step, and only those that may hold the processes."""
        filters: list[tuple[str, str, object]] = []
        if step is not None:
            filters.append(("step", "=", step))
        if processes is not None:
            filters.append(("process", "in", list(processes)))
        with self.lock, foreign_errors(self.root):
            uris = self._view().file_uris(file_pruning_predicate=filters or None)
        # The last parts only: the rest of the path may be percent-encoded.
        return ["/".join(uri.split("/")[-self._name_parts :]) for uri in uris]

    def transaction(self, app_id: str) -> int:
        """The newest version that was committed for `app_id`, 0 when there is none."""
        with self.lock, foreign_errors(self.root):
            return self._view().transaction_version(app_id) or 0

    def learn(self, processes: Iterable[str]) -> None:
        """Looks up, in a new view, what is durable of processes that are not known yet."""
        with self.lock, foreign_errors(self.root):
            unknown = [process for process in processes if process not in self._versions]
            if unknown:
                self.refresh()
                # What is looked up is taken for durable, also when another writer died over it.
                self._log.sync(self.version)
            for process in unknown:
                self._versions[process] = self.transaction(process)

    def forget(self, process: str) -> None:
        """To be called when the process was possibly served by another collector meanwhile."""
        with self.lock:
            self._versions.pop(process, None)

    def stored_sequence(self, process: str) -> int:
        """Highest batch of a process in this table. It is remembered, since looking takes 0.3 ms
        and more: right as long as no other collector serves the process."""
        with self.lock:
            self.learn((process,))
            return self._versions[process]

    def append(self, files: Sequence[DataFile], transactions: Mapping[str, int]) -> None:
        """Commits new rows, durably; raises CommitConflict when another writer was first."""
        self._commit([file.add_action(data_change=True) for file in files], transactions)

    def replace(self, replacements: Sequence[Replacement]) -> None:
        """Commits all of them, durably. The caller holds the lock and has checked the versions."""
        actions = [action for one in replacements for action in one.actions()]
        self._commit(actions, {one.app_id: one.version for one in replacements})

    def checkpoint_if_due(self) -> None:
        """Every 50 commits: a durable checkpoint, old log entries cleaned up, a fresh view."""
        with self.lock, foreign_errors(self.root):
            if self.version - self._log.newest_checkpoint() < CHECKPOINT_COMMITS:
                return
            self._update()
            self._log.sync(self.version)
            self._delta.create_checkpoint()
            self._log.sync_checkpoint(self.version)
            self._delta.cleanup_metadata()
            self._load()

    def _commit(
        self, actions: list[AddAction | RemoveAction], transactions: Mapping[str, int]
    ) -> None:
        properties = CommitProperties(
            app_transactions=[Transaction(*item) for item in transactions.items()]
        )
        with self.lock, foreign_errors(self.root):
            if not self._log.folder.exists():  # delta-rs would make the folders anew
                raise FileNotFoundError(self._log.folder)
            view = self._view()
            view.create_write_transaction(
                actions,
                "append",
                view.schema(),
                self._partition_by,
                commit_properties=properties,
                post_commithook_properties=_NO_HOOKS,
            )
            self._update()
            self._log.sync(self.version)
            self._versions.update(transactions)

    def _view(self) -> DeltaTable:
        if self._stale:
            self._load()
        return self._delta

    def _update(self) -> None:
        try:
            self._delta.update_incremental()
        except DeltaError:
            # The entries after an old view are gone once a checkpoint replaced them.
            self._load()

    def _load(self) -> None:
        with foreign_errors(self.root):
            self._delta = DeltaTable(self.root)
        self._loaded = self.version
        self._stale = False


def _create(folder: Path, name: str) -> None:
    try:
        DeltaTable.create(
            folder,
            _stored_schema(TABLES[name]),
            partition_by=["step"] if name in PARTITIONED else None,
            configuration=_CONFIGURATION if "rank" in TABLES[name].names else None,
        )
    except DeltaError:
        # Another collector of this run made it meanwhile; if not, loading it says what is wrong.
        DeltaTable(folder)


def _stored_schema(schema: pa.Schema) -> pa.Schema:
    """The Delta schema: dictionaries are a matter of files."""
    return pa.schema(
        [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
            for field in schema
        ]
    )
