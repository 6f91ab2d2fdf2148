"""The store of one run: batches in, exactly once; steps sealed; files kept few."""

import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rankscope.collector.decode import DecodedBatch
from rankscope.collector.schema import TABLES
from rankscope.collector.store.commit import Committer
from rankscope.collector.store.errors import StoreError, foreign_errors
from rankscope.collector.store.files import fsync, own_files, remove_files
from rankscope.collector.store.group import Group, Row
from rankscope.collector.store.reader import RunReader, side_path, tables_path
from rankscope.collector.store.seal import Replaced, fold, seal_steps
from rankscope.collector.store.tables import Table

#: How long readers may hold a view that names replaced files.
GRACE_SECONDS = 60.0

#: A small table with more files is folded into one.
MOST_SMALL_FILES = 100
_WRITERS = 4


class RunStore(RunReader):
    """The store of one run, for the collector that owns its streams. Any thread may call.

    Raises StoreUnavailable when the disk refuses: nothing is stored, the call may be repeated.
    """

    def __init__(self, tables: Mapping[str, Table], collector_id: str) -> None:
        super().__init__(tables)
        self._id = collector_id
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="rankscope-store")
        self._committer = Committer(tables, collector_id, self._pool)
        self._committing = threading.Lock()
        self._deleting = threading.Lock()
        self._replaced: deque[tuple[float, Table, tuple[str, ...]]] = deque()

    @classmethod
    def open(cls, run_path: Path, collector_id: str) -> "RunStore":
        """The store of the run: made if missing, repaired if torn, rid of this collector's orphans.

        No two live collectors may have the same id: letters, digits, "_" and "-".
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]+", collector_id):
            raise StoreError(f"collector id {collector_id!r}: allowed are letters, digits, _ and -")
        root = tables_path(run_path)
        with foreign_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            for folder in (root, side_path(run_path), run_path.parent):
                fsync(folder)
        store = cls({name: Table.create_or_recover(root, name) for name in TABLES}, collector_id)
        store._sweep_orphans()
        return store

    def durable_sequence(self, process: str) -> int:
        """The highest batch of the process that is stored in all tables, 0 when none is.

        Looks anew, some ms: to be asked when a process begins a stream, perhaps coming from another
        collector. After that each commit says by returning what is stored.
        """
        for table in self._tables.values():
            table.forget(process)
        return self._tables["nodes"].stored_sequence(process)

    def commit(
        self,
        batches: Sequence[DecodedBatch],
        steps: Sequence[Row] = (),
        processes: Sequence[Row] = (),
    ) -> None:
        """Stores the batches and rows durably; what is stored already is left out.

        Batches of a process come in ascending order. `steps` rows with a `batch` come in the same
        call as that batch; the other rows are stored once for each call that succeeds.
        """
        group = Group(batches, steps, processes)
        with self._committing:
            self._committer.commit(group)

    def append_steps(self, rows: Sequence[Row]) -> None:
        """Stores rows of `steps` that belong to no batch."""
        self.commit((), steps=rows)

    def append_processes(self, rows: Sequence[Row]) -> None:
        """Stores rows of `processes`."""
        self.commit((), processes=rows)

    def seal(self, step: int, ranks: Mapping[str, int]) -> int:
        """Rewrites a step as one file a table, sorted by (rank, process, seq, leaf); its events.

        `ranks` maps processes to ranks. Sealing again does nothing unless rows or ranks changed.
        """
        return self.seal_steps([step], ranks)[step]

    def seal_steps(self, steps: Sequence[int], ranks: Mapping[str, int]) -> dict[int, int]:
        """Seals several steps, all or none; step -> its events. Cheaper than one by one when they
        are small.
        """
        events: dict[int, int] = {}
        for name in ("records", "nodes"):
            replaced = seal_steps(self._tables[name], steps, ranks, self._id)
            for one in replaced.values():
                self._remember(self._tables[name], one)
            events = {step: one.rows for step, one in replaced.items()}
        return events

    def maintain(self) -> None:
        """Checkpoints, folding of small files and deletion of replaced ones, where due.

        To be called after commits, once acknowledged: it takes some 50 ms every 50 commits.
        """
        for name in ("stacks", "steps", "processes"):
            table = self._tables[name]
            self._remember(table, fold(table, self._id, MOST_SMALL_FILES))
        for table in self._tables.values():
            table.checkpoint_if_due()
        self._delete_replaced(time.monotonic() - GRACE_SECONDS)

    def close(self) -> None:
        """Deletes replaced files before their grace is over, because nobody would do it later."""
        self._pool.shutdown()
        self._delete_replaced(time.monotonic())

    def _remember(self, table: Table, replaced: Replaced) -> None:
        if replaced.old:
            self._replaced.append((time.monotonic(), table, replaced.old))

    def _delete_replaced(self, latest: float) -> None:
        """Deletes the files that were replaced at `latest` or before."""
        with self._deleting:
            while self._replaced and self._replaced[0][0] <= latest:
                _, table, names = self._replaced.popleft()
                remove_files(table.root, names)

    def _sweep_orphans(self) -> None:
        """Takes up the files of this collector that no log entry names: a crash left them."""
        for table in self._tables.values():
            live = set(table.files())
            orphans = tuple(name for name in own_files(table.root, self._id) if name not in live)
            # Readers may still hold those that were replaced just before the crash.
            self._remember(table, Replaced(0, orphans))
