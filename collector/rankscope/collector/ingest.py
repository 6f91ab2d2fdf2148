"""From queues to acknowledgements: the thread of one run that commits batches.

Everything that happens to a run passes through one queue, so that what it knows has one owner. What
arrived is committed together, at once after a pause and else every `commit_interval_seconds`; only
when the commit has returned are batches acknowledged and the finisher told what to do.
"""

import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rankscope.collector import answers
from rankscope.collector.absence import Absence
from rankscope.collector.blobs.intake import Intake
from rankscope.collector.blobs.store import BlobStore
from rankscope.collector.book import Book, Effects
from rankscope.collector.config import Config
from rankscope.collector.counts import Counts, over_quota
from rankscope.collector.decode import DecodedBatch, MalformedBatch, decode, refused_batch
from rankscope.collector.events import MAX_INT64
from rankscope.collector.finisher import Finisher
from rankscope.collector.identity import State
from rankscope.collector.jobs import SayFarewell
from rankscope.collector.positions import Position, Positions, Session
from rankscope.collector.refused import set_aside
from rankscope.collector.rows import Row
from rankscope.collector.store import RunStore, StoreGone, StoreUnavailable
from rankscope.collector.worker import Worker
from rankscope.v1 import collector_pb2 as pb

log = logging.getLogger(__name__)

_RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0)
_COMMITS_TO_MAINTAIN = 20


@dataclass(frozen=True)
class _Pending:
    decoded: DecodedBatch
    why_refused: str | None
    session: Session | None
    size: int


