"""From queues to acknowledgements: the thread of one run that commits batches.

Everything that happens to a run passes through one queue, so that what it knows has one owner. What
arrived is committed together, at once after a pause and else every `commit_interval_seconds`; only
when the commit has returned are batches acknowledged and the finisher told what to do.
"""

import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rankscope.collector import answers, liveness, spool_reader
from rankscope.collector.book import Book, Effects
from rankscope.collector.config import Config
from rankscope.collector.decode import DecodedBatch, MalformedBatch, decode, refused_batch
from rankscope.collector.finisher import Finisher
from rankscope.collector.identity import State
from rankscope.collector.jobs import SayFarewell
from rankscope.collector.refused import set_aside
from rankscope.collector.rows import Row
from rankscope.collector.store import RunStore, StoreGone, StoreUnavailable
from rankscope.v1 import collector_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

_IMPORT_BYTES = 8 << 20
_RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0)
_COMMITS_TO_MAINTAIN = 20
_LOOK_SECONDS = 1.0  # how often lost processes of this host are looked for


class Session(Protocol):
    """The stream of one process. Called from the committer's and finisher's threads."""

    def send(self, message: pb.FromCollector) -> None:
        """Put a message on the stream."""

    def close(self) -> None:
        """End the stream after what was sent."""

    def release(self, size: int) -> None:
        """So many bytes that were read are not held any more."""


@dataclass
class _Position:
    """How far a process is. `accepted` counts what waits for its commit, too."""

    hello: pb.Hello
    accepted: int
    durable: int
    session: Session | None = None
    lost_at: float | None = None  # when it counts as lost if it does not come back
    left: bool = False
    watched: bool = False  # lost, but not provably gone


@dataclass(frozen=True)
class _Pending:
    decoded: DecodedBatch
    why_refused: str | None
    session: Session | None
    size: int


@dataclass
class _Import:
    process: str
    folder: Path
    frames: Iterator[spool_reader.Frame]


