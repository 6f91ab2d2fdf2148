"""Runs that are open: one service a run, and which run a process belongs to."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rankscope.collector import liveness, spool_reader
from rankscope.collector.blobs.layout import TensorFiles
from rankscope.collector.blobs.store import BlobStore
from rankscope.collector.book import Book
from rankscope.collector.config import Config
from rankscope.collector.contract import PROTOCOL_VERSION
from rankscope.collector.counts import over_quota, stored_events
from rankscope.collector.finisher import Finisher
from rankscope.collector.ingest import Committer
from rankscope.collector.jobs import RenderStep, SealStep
from rankscope.collector.layout import Layout
from rankscope.collector.memory import Memory
from rankscope.collector.positions import Session
from rankscope.collector.rows import process_of, sealed_row
from rankscope.collector.run_names import folder_name, known_name, marked
from rankscope.collector.steps import Seal
from rankscope.collector.store import RunStore, StoreError, StoreUnavailable, side_path
from rankscope.collector.store.errors import foreign_errors
from rankscope.collector.store.reader import tables_path
from rankscope.v1 import collector_pb2 as pb

log = logging.getLogger(__name__)

_PROCESS = re.compile(r"[0-9a-f]{32}")
RETRY_SECONDS = 5.0
_IDLE_SECONDS = 60.0


class BadHello(ValueError):
    """A Hello that cannot be served: names the field, its value and what is allowed."""


class TooMuch(Exception):
    """A limit is reached: names it; come again later."""


class RunService:
    """One open run: its store, what is known about it, and the two threads that work on it."""

    def __init__(self, run_path: Path, collector_id: str, config: Config, version: str) -> None:
        """Raises StoreUnavailable when the disk refuses."""
        self.run_path = run_path
        self.side_path = side_path(run_path)
        self._config = config
        self.idle_since = time.monotonic()
        self._store = RunStore.open(run_path, collector_id)
        run_path.mkdir(parents=True, exist_ok=True)
        rows, events = self._store.processes(), self._store.steps_rows().to_pylist()
        self._book = Book(config, rows, events)
        self._failed = False  # something that a restart would do again
        self._layout = Layout(run_path)
        blobs = BlobStore(self.side_path, collector_id)
        self._finisher = Finisher(self._store, self._layout, self, TensorFiles(blobs, self._layout))
        welcome = pb.Welcome(
            protocol_version=PROTOCOL_VERSION,
            collector_version=version,
            collector_id=collector_id,
            run=run_path.name,
            run_path=str(run_path),
            max_message_bytes=config.max_message_bytes,
        )
        self.committer = Committer(
            self._store, self._book, self._finisher, config, welcome, self.side_path, blobs
        )
        missing = [
            (step, process)
            for process, step, folder in self._book.in_layout()
            if self._book.steps.is_active(step) or not self._layout.folder(step, folder).is_dir()
        ]
        self.committer.post(lambda: self.committer.restored(missing))
        if config.quota_rows:
            self.committer.counts.events_before = stored_events(tables_path(run_path))
        self.measure()
        self._finisher.start()
        self.committer.start()

    def takes(self, hello: pb.Hello) -> bool:
        """Whether a process that names no run belongs to this one."""
        return self.committer.ask(lambda: self._book.belongs(process_of(hello)))

    def measure(self) -> None:
        """Look what the tables take on the disk. Blocks."""
        self.committer.counts.measure(tables_path(self.run_path))

    def why_full(self, process: str | None = None) -> str | None:
        """Why the process, or any, may not stream into this run: a quota, or too many processes."""
        positions = self.committer.positions
        limit = self._config.max_processes
        if process and positions.get(process) is None and positions.count() >= limit:
            return f"the run has {positions.count()} processes, the limit (max_processes)"
        return over_quota(self._config, self.committer.counts)

    def folder_of(self, process: str) -> str:
        """rank{R} or proc{pid} in the layout, or ""; from any thread."""
        member = self._book.identity.members.get(process)
        return (member.folder or "") if member is not None else ""

    @property
    def seals(self) -> tuple[int, float]:
        """Steps sealed since the run was opened, and the seconds that took."""
        return self._finisher.seals, self._finisher.seal_seconds

    def is_busy(self) -> bool:
        """Whether anything waits to be stored, written or sealed."""
        return self.committer.busy or not self._finisher.idle()

    def is_closed(self) -> bool:
        """Whether its thread has ended, by order or by a failure."""
        return not self.committer.is_alive()

    def close(self, deadline: float = float("inf")) -> bool:
        """Commit what is there, then render and seal it until the deadline (of time.monotonic());
        whether nothing is left to do.
        """
        self.committer.deadline = deadline
        self.committer.stop()
        self._finisher.stop(deadline)
        self._store.close()
        return self.committer.finished and not self._failed

    # ------------------------------------------------------------------ what the finisher reports

    def sealed(self, seal: Seal, events: int) -> None:
        """A step was sealed: `steps` says so."""
        self.committer.post(lambda: self.committer.sealed(sealed_row(seal, events)))

    def failed(self, job: RenderStep | SealStep, error: Exception) -> None:
        """Tried again when the disk was to blame."""
        self._failed = True
        if isinstance(error, OSError | StoreUnavailable):
            again = lambda: self._finisher.add([job])  # noqa: E731
            self.committer.post(lambda: self.committer.after(RETRY_SECONDS, again))
        else:
            text = f"step {job.step}" if isinstance(job, RenderStep) else f"step {job.seal.step}"
            self.committer.post(lambda: self.committer.tell_all(f"{text} is not written: {error}"))

    def farewell(self, process: str, folders: Sequence[str]) -> None:
        """A process that left may go."""
        self.committer.post(lambda: self.committer.say_farewell(process, list(folders)))


class Runs:
    """The open runs of a store folder, or the one run of an embedded collector."""

    def __init__(
        self,
        config: Config,
        collector_id: str,
        version: str,
        *,
        store: Path | None = None,
        run_path: Path | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Either `store`, the folder of all runs, or `run_path`, the only run."""
        self._memory = memory
        self._config, self._id, self._version = config, collector_id, version
        self._store, self._only = store, run_path
        self._open: dict[Path, RunService] = {}
        self._keys: dict[Path, str] = {}
        self._lock = threading.Lock()

    def enter(self, hello: pb.Hello, session: Session) -> RunService:
        """The run the process belongs to, which has been told of it. Blocks on the disk."""
        if not _PROCESS.fullmatch(hello.process_uuid):
            raise BadHello(f"process_uuid {hello.process_uuid!r}: expected 32 hex digits")
        with self._lock:
            service = self._service_of(hello)
            service.idle_since = time.monotonic()
            if (full := service.why_full(hello.process_uuid)) is not None:
                raise BadHello(full)
            if self._memory is not None:
                self._memory.heard_of(hello)
            service.committer.post(lambda: service.committer.hello(hello, session))
            return service

    def resume(self) -> None:
        """Go on where a killed collector was: open its runs, take in the spools of dead processes.

        Blocks; what a run lacks is stored, written and sealed by its own threads.
        """
        if self._memory is None:
            return
        for path in self._memory.runs():
            if not tables_path(path).is_dir():
                self._memory.closed(path)
                continue
            try:
                with self._lock:
                    self._service(path, "")
            except (StoreError, OSError) as error:
                log.error("%s is not opened: %s", path, error)
        for spool in self._memory.spools():
            self.take_in(spool)

    def look_for_dead(self) -> None:
        """Take in the spools of processes that died before they came back to this collector."""
        if self._memory is not None:
            for spool in self._memory.spools():
                self._adopt(spool)

    def take_in(self, spool: Path) -> None:
        """Take in what dead processes left in a spool folder."""
        spool_reader.sweep(spool)
        self._adopt(spool)

    def _adopt(self, spool: Path) -> None:
        for process, segments in spool_reader.left_over(spool).items():
            hello = spool_reader.read_hello(segments)
            if hello is None or hello.process_uuid != process:
                log.warning("%s: no Hello in it, left as it is", segments[0])
                continue
            hello.spool_path = str(spool)
            if liveness.is_gone(hello):
                with self._lock:
                    committer = self._service_of(hello).committer
                    committer.post(partial(committer.adopt, hello))

    def open(self) -> list[RunService]:
        """The open runs."""
        with self._lock:
            return list(self._open.values())

    def close_idle(self) -> None:
        """Close runs that nobody streams to for a while."""
        with self._lock:
            now = time.monotonic()
            for path, service in list(self._open.items()):
                if service.committer.positions.sessions() or service.is_busy():
                    service.idle_since = now
                service.measure()
                if service.is_closed() or now - service.idle_since > _IDLE_SECONDS:
                    del self._open[path]
                    self._close(path, service)

    def close(self) -> None:
        """Commit everything; render and seal it for `close_seconds`."""
        with self._lock:
            deadline = time.monotonic() + self._config.close_seconds
            for path, service in self._open.items():
                self._close(path, service, deadline)
            self._open.clear()

    # ------------------------------------------------------------------ details

    def _service_of(self, hello: pb.Hello) -> RunService:
        path = self._path_of(hello)
        return self._service(path, "" if hello.run else hello.run_key, hello.run or path.name)

    def _close(self, path: Path, service: RunService, deadline: float = float("inf")) -> None:
        if service.close(deadline) and self._memory is not None:
            self._memory.closed(path)

    def _service(self, path: Path, run_key: str, run: str = "") -> RunService:
        service = self._open.get(path)
        if service is not None and service.is_closed():
            service.close()
            service = None
        if service is None:
            if len(self._open) >= self._config.max_open_runs:
                raise TooMuch(f"{len(self._open)} runs are open, the limit (max_open_runs)")
            # First the key: a collector that is killed here finds the run again, and uses it.
            self._keys[path] = _mark(side_path(path), run_key, run)
            service = RunService(path, self._id, self._config, self._version)
            self._open[path] = service
            if self._memory is not None:
                self._memory.opened(path)
        return service

    def _path_of(self, hello: pb.Hello) -> Path:
        if self._only is not None:
            return self._only
        assert self._store is not None
        if hello.run:
            return self._path_named(self._store, hello.run)
        return self._run_of_key(self._store, hello) or self._new_run(self._store, hello.run_key)

    def _path_named(self, store: Path, run: str) -> Path:
        """The folder of a run; a file system that takes two names for one gets them told apart."""
        path = store / folder_name(run)
        if path in self._open:
            return path
        if known_name(side_path(path)) not in (None, run):
            path = store / marked(path.name, run)
        return path

    def _run_of_key(self, store: Path, hello: pb.Hello) -> Path | None:
        for path, service in reversed(self._open.items()):
            if self._keys[path] == hello.run_key and not service.is_closed():
                if service.takes(hello):
                    return path
        if not hello.run_key:
            return None
        marks = [m for m in store.glob("*.rankscope/run.json") if _key(m) == hello.run_key]
        if not marks:
            return None
        newest = max(marks, key=lambda mark: mark.stat().st_mtime)
        path = store / newest.parent.name.removesuffix(".rankscope")
        if path in self._open or not self._service(path, hello.run_key).takes(hello):
            return None
        return path

    def _new_run(self, store: Path, run_key: str) -> Path:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{_slug(run_key)}"
        number = 1
        path = store / name
        while path.exists() or side_path(path).exists():
            number += 1
            path = store / f"{name}-{number}"
        return path


def _mark(folder: Path, run_key: str, run: str) -> str:
    """Keep the key a run was named for, so that a restarted collector finds it again, and its name
    as it came."""
    mark = folder / "run.json"
    with foreign_errors(mark):
        if mark.exists():
            return _key(mark) or ""
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / "run.json.tmp"
        aside.write_text(json.dumps({"run_key": run_key, "run": run}))
        os.replace(aside, mark)
    return run_key


def _key(mark: Path) -> str | None:
    try:
        return str(json.loads(mark.read_text())["run_key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _slug(run_key: str) -> str:
    words = [w for w in run_key.split(":")[1:] if not re.fullmatch(r"[0-9a-f-]{32,36}", w)]
    return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(words) or run_key).strip("-.")[:60] or "run"