class Committer(Worker):
    """Owns what is known about a run; other threads post calls of its methods."""

    def __init__(
        self,
        store: RunStore,
        book: Book,
        finisher: Finisher,
        config: Config,
        welcome: pb.Welcome,
        side_path: Path,
        blobs: BlobStore,
    ) -> None:
        """`welcome` is what every process is answered, but for its durable sequence."""
        super().__init__("rankscope-committer")
        self._store, self._book, self._finisher, self._config = store, book, finisher, config
        self._welcome, self._side_path = welcome, side_path
        self.counts = Counts()
        self.positions = Positions(store.durable_sequence)
        self._absence = Absence(self.positions, self, config)
        self._intake = Intake(
            blobs, self.positions, self, config.tensors == "auto", config.tensor_quota_bytes
        )
        self._pending: list[_Pending] = []
        self._pending_events = 0
        self._pending_since = self._committed_at = 0.0
        self._urgent = False
        self._later = Effects()  # rows that no acknowledgement waits for
        self._later_since: float | None = None
        self._commits = 0
        self.unavailable: str | None = None
        """Why nothing can be stored now."""
        self.deadline = float("inf")
        """Of time.monotonic(): when the end waits no longer for the layout and for seals."""
        self.finished = False
        """Whether it ended with nothing left to do."""
        self.busy = True
        """False while nothing waits to be done here."""

    # ------------------------------------------------------------------ what may be posted

    def hello(self, hello: pb.Hello, session: Session) -> None:
        """A stream began; an older one of the same process ends."""
        process = hello.process_uuid
        if any(pending.decoded.process == process for pending in self._pending):
            self.commit()
        position, effects = self._enter(hello)
        if (old := position.session) is not None:
            old.close()
        position.session = session
        session.send(self._answer(position))
        self._intake.resumed(process)
        self._store_later(effects)
        if position.left:
            self._finisher.add([self._farewell_job(process)])

    def batch(self, process: str, batch: pb.SequencedBatch, session: Session | None) -> None:
        """A batch arrived on a stream, or from a spool when there is no session."""
        size = len(batch.payload)
        position = self.positions[process]
        if session is not position.session:
            return _release(session, size)
        position.heard_at = time.monotonic()
        position.newest = max(position.newest, min(batch.newest_sequence, MAX_INT64))
        if batch.sequence <= position.accepted:
            if batch.sequence <= position.durable and session is not None:
                session.send(answers.ack(position.durable, self._intake.is_full))
            return _release(session, size)
        if session is not None and (full := over_quota(self._config, self.counts)) is not None:
            session.send(answers.refused(full))
            session.close()
            self.broken(process, session)
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
        pending = _Pending(decoded, why, session, size)
        if self._intake.must_hold(process, decoded.message.blobs):
            self._intake.hold(process, pending, decoded.message.blobs)
        else:
            self.admit(pending)

    def admit(self, pending: _Pending) -> None:
        """A batch may be committed: the tensors that it brings are durable."""
        if not self._pending:
            self._pending_since = time.monotonic()
        self._pending.append(pending)
        self._pending_events += pending.decoded.event_count
        self._urgent = self._urgent or pending.decoded.message.HasField("goodbye")

    def chunk(self, process: str, chunk: pb.TensorChunk, session: Session) -> None:
        """A part of a tensor arrived."""
        if session is self.positions[process].session:
            self._intake.chunk(process, chunk, session)
        else:
            session.release(len(chunk.data))

    def holds(self, process: str) -> bool:
        """Whether batches of the process wait for tensors."""
        return self._intake.holds(process)

    def exhausted(self, process: str) -> None:
        """Nothing more will come of the process, from nowhere."""
        self._intake.gone(process)

    def half_closed(self, process: str, session: Session) -> None:
        """No more will come on the stream; it ends once what came is acknowledged."""
        if any(pending.session is session for pending in self._pending):
            self.commit()
        position = self.positions.get(process)
        if position is not None and position.session is session and not position.left:
            session.close()
            self.broken(process, session)

    def broken(self, process: str, session: Session) -> None:
        """A stream ended."""
        position = self.positions.get(process)
        if position is not None and position.session is session:
            position.session = None
            self._intake.broken(process)
            self._absence.begin(position)

    def adopt(self, hello: pb.Hello) -> None:
        """Take in what a dead process left in its spool, which no stream will bring."""
        process = hello.process_uuid
        if self._absence.may_adopt(process):
            hello.delivered_later = self.positions.get(process) is None
            self._store_later(self._enter(hello)[1])
            self._absence.read_spool(process)

    def sealed(self, row: Row) -> None:
        """A step was sealed."""
        self._store_later(Effects(steps=[row]))

    def restored(self, missing: list[tuple[int, str]]) -> None:
        """After a restart: wait for the processes of before, write what the layout lacks."""
        for process in self._book.live():
            position = self.positions.enter(self._book.hello_of(process))
            self._absence.begin(position, self._config.restart_grace_seconds)
        for step, process in missing:
            self._book.steps.want_render(process, step, time.monotonic())

    def lost(self, process: str) -> None:
        """A process is lost."""
        self._store_later(self._book.gone(process, State.LOST, "", time.monotonic()))

    def say_farewell(self, process: str, folders: list[str]) -> None:
        """Everything of a process that left stands."""
        self.positions.send(process, answers.farewell(self._welcome.run_path, folders))
        position = self.positions.get(process)
        if position is not None and position.session is not None:
            position.session.close()

    def tell_all(self, text: str) -> None:
        """A line for every user's log."""
        self.positions.send_all(answers.notice("error", text))

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        try:
            while self._turn():
                pass
            self._end()
        except StoreGone:
            log.warning("the store was deleted")
        except Exception:
            log.exception("the run is given up")
        finally:
            self.positions.close_all()

    def _turn(self) -> bool:
        self._run_timers()
        self._absence.look()
        if self._commit_due() <= time.monotonic():
            self.commit()
        elif not self._pending:  # what is told now is stored
            self._finisher.add(self._book.due(time.monotonic()))
        done = self._take(self._next_due(), self._is_full)
        self.busy = done > 0 or self._has_work()
        return done >= 0

    def _end(self) -> None:
        self._intake.stop()
        self.commit()
        self._finisher.add(self._book.finish(time.monotonic()))
        self.finished = self._finisher.stop(self.deadline)
        self._drain()  # rows that tell of the last seals
        self._flush_later()

    def _next_due(self) -> float:
        due = min(self._commit_due(), self._absence.next_due(), self._next_timer())
        step_due = self._book.steps.next_due()
        return due if step_due is None else min(due, step_due)

    def _has_work(self) -> bool:
        waits = self._pending or self._later_since or self._timers or self._absence.busy()
        return bool(waits) or self._intake.busy() or not self._book.steps.idle()

    def _is_full(self) -> bool:
        return self._pending_events >= self._config.commit_rows

    def _commit_due(self) -> float:
        if self._urgent or self._is_full():
            return 0.0
        interval = self._config.commit_interval_seconds
        due = float("inf")
        if self._pending:
            due = max(self._pending_since, self._committed_at + interval)
        if self._later_since is not None:
            due = min(due, self._later_since + interval)
        return due

    # ------------------------------------------------------------------ committing

    def commit(self) -> None:
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
        self._count(pending, self._committed_at - now)
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
            self.positions[process].left = True
            self.positions[process].lost_at = None
        return self._book.batch(process, decoded.sequence, decoded.message, decoded.steps_seen, now)

    def _count(self, pending: list[_Pending], seconds: float) -> None:
        counts = self.counts
        counts.commits += 1
        counts.commit_seconds += seconds
        for item in pending:
            decoded, position = item.decoded, self.positions[item.decoded.process]
            counts.batches += 1
            counts.bytes += item.size
            counts.events += decoded.event_count
            counts.rows += decoded.records.num_rows
            counts.refused += item.why_refused is not None
            position.refused += item.why_refused is not None
            steps = [*decoded.steps_seen, *(event.step for event in decoded.message.steps)]
            if steps:
                position.step = max(steps if position.step is None else [position.step, *steps])
            if dropped := sum(drop.events for drop in decoded.message.drops):
                before = counts.dropped.get(decoded.process, 0)
                counts.dropped[decoded.process] = before + dropped

    def _acknowledge(self, pending: list[_Pending]) -> None:
        for item in pending:
            position = self.positions[item.decoded.process]
            position.durable = max(position.durable, item.decoded.sequence)
            _release(item.session, item.size)
        for process in dict.fromkeys(item.decoded.process for item in pending):
            if (session := self.positions[process].session) is not None:
                durable = self.positions[process].durable
                session.send(answers.ack(durable, self._intake.is_full))
                self.counts.acks += 1

    def _until_stored(self, store: Callable[[], object]) -> None:
        """Repeat while the disk refuses; agents are told when that begins and when it ends."""
        attempt = 0
        while True:
            try:
                store()
                break
            except (StoreUnavailable, OSError) as error:
                if self._stopping.is_set():
                    raise
                if self.unavailable is None:
                    log.error("nothing can be stored: %s", error)
                    self.unavailable = str(error)
                    self.positions.send_all(answers.no_space(self.unavailable))
                self._stopping.wait(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
                attempt += 1
        if self.unavailable is not None:
            self.unavailable = None
            log.info("the store takes batches again")
            self.positions.send_all(answers.notice("info", "the collector stores again"))

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

    def _enter(self, hello: pb.Hello) -> tuple[Position, Effects]:
        position = self.positions.enter(hello)
        position.left = self._book.has_left(hello.process_uuid)
        return position, Effects() if position.left else self._book.hello(hello)

    def _answer(self, position: Position) -> pb.FromCollector:
        welcome = pb.Welcome()
        welcome.CopyFrom(self._welcome)
        welcome.durable_sequence = position.durable
        return pb.FromCollector(welcome=welcome)

    def _farewell_job(self, process: str) -> SayFarewell:
        return SayFarewell(process, tuple(self._book.folders_of(process)))

    def _notify(self, effects: Effects) -> None:
        for process, level, text in effects.notices:
            log.info("to %s: %s", process, text)
            self.positions.send(process, answers.notice(level, text))


def _release(session: Session | None, size: int) -> None:
    if session is not None:
        session.release(size)
