"""One call of Collect as a state machine: says hello, sends what the outbox holds, hears answers.

No gRPC in here. gRPC's thread pulls `requests()`, the sender's thread calls `hear()` with what
comes back, the pump's thread calls `nudge()` and `overdue()`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.segment import Stored, crc32
from rankscope.agent.transport.spool import Outbox
from rankscope.agent.transport.tensor_files import TensorReader
from rankscope.v1 import collector_pb2 as pb

LogFunction = Callable[[str, str], None]
"""log(level, text): level is "info", "warning" or "error"."""

GAP_PAUSE_SECONDS = 0.1


class Listener(Protocol):
    """Who is told what the collector says; called from the sender's thread."""

    def welcomed(self, welcome: pb.Welcome) -> None: ...

    def acknowledged(self, sequence: int) -> None:
        """Everything up to here is durable."""

    def refuses_tensors(self, refuses: bool) -> None:
        """Whether the collector wants no new tensors: its quota is used up."""

    def refused(self, sequence: int, message: str) -> None:
        """The collector set this batch aside; it counts as handled."""

    def troubled(self, problem: pb.Problem) -> None: ...

    def farewell(self, farewell: pb.Farewell) -> None: ...

    def noticed(self, notice: pb.Notice) -> None: ...


class Stream:
    """Sends in sequence, at most `in_flight_bytes` unacknowledged, a heartbeat when silent."""

    def __init__(
        self, config: TransportConfig, hello: pb.Hello, outbox: Outbox, listener: Listener
    ) -> None:
        self.welcome: pb.Welcome | None = None
        self.started = time.monotonic()
        self.sent_bytes = 0
        self.sent_batches = 0
        self.failure: Exception | None = None
        """What ended the requests, if they ended by an error of ours."""
        self.retry_after_seconds = 0.0
        self._config = config
        self._hello = hello
        self._outbox = outbox
        self._listener = listener
        self._changed = threading.Condition()
        self._done = False
        self._next = 1
        self._durable = 0
        self._held: Stored | None = None
        self._in_flight: deque[tuple[int, int]] = deque()
        self._in_flight_bytes = 0
        self._paused_until = 0.0
        self._last_sent = self._last_heard = self.started
        self._answer_due = True  # to the hello
        self._wanted: deque[bytes] = deque()
        self._tensor: TensorReader | None = None
        self._last_heartbeat = self.started

    def requests(self) -> Iterator[pb.FromAgent]:
        """What to send; ends when the stream is finished. Never raises."""
        try:
            yield pb.FromAgent(hello=self._hello)
            while (message := self._await_message()) is not None:
                yield message
        except Exception as error:
            self.failure = error

    def nudge(self) -> None:
        """The outbox has grown."""
        with self._changed:
            self._changed.notify()

    def finish(self) -> None:
        """Send no more; the collector then ends the call."""
        with self._changed:
            self._done = True
            self._changed.notify()

    def overdue(self, now: float) -> str | None:
        """Why the stream must be given up, or None."""
        if self.failure is not None:
            return f"{type(self.failure).__name__}: {self.failure}"
        silent = now - self._last_heard
        if self._answer_due and silent > self._config.ack_timeout_seconds:
            return f"nothing heard for {silent:.0f} s"
        return None

    def hear(self, message: pb.FromCollector) -> None:
        """Take in one answer and tell the listener."""
        self._last_heard = time.monotonic()
        kind = message.WhichOneof("message")
        if kind == "ack":
            self._listener.refuses_tensors(message.ack.refuses_tensors)
            self._heard_durable(message.ack.durable_sequence)
        elif kind == "welcome":
            self._heard_welcome(message.welcome)
        elif kind == "want":
            with self._changed:
                self._wanted.extend(message.want.digests)
                self._changed.notify()
        elif kind == "problem":
            self._heard_problem(message.problem)
        elif kind == "farewell":
            self._listener.farewell(message.farewell)
        elif kind == "notice":
            self._listener.noticed(message.notice)

    def _heard_welcome(self, welcome: pb.Welcome) -> None:
        if welcome.protocol_version < self._hello.protocol_version:
            return self._refuse(welcome)
        with self._changed:
            self.welcome = welcome
            self._resume_after(welcome.durable_sequence)
            self._answer_due = False
            self._changed.notify()
        self._listener.welcomed(welcome)
        self._listener.acknowledged(welcome.durable_sequence)

    def _refuse(self, welcome: pb.Welcome) -> None:
        """An older collector would misread what we send: it stays in the spool."""
        text = (
            f"collector {welcome.collector_version or 'of no version'} speaks version "
            f"{welcome.protocol_version} of the contract, this agent version "
            f"{self._hello.protocol_version}: upgrade the collector"
        )
        self._heard_problem(pb.Problem(code=pb.Problem.REFUSED, message=text, closes_stream=True))
        self.finish()

    def _heard_durable(self, sequence: int) -> None:
        with self._changed:
            self._durable = max(self._durable, sequence)
            self._release_up_to(sequence)
            self._answer_due = bool(self._in_flight)
            self._changed.notify()
        self._listener.acknowledged(sequence)

    def _heard_problem(self, problem: pb.Problem) -> None:
        with self._changed:
            pause = problem.retry_after_seconds
            if problem.code == pb.Problem.SEQUENCE_GAP:
                self._resume_after(self._durable)
                pause = max(pause, GAP_PAUSE_SECONDS)
            if problem.closes_stream:
                self.retry_after_seconds = pause
            elif pause:
                self._paused_until = self._last_heard + pause
            self._changed.notify()
        if problem.code == pb.Problem.INVALID and problem.refused_sequence:
            self._listener.refused(problem.refused_sequence, problem.message)
        else:
            self._listener.troubled(problem)

    def _resume_after(self, sequence: int) -> None:
        self._durable = sequence
        self._next = sequence + 1
        self._held = None
        self._in_flight.clear()
        self._in_flight_bytes = 0

    def _release_up_to(self, sequence: int) -> None:
        while self._in_flight and self._in_flight[0][0] <= sequence:
            self._in_flight_bytes -= self._in_flight.popleft()[1]

    def _await_message(self) -> pb.FromAgent | None:
        with self._changed:
            while not self._done:
                now = time.monotonic()
                message = self._batch(now) if self.welcome is not None else None
                if message is None and self._is_silent(now):
                    message = pb.FromAgent(heartbeat=pb.Heartbeat(time=time.time()))
                    self._last_heartbeat = now
                if message is None:
                    message = self._chunk()
                if message is not None:
                    self._last_sent = now
                    self._expect_answer(now)
                    return message
                self._changed.wait(self._patience(now))
        return None

    def _is_silent(self, now: float) -> bool:
        heartbeat = self._config.heartbeat_seconds
        if self._wanted or self._tensor is not None:  # chunks are not answered, so this asks
            return now - self._last_heartbeat >= heartbeat
        return self.welcome is not None and now - self._last_sent >= heartbeat

    def _chunk(self) -> pb.FromAgent | None:
        """The next piece of a tensor that the collector wants; batches go first."""
        while self._tensor is not None or self._wanted:
            if self._tensor is None:
                digest = self._wanted.popleft()
                self._tensor = TensorReader(digest, self._outbox.tensor(digest))
            chunk = self._tensor.next()
            if self._tensor.done:
                self._tensor.close()
                self._tensor = None
            self.sent_bytes += len(chunk.data)
            return pb.FromAgent(tensor_chunk=chunk)
        return None

    def _expect_answer(self, now: float) -> None:
        if not self._answer_due:  # the wait for an answer begins now, not when we last heard
            self._answer_due = True
            self._last_heard = now

    def _patience(self, now: float) -> float:
        until = self._last_sent + self._config.heartbeat_seconds
        if now < self._paused_until:
            until = min(until, self._paused_until)
        return max(until - now, 0.001)

    def _batch(self, now: float) -> pb.FromAgent | None:
        if now < self._paused_until:
            return None
        stored = self._held or self._read_next()
        if stored is None:
            return None
        size = len(stored.payload)
        if self._in_flight and self._in_flight_bytes + size > self._config.in_flight_bytes:
            self._held = stored
            return None
        self._held = None
        self._next = stored.sequence + 1
        self._in_flight.append((stored.sequence, size))
        self._in_flight_bytes += size
        self.sent_bytes += size
        self.sent_batches += 1
        message = pb.FromAgent()
        batch = message.batch  # filled in place: a nested constructor would copy the payload twice
        batch.sequence, batch.payload, batch.crc32 = stored
        batch.newest_sequence = self._outbox.last_sequence
        return message

    def _read_next(self) -> Stored | None:
        stored = self._outbox.read(self._next)
        if stored is not None:
            if stored.sequence > self._next:
                return _bridge(self._next, stored.sequence - 1)
            return self._fitting(stored)
        if self._next <= self._outbox.last_sequence:
            return _bridge(self._next, self._outbox.last_sequence)
        return None

    def _fitting(self, stored: Stored) -> Stored:
        """The batch, or a note in its place when the collector takes no message of its size."""
        limit = self.welcome.max_message_bytes if self.welcome is not None else 0
        if limit and len(stored.payload) + 64 > limit:
            return _bridge(stored.sequence, stored.sequence, "too_large")
        return stored


def _bridge(first: int, last: int, reason: str = "not_kept") -> Stored:
    """A batch that names others which cannot be sent (any more), so that the gap is on record."""
    drop = pb.DropCount(reason=reason, first_sequence=first, last_sequence=last)
    payload = pb.Batch(drops=[drop]).SerializeToString()
    return Stored(last, payload, crc32(payload))
