"""The background thread of the agent: take what was recorded, spool it, have it streamed.

All work happens in the pump's thread. Other threads only put something into its inbox, a queue that
may be used from a signal handler, so no caller ever waits for a lock of the transport.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rankscope.agent.transport.backlog import Backlog
from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.embedded import EmbeddedCollector
from rankscope.agent.transport.leftovers import LeftoverWatch
from rankscope.agent.transport.results import BatchSource, CloseResult, TransportStats
from rankscope.agent.transport.sender import FixedAddresses, Locator, Sender, load_grpc
from rankscope.agent.transport.stream import LogFunction
from rankscope.agent.transport.tensor_files import TensorFiles
from rankscope.v1 import collector_pb2 as pb

STOP_SECONDS = 0.3

_WAKE = object()  # in the inbox: something is worth sending
_LOOK = object()  # in the inbox: the collector said something
_abandoned: list[object] = []  # gRPC's objects must not be torn down in a forked child


class _Ticket:
    """Somebody waits; a lock of its own makes waiting safe inside a signal handler."""

    def __init__(self, timeout_seconds: float, goodbye: str | None = None) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + timeout_seconds
        self.timeout_seconds = timeout_seconds
        self.progress = (0, 0)
        self.goodbye = goodbye
        self.target: int | None = None
        self._reached = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def wait(self, seconds: float) -> bool:
        self._gate.acquire(timeout=max(seconds, 0.0))
        return self._reached

    def release(self, reached: bool) -> None:
        self._reached = reached
        self._gate.release()


class Transport:
    """Everything between the recorder and the collector; cheap and safe to call from any thread."""

    def __init__(
        self,
        config: TransportConfig,
        hello: pb.Hello,
        source: BatchSource,
        log: LogFunction,
        use_files: Callable[[TensorFiles | None], None] = lambda files: None,
    ) -> None:
        """`log(level, text)` gets few lines, each once, from any thread. `use_files` is told where
        the source may keep whole tensors."""
        self._config = config
        self._log = log
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._woken = False
        self._inert = False  # in a forked child
        self._result: CloseResult | None = None
        self._thread: threading.Thread | None = None
        self._backlog = Backlog(config, hello, source, log, use_files)
        self._locator = _locator(config, log)
        self._sender: Sender | None = None
        self._watch: LeftoverWatch | None = None
        self._tickets: list[_Ticket] = []
        self._last_take = 0.0
        self._announced = False

    def start(self) -> None:
        """Begin. Imports gRPC (0.1 s); waits neither for the disk nor for a collector."""
        if self._thread is not None or self._inert or self._result is not None:
            return
        thread = threading.Thread(target=self._run, name="rankscope-pump", daemon=True)
        with suppress(Exception):  # the sender meets it again and says so
            load_grpc(self._log)
        try:
            thread.start()
        except RuntimeError as error:
            self._log("error", f"no thread can be started ({error}): records are only spooled")
            return
        self._thread = thread

    def wake(self) -> None:
        """Something is worth sending soon. Bursts within `settle_seconds` share one batch."""
        if not self._woken:
            self._woken = True
            self._inbox.put(_WAKE)

    def throttle(self) -> None:
        """With `on_full` "block": wait, `block_seconds` at most, while the spool has no space."""
        deadline = time.monotonic() + self._config.block_seconds
        while self._backlog.waits_for_space and time.monotonic() < deadline and not self._inert:
            time.sleep(0.005)

    def flush(self, timeout_seconds: float) -> bool:
        """Take, spool and send everything; True when all of it is acknowledged in time.

        Even when False, what was recorded before the call is in the spool or counted as lost,
        unless the disk itself did not answer in time. Safe inside a signal handler.
        """
        if self._inert or self._result is not None:
            return self._result is not None and self._result.complete
        if not self._is_running():
            self._backlog.take()
            return self._backlog.last_sequence == 0
        ticket = _Ticket(timeout_seconds)
        self._inbox.put(ticket)
        return ticket.wait(timeout_seconds)

    def close(self, goodbye_reason: str, timeout_seconds: float | None = None) -> CloseResult:
        """Send the rest and a goodbye, wait until it is durable and the layout stands, then end.

        After `timeout_seconds` (default: the config's `exit_seconds`) what is left stays in the
        spool and one line says how to deliver it. At a normal end ("exit") whole tensors are waited
        for as long as the collector takes some of them in that time. A later call returns the first
        one's result.
        """
        if self._inert or self._result is not None:
            return self._result or CloseResult(complete=False, farewell=False)
        if timeout_seconds is None:
            timeout_seconds = self._config.exit_seconds
        ticket = _Ticket(timeout_seconds, goodbye_reason)
        self._backlog.hurry = True
        if goodbye_reason != "exit" and (spool := self._backlog.spool) and spool.tensors:
            spool.tensors.hurry = True
        if self._is_running():
            self._inbox.put(ticket)
            # The pump may put the deadline off; beyond it only a hanging disk is waited for.
            while not ticket.wait(ticket.deadline + 1.0 - time.monotonic()):
                if self._result is not None or time.monotonic() > ticket.deadline + 0.9:
                    break
            if self._result is not None and (thread := self._thread) is not None:
                thread.join(1.0)  # the interpreter must not meet it at its end
        else:
            self._tickets.append(ticket)
            self._admit_tickets()
            self._end(ticket)
        return self._result or CloseResult(False, False, self._pending, self._backlog.folder)

    def update_hello(self, hello: pb.Hello) -> None:
        """The process knows more about itself: later streams and segments say it."""
        self._backlog.set_hello(hello)

    def abandon_after_fork(self) -> None:
        """In a forked child: no thread, no channel, the parent's files and locks untouched."""
        self._inert = True
        _abandoned.append((self._sender, self._watch, self._inbox, self._thread))
        self._sender = self._watch = self._thread = None
        self._inbox = queue.SimpleQueue()
        self._backlog.abandon()

    def stats(self) -> TransportStats:
        """Counts as they stand; takes no lock."""
        sender, backlog = self._sender, self._backlog
        sent = sender.sent if sender is not None else (0, 0)
        return TransportStats(
            state=self._state(),
            spooled_batches=backlog.last_sequence,
            spooled_bytes=backlog.spooled_bytes,
            sent_batches=sent[0],
            sent_bytes=sent[1],
            acked_batches=sender.acked_sequence if sender else 0,
            refused_batches=sender.refused_batches if sender else 0,
            dropped_batches=backlog.dropped_batches,
            address=sender.address if sender else "",
            run_path=self._run_path,
            spool_path=backlog.folder,
            last_problem=sender.last_problem if sender else "",
        )

    def _state(self) -> str:
        if self._result is not None:
            return "closed"
        if self._sender is not None and self._sender.connected:
            return "connected"
        return "waiting" if self._thread is not None else "new"

    @property
    def _run_path(self) -> str:
        welcome = self._sender.welcome if self._sender is not None else None
        return welcome.run_path if welcome is not None else ""

    @property
    def _pending(self) -> int:
        acked = self._sender.acked_sequence if self._sender is not None else 0
        return self._backlog.last_sequence - acked

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # What follows runs in the pump's thread, or in the closing one when there is no pump.

    def _run(self) -> None:
        while self._result is None and not self._inert:
            try:
                self._turn()
            except Exception as error:  # a guest must not print a traceback, nor stop recording
                self._backlog.say("error", f"transport: {type(error).__name__}: {error}")
                time.sleep(self._config.flush_seconds)

    def _turn(self) -> None:
        if self._sender is None:
            self._open()
        take_is_due = self._receive()
        if any(ticket.target is None for ticket in self._tickets):
            self._admit_tickets()
        elif take_is_due:
            self._take()
        if self._sender is not None:
            self._sender.tick()
        self._announce()
        if self._watch is not None:
            self._watch.tick(idle=self._pending == 0)
        self._settle_tickets()

    def _open(self) -> None:
        spool = self._backlog.open()
        self._sender = Sender(
            self._config, spool, lambda: self._backlog.hello, self._locator, self._log, self._look
        )
        self._sender.start()
        self._watch = LeftoverWatch(self._config, self._sender, spool.folder, self._backlog.hello)

    def _look(self) -> None:
        if self._tickets:
            self._inbox.put(_LOOK)

    def _receive(self) -> bool:
        """Wait for something to do; True when it is time to take."""
        due = self._last_take + self._config.flush_seconds
        while (patience := due - time.monotonic()) > 0:
            try:
                item = self._inbox.get(timeout=patience)
            except queue.Empty:
                return True
            if item is _WAKE:
                due = min(due, self._last_take + self._config.settle_seconds)
            elif isinstance(item, _Ticket):
                self._tickets.append(item)
                return True
            else:
                return False
        return True

    def _take(self) -> None:
        self._last_take = time.monotonic()
        self._woken = False
        if self._is_closing():
            return
        self._backlog.take()
        if self._sender is not None:
            self._sender.nudge()

    def _is_closing(self) -> bool:
        return any(t.goodbye is not None and t.target is not None for t in self._tickets)

    def _admit_tickets(self) -> None:
        """Whoever waits, waits for what is recorded up to now."""
        self._take()
        for ticket in self._tickets:
            if ticket.target is None:
                if ticket.goodbye is not None and not self._is_closing():
                    self._backlog.add_goodbye(ticket.goodbye)  # takes what came meanwhile, too
                ticket.target = self._backlog.last_sequence
                if self._sender is not None:
                    ticket.progress = (self._sender.acked_sequence, self._sender.sent[1])
        if self._sender is not None:
            self._sender.nudge()

    def _settle_tickets(self) -> None:
        now = time.monotonic()
        acked = self._sender.acked_sequence if self._sender is not None else 0
        for ticket in list(self._tickets):
            reached = ticket.target is not None and acked >= ticket.target
            if ticket.goodbye is not None:
                if self._is_over(ticket, reached, now):
                    self._end(ticket)
                    return
            elif reached or now >= ticket.deadline:
                self._tickets.remove(ticket)
                ticket.release(reached)

    def _is_over(self, ticket: _Ticket, reached: bool, now: float) -> bool:
        sender = self._sender
        if sender is None or (now >= ticket.deadline and not self._put_off(ticket, now)):
            return True
        if not sender.is_running:  # nothing will be heard any more
            return True
        if reached:
            return sender.goodbye_answer is not None
        if sender.welcome is not None:
            return False
        return now - ticket.began >= self._locator.exit_patience_seconds

    def _put_off(self, ticket: _Ticket, now: float) -> bool:
        """Give tensors more time while the collector gets on with them."""
        spool, sender = self._backlog.spool, self._sender
        if ticket.goodbye != "exit" or spool is None or sender is None:
            return False
        if spool.tensors is None or not spool.tensors.size_bytes or not sender.connected:
            return False
        progress = (sender.acked_sequence, sender.sent[1])
        if progress == ticket.progress:
            return False
        ticket.progress = progress
        ticket.deadline = now + ticket.timeout_seconds
        return True

    def _end(self, ticket: _Ticket) -> None:
        sender = self._sender
        farewell = sender.goodbye_answer if sender is not None else None
        if self._watch is not None:
            self._watch.stop()
        if sender is not None:
            sender.stop(STOP_SECONDS)
        pending = self._pending
        folder = self._backlog.folder
        self._backlog.open().close()
        self._result = CloseResult(
            complete=pending <= 0,
            farewell=farewell is not None,
            unsent_batches=max(pending, 0),
            spool_path=folder,
            run_path=farewell.run_path if farewell is not None else self._run_path,
            folders=tuple(farewell.folders) if farewell is not None else (),
            seconds=time.monotonic() - ticket.began,
        )
        if pending > 0:
            self._say_left(pending, folder)
        for waiting in self._tickets:
            waiting.release(pending <= 0)
        self._tickets.clear()

    def _say_left(self, pending: int, folder: str) -> None:
        batches = "1 batch" if pending == 1 else f"{pending} batches"
        if folder:
            text = (
                f"{batches} not delivered, kept in {folder}; to deliver: rankscope deliver {folder}"
            )
        else:
            text = f"{batches} not delivered and lost: there was no spool on disk"
        self._log("warning", text)

    def _announce(self) -> None:
        sender = self._sender
        if self._announced or sender is None or sender.welcome is None:
            return
        self._announced = True
        hello, welcome = self._backlog.hello, sender.welcome
        who = f"rank {hello.rank.rank}" if hello.HasField("rank") else f"process {hello.pid}"
        where = sender.address if self._config.collector else "a collector on this host"
        self._log(
            "info", f"{who} records to {where}, run {welcome.run}, files under {welcome.run_path}"
        )


def _locator(config: TransportConfig, log: LogFunction) -> Locator:
    if config.collector:
        # The end of a short job gives each address its turn.
        turns = config.next_address_seconds * (len(config.collector) - 1)
        return FixedAddresses(config.collector, config.unreachable_exit_seconds + turns)
    return EmbeddedCollector(config.dump_path, log)