class Committer(threading.Thread):
    """Owns what is known about a run. Other threads only use `post`, `stop` and the properties."""

    def __init__(
        self,
        store: RunStore,
        book: Book,
        finisher: Finisher,
        config: Config,
        welcome: pb.Welcome,
        side_path: Path,
    ) -> None:
        """`welcome` is what every process is answered, but for its durable sequence."""
        super().__init__(name="rankscope-committer", daemon=True)
        self._store, self._book, self._finisher, self._config = store, book, finisher, config
        self._welcome, self._side_path = welcome, side_path
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._positions: dict[str, _Position] = {}
        self._pending: list[_Pending] = []
        self._pending_events = 0
        self._pending_since = self._committed_at = 0.0
        self._urgent = False
        self._later = Effects()  # rows that no acknowledgement waits for
        self._later_since: float | None = None
        self._imports: list[_Import] = []
        self._imported: set[str] = set()
        self._look_at = 0.0
        self._commits = 0
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._stopping = threading.Event()
        self.unavailable: str | None = None
        """Why nothing can be stored now."""
        self.store_is_gone = False
        self.failed: str | None = None
        self.busy = True
        """False while nothing waits to be done here."""

    # ------------------------------------------------------------------ from other threads

    def post(self, call: Callable[[], None]) -> None:
        """Have something done in this thread, in order."""
        self._inbox.put(call)

    def stop(self) -> None:
        """Commit what was posted, hand all renders and seals to the finisher, end."""
        self._inbox.put(None)
        self._stopping.set()
        self.join()

    def sessions(self) -> int:
        """Processes with a stream."""
        return sum(p.session is not None for p in list(self._positions.values()))

    def waiting_for(self) -> int:
        """Processes that broke off and may come back."""
        positions = list(self._positions.values())
        return sum(p.session is None and not p.left for p in positions)

    def ask(self, question: Callable[[], T]) -> T:
        """The answer of this thread to something only it may look at."""
        answer: Future[T] = Future()
        self.post(lambda: answer.set_result(question()))
        while self.is_alive():
            with suppress(TimeoutError):
                return answer.result(timeout=1.0)
        raise StoreGone("the run is closed")

    # ------------------------------------------------------------------ what may be posted

    def hello(self, hello: pb.Hello, session: Session) -> None:
        """A stream began; an older one of the same process ends."""
        process = hello.process_uuid
        if any(pending.decoded.process == process for pending in self._pending):
            self._commit()
        position, effects = self._enter(hello)
        if (old := position.session) is not None:
            old.close()
        position.session = session
        session.send(self._answer(position))
        self._store_later(effects)
        if position.left:
            self._finisher.add([self._farewell_job(process)])
        if self.unavailable:
            session.send(answers.no_space(self.unavailable))

    def batch(self, process: str, batch: pb.SequencedBatch, session: Session | None) -> None:
        """A batch arrived on a stream, or from a spool when there is no session."""
        size = len(batch.payload)
        position = self._positions[process]
        if session is not position.session:
            return _release(session, size)
        if batch.sequence <= position.accepted:
            if batch.sequence <= position.durable and session is not None:
                session.send(answers.ack(position.durable))
            return _release(session, size)
        decoded, why = self._decode(process, batch)
        if not answers.follows(position.accepted, batch.sequence, decoded.message):
            if session is not None:
                session.send(answers.gap(position.accepted, batch.sequence))
                session.close()
                self.broken(process, session)
                return _release(session, size)
            log.warning("%s: batches up to %d are missing", process, batch.sequence - 1)
        if why is not None and session is not None:
            session.send(answers.invalid(why, batch.sequence))
        position.accepted = batch.sequence
        if not self._pending:
            self._pending_since = time.monotonic()
        self._pending.append(_Pending(decoded, why, session, size))
        self._pending_events += decoded.event_count
        self._urgent = self._urgent or decoded.message.HasField("goodbye")

    def half_closed(self, process: str, session: Session) -> None:
        """No more will come on the stream; it ends once what came is acknowledged."""
        if any(pending.session is session for pending in self._pending):
            self._commit()
        position = self._positions.get(process)
        if position is not None and position.session is session and not position.left:
            session.close()
            self.broken(process, session)

    def broken(self, process: str, session: Session) -> None:
        """A stream ended."""
        position = self._positions.get(process)
        if position is None or position.session is not session:
            return
        position.session = None
        if not position.left:
            gone = position.hello.delivered_later or liveness.is_gone(position.hello)
            wait = 0.0 if gone else self._config.lost_after_seconds
            position.lost_at = time.monotonic() + wait

    def adopt(self, hello: pb.Hello) -> None:
        """Take in what a dead process left in its spool, which no stream will bring."""
        process = hello.process_uuid
        known = self._positions.get(process)
        if process in self._imported or (known is not None and known.session is not None):
            return
        hello.delivered_later = known is None
        self._store_later(self._enter(hello)[1])
        self._import(process)

    def sealed(self, row: Row) -> None:
        """A step was sealed."""
        self._store_later(Effects(steps=[row]))

    def after(self, wait_seconds: float, call: Callable[[], None]) -> None:
        """Have something done later."""
        self._timers.append((time.monotonic() + wait_seconds, call))

    def restored(self, missing: list[tuple[int, str]]) -> None:
        """After a restart: wait for the processes of before, write what the layout lacks."""
        now = time.monotonic()
        for process in self._book.live():
            hello = self._book.hello_of(process)
            position = _Position(hello, 0, 0, lost_at=now + self._config.restart_grace_seconds)
            position.accepted = position.durable = self._store.durable_sequence(process)
            if liveness.is_gone(position.hello):
                position.lost_at = now
            self._positions[process] = position
        for step, process in missing:
            self._book.steps.want_render(process, step, now)

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        try:
            while self._turn():
                pass
            self._end()
        except StoreGone:
            self.store_is_gone = True
            log.warning("the store was deleted")
        except Exception as error:
            log.exception("the committer failed")
            self.failed = str(error)
        finally:
            for position in self._positions.values():
                if position.session is not None:
                    position.session.close()

    def _turn(self) -> bool:
        self._run_timers()
        self._look_after_the_lost()
        self._pull_imports()
        if self._commit_due() <= time.monotonic():
            self._commit()
        elif not self._pending:  # what is told now is stored
            self._finisher.add(self._book.due(time.monotonic()))
        try:
            call = self._inbox.get(timeout=self._wait())
        except queue.Empty:
            self.busy = self._has_work()
            return True
        self.busy = True
        here = self._inbox.qsize()  # what came meanwhile shares the next commit
        while call is not None:
            call()
            if here == 0 or self._pending_events >= self._config.commit_rows:
                return True
            here -= 1
            call = self._inbox.get()
        return False

    def _end(self) -> None:
        if self._pending:
            self._commit()
        self._finisher.add(self._book.finish(time.monotonic()))
        self._finisher.stop()
        while True:  # rows that tell of the last seals
            try:
                call = self._inbox.get_nowait()
            except queue.Empty:
                break
            if call is not None:
                call()
        self._flush_later()

    def _run_timers(self) -> None:
        now = time.monotonic()
        due = [call for at, call in self._timers if at <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for call in due:
            call()

    def _wait(self) -> float:
        times = [self._commit_due(), self._book.steps.next_due(), self._look_at]
        times += [at for at, _ in self._timers]
        times += [p.lost_at for p in self._positions.values() if p.lost_at is not None]
        soonest = min(at for at in times if at is not None)
        return max(0.0, min(soonest - time.monotonic(), 1.0)) if not self._imports else 0.0

    def _has_work(self) -> bool:
        waiting = any(p.lost_at is not None for p in self._positions.values())
        return (
            bool(self._pending or self._imports or self._later_since or self._timers or waiting)
            or not self._book.steps.idle()
        )

    def _commit_due(self) -> float:
        if self._urgent or self._pending_events >= self._config.commit_rows:
            return 0.0
        interval = self._config.commit_interval_seconds
        due = float("inf")
        if self._pending:
            due = max(self._pending_since, self._committed_at + interval)
        if self._later_since is not None:
            due = min(due, self._later_since + interval)
        return due

    # ------------------------------------------------------------------ committing

    def _commit(self) -> None:
        """Store what waits, then acknowledge it, then have done what follows from it."""
        pending, self._pending, self._pending_events = self._pending, [], 0
        self._urgent = False
        if not pending:
            return self._flush_later()
        now = time.monotonic()
        effects = self._take_later()
        for item in pending:
            effects.add(self._tell(item, now))
        left = [
            (item.decoded.process, item.decoded.message.goodbye.reason)
            for item in pending
            if item.decoded.message.HasField("goodbye")
        ]
        batches = [item.decoded for item in pending]
        self._until_stored(
            lambda: self._store.commit(batches, steps=effects.steps, processes=effects.processes)
        )
        self._committed_at = time.monotonic()
        self._commits += 1
        if self._commits % _COMMITS_TO_MAINTAIN == 0:
            self._finisher.maintain_soon()
        self._acknowledge(pending)
        self._finisher.add(effects.jobs)
        for process, reason in left:
            self._store_later(self._book.gone(process, State.LEFT, reason, now))
        self._finisher.add(self._book.due(self._committed_at))
        self._finisher.add([self._farewell_job(process) for process, _ in left])
        self._notify(effects)

    def _tell(self, item: _Pending, now: float) -> Effects:
        decoded = item.decoded
        process = decoded.process
        if item.why_refused is not None:
            return self._book.refused(process, decoded.sequence, item.why_refused)
        if decoded.message.HasField("goodbye"):
            self._positions[process].left = True
            self._positions[process].lost_at = None
        return self._book.batch(process, decoded.sequence, decoded.message, decoded.steps_seen, now)

    def _acknowledge(self, pending: list[_Pending]) -> None:
        for item in pending:
            position = self._positions[item.decoded.process]
            position.durable = max(position.durable, item.decoded.sequence)
            _release(item.session, item.size)
        for process in dict.fromkeys(item.decoded.process for item in pending):
            if (session := self._positions[process].session) is not None:
                session.send(answers.ack(self._positions[process].durable))

    def _until_stored(self, store: Callable[[], object]) -> None:
        """Repeat while the disk refuses; agents are told when that begins and when it ends."""
        attempt = 0
        while True:
            try:
                store()
                break
            except StoreUnavailable as error:
                if self._stopping.is_set():
                    raise
                if self.unavailable is None:
                    log.error("nothing can be stored: %s", error)
                    self.unavailable = str(error)
                    self._tell_all(answers.no_space(self.unavailable))
                self._stopping.wait(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
                attempt += 1
        if self.unavailable is not None:
            self.unavailable = None
            log.info("the store takes batches again")
            self._tell_all(answers.notice("info", "the collector stores again"))

    def _store_later(self, effects: Effects) -> None:
        """Rows that no acknowledgement waits for; they come with the next commit or soon."""
        self._finisher.add(effects.jobs)
        self._notify(effects)
        self._later.processes += effects.processes
        self._later.steps += effects.steps
        if self._later_since is None and (self._later.processes or self._later.steps):
            self._later_since = time.monotonic()

    def _flush_later(self) -> None:
        rows = self._take_later()
        if rows.processes:
            self._until_stored(lambda: self._store.append_processes(rows.processes))
        if rows.steps:
            self._until_stored(lambda: self._store.append_steps(rows.steps))

    def _take_later(self) -> Effects:
        rows, self._later, self._later_since = self._later, Effects(), None
        return rows

    # ------------------------------------------------------------------ processes

    def _enter(self, hello: pb.Hello) -> tuple[_Position, Effects]:
        process = hello.process_uuid
        position = self._positions.get(process)
        if position is None:
            durable = self._store.durable_sequence(process)
            position = self._positions[process] = _Position(hello, durable, durable)
        position.hello = hello
        position.lost_at = None
        position.watched = False
        position.left = self._book.has_left(process)
        if position.left:
            return position, Effects()
        return position, self._book.hello(hello)

    def _look_after_the_lost(self) -> None:
        now = time.monotonic()
        for process, position in list(self._positions.items()):
            if position.lost_at is not None and position.lost_at <= now:
                position.lost_at = None
                self._lose(process, position)
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        for process, position in list(self._positions.items()):
            if position.watched and liveness.is_gone(position.hello):
                position.watched = False
                self._import(process)

    def _lose(self, process: str, position: _Position) -> None:
        if liveness.is_gone(position.hello):
            self._import(process)
        else:
            position.watched = not position.hello.delivered_later
            self._store_later(self._book.gone(process, State.LOST, "", time.monotonic()))
            position.left = position.hello.delivered_later

    def _import(self, process: str) -> None:
        """Read the rest of a dead process from its spool; then it has left or is lost."""
        position = self._positions[process]
        folder = Path(position.hello.spool_path or "/nonexistent")
        segments = spool_reader.left_over(folder).get(process, [])
        frames = spool_reader.read_batches(segments, after=position.accepted)
        self._imports.append(_Import(process, folder, frames))
        self._imported.add(process)

    def _pull_imports(self) -> None:
        size = 0
        while self._imports and size < _IMPORT_BYTES and not self._urgent:
            current = self._imports[0]
            frame = next(current.frames, None)
            if frame is None:
                self._imports.pop(0)
                self._end_import(current)
                continue
            size += len(frame.payload)
            batch = pb.SequencedBatch(
                sequence=frame.sequence, payload=frame.payload, crc32=frame.crc32
            )
            self.batch(current.process, batch, None)
        if size:
            self._commit()

    def _end_import(self, ended: _Import) -> None:
        self._commit()
        position = self._positions[ended.process]
        if not position.left:
            position.left = True
            lost = self._book.gone(ended.process, State.LOST, "", time.monotonic())
            self._store_later(lost)
        spool_reader.remove(ended.folder, ended.process, position.durable)

    # ------------------------------------------------------------------ details

    def _decode(self, process: str, batch: pb.SequencedBatch) -> tuple[DecodedBatch, str | None]:
        """The batch, or what stands for it when it is malformed, and why."""
        mode = self._book.row(process)["summary_mode"]
        try:
            if zlib.crc32(batch.payload) != batch.crc32:
                raise MalformedBatch("crc32", "is not that of the payload")
            return decode(
                batch.payload, process=process, sequence=batch.sequence, summary_mode=mode
            ), None
        except MalformedBatch as error:
            log.warning("batch %d of %s is refused: %s", batch.sequence, process, error)
            self._until_stored(lambda: set_aside(self._side_path, process, batch))
            return refused_batch(process, batch.sequence), str(error)

    def _answer(self, position: _Position) -> pb.FromCollector:
        welcome = pb.Welcome()
        welcome.CopyFrom(self._welcome)
        welcome.durable_sequence = position.durable
        return pb.FromCollector(welcome=welcome)

    def _farewell_job(self, process: str) -> SayFarewell:
        return SayFarewell(process, tuple(self._book.folders_of(process)))

    def say_farewell(self, process: str, folders: list[str]) -> None:
        """Everything of a process that left stands."""
        position = self._positions.get(process)
        if position is None or position.session is None:
            return
        position.session.send(answers.farewell(self._welcome.run_path, folders))
        position.session.close()

    def _notify(self, effects: Effects) -> None:
        for process, level, text in effects.notices:
            log.info("to %s: %s", process, text)
            position = self._positions.get(process)
            if position is not None and position.session is not None:
                position.session.send(answers.notice(level, text))

    def tell_all(self, text: str) -> None:
        """A line for every user's log."""
        self._tell_all(answers.notice("error", text))

    def _tell_all(self, message: pb.FromCollector) -> None:
        for position in self._positions.values():
            if position.session is not None:
                position.session.send(message)


def _release(session: Session | None, size: int) -> None:
    if session is not None:
        session.release(size)
