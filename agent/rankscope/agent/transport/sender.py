"""Keeps one stream to a collector: one thread, one channel, one call after the other.

`TransportConfig` bounds every wait. Nothing raised in here leaves its thread, and gRPC prints
nothing into the user's output.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from rankscope.agent.transport.channel import (
    AccessError,
    Secrets,
    open_channel,
    read_secrets,
    uses_tls,
    why_not,
    with_token,
)
from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.spool import Outbox
from rankscope.agent.transport.stream import LogFunction, Stream
from rankscope.v1 import collector_pb2 as pb

if TYPE_CHECKING:
    import grpc

MESSAGE_LIMIT_BYTES = 16 << 20
REFUSED_PAUSE_SECONDS = 10.0
_WHY_SECONDS = 1.0
_left_open: list[object] = []


class Locator(Protocol):
    """Where the collector is."""

    retry_seconds: float
    """When to ask again after None."""

    @property
    def exit_patience_seconds(self) -> float:
        """How long an exit may wait for a collector that has not answered yet."""

    def locate(self, needed: bool) -> str | None:
        """An address to try, None when there is none now; `needed`: something waits to be sent."""

    def failed(self) -> None:
        """The address of the last `locate` did not answer or broke off."""


class FixedAddresses:
    """Addresses from the configuration, each tried in turn."""

    retry_seconds = 0.0

    def __init__(self, addresses: tuple[str, ...], exit_patience_seconds: float = 1.0) -> None:
        self.exit_patience_seconds: float = exit_patience_seconds
        self._addresses = addresses
        self._index = 0

    def locate(self, needed: bool) -> str | None:
        return self._addresses[self._index % len(self._addresses)]

    def failed(self) -> None:
        self._index += 1


#: How long `stop` waits for threads that are about to end.
_THREADS_END_SECONDS = 1.0


def _is_grpc(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", "")).startswith("grpc")


class Sender:
    """Delivers an outbox, reconnecting as long as it lives; also the listener of its streams."""

    def __init__(
        self,
        config: TransportConfig,
        outbox: Outbox,
        hello: Callable[[], pb.Hello],
        locator: Locator,
        log: LogFunction,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called from the sender's thread when something was acknowledged or said."""
        self.acked_sequence = 0
        self.welcome: pb.Welcome | None = None
        """The newest one; None: no collector ever answered."""
        self.goodbye_answer: pb.Farewell | None = None
        self.connected = False
        self.address = ""
        self._sent_batches = 0
        self._sent_bytes = 0
        self.refused_batches = 0
        self.last_problem = ""
        self._config = config
        self._outbox = outbox
        self._hello = hello
        self._locator = locator
        self._log = log
        self._tell = changed
        self._said: set[str] = set()
        self._refused: set[int] = set()
        self._stopping = threading.Event()
        # One that is being started on this host imports its libraries first.
        self._notice_seconds = config.connect_notice_seconds * (1 if config.collector else 10)
        self._attempts = 0  # since something new was acknowledged
        self._cut = False  # the channel is to be closed with its call
        self._began: float | None = None
        self._channel: grpc.Channel | None = None
        self._channel_to: tuple[str, Secrets] | None = None
        self._asked_why = False
        self._stream: Stream | None = None
        self._call: Any = None
        self._thread: threading.Thread | None = None
        self._grpc_threads: list[threading.Thread] = []

    # ------------------------------------------------------------------ for the owner's thread

    def start(self) -> None:
        """Begin to deliver; returns at once. Without a thread (a limit, an interpreter that ends)
        nothing is delivered, which `is_running` says."""
        thread = threading.Thread(target=self._run, name="rankscope-stream", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.last_problem = str(error)
            return
        self._thread = thread

    @property
    def is_running(self) -> bool:
        """Whether anything may still be delivered."""
        return self._thread is not None and self._thread.is_alive()

    def nudge(self) -> None:
        """The outbox has grown."""
        if stream := self._stream:
            stream.nudge()

    def tick(self) -> None:
        """Call a few times a second: gives up what hangs, says once when nobody answers."""
        now = time.monotonic()
        waited = now - self._began if self._began is not None else 0.0
        if self.welcome is None and waited > self._notice_seconds:
            self._say_unreachable()
        stream, call = self._stream, self._call
        if stream is None or call is None:
            return
        reason = stream.overdue(now)
        if reason is None and stream.welcome is None and now - stream.started > self._patience():
            reason = "no answer"
        if reason is not None:
            self.last_problem = reason
            self._drop_channel_after(call)

    def stop(self, timeout_seconds: float) -> None:
        """End the stream in order if there is time, else cut it; the thread is gone or harmless."""
        self._stopping.set()
        if stream := self._stream:
            stream.finish()
        if self._thread is not None:
            if self.connected:
                self._thread.join(timeout_seconds)
            if call := self._call:
                call.cancel()
        self._close_channel()
        self._join_threads()

    def _join_threads(self) -> None:
        """gRPC's own threads end a moment after the channel. One that the interpreter still finds
        at its end is unwound through C++ code that allows no unwinding: the process would abort.
        """
        deadline = time.monotonic() + _THREADS_END_SECONDS
        for thread in [self._thread, *self._grpc_threads]:
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._grpc_threads = [t for t in self._grpc_threads if t.is_alive()]

    @property
    def backlog(self) -> int:
        """Batches that are not acknowledged."""
        return self._outbox.last_sequence - self.acked_sequence

    @property
    def sent(self) -> tuple[int, int]:
        """(batches, bytes) handed to gRPC, repeats included."""
        stream = self._stream
        if stream is None:
            return self._sent_batches, self._sent_bytes
        return self._sent_batches + stream.sent_batches, self._sent_bytes + stream.sent_bytes

    # ------------------------------------------------------------------ the sender's thread

    def _run(self) -> None:
        self._began = time.monotonic()
        while not self._stopping.is_set():
            pause = self._config.backoff_seconds
            try:
                pause = self._attempt()
            except Exception as error:
                if self._stopping.is_set():  # the channel was closed under it
                    return
                if "interpreter shutdown" in str(error):
                    # No new threads, so no new streams (Python 3.12), and no way to close one.
                    _left_open.append(self._channel)
                    self._channel = None
                    self.last_problem = str(error)
                    return
                if isinstance(error, AccessError):
                    self._say("error", "access", f"{error}; {self._kept()}")
                else:
                    name = type(error).__name__
                    self._say("error", "attempt", f"cannot stream ({name}: {error})")
                self.last_problem = f"{type(error).__name__}: {error}"
                self._attempts += 1
                pause = self._backoff()
            finally:
                self.connected = False
            self._stopping.wait(pause)

    def _attempt(self) -> float:
        """One stream from its hello to its end; returns how long to wait before the next."""
        address = self._locator.locate(needed=self.backlog > 0 or self.welcome is None)
        if address is None:
            return self._locator.retry_seconds
        self.address = address
        hello = with_token(self._config, self._hello())
        stream = Stream(self._config, hello, self._outbox, self)
        stub = self._stub(address)
        self._attempts += 1
        known = set(threading.enumerate())
        self._call = call = stub.Collect(stream.requests(), wait_for_ready=True)
        self._grpc_threads = [t for t in self._grpc_threads if t.is_alive()]
        self._grpc_threads += [t for t in threading.enumerate() if t not in known and _is_grpc(t)]
        self._stream = stream
        try:
            self._listen(stream, call)
        finally:
            stream.finish()
            self._stream = self._call = None
            self._sent_batches += stream.sent_batches
            self._sent_bytes += stream.sent_bytes
            if not self._stopping.is_set():
                self._locator.failed()
        return max(stream.retry_after_seconds, self._backoff())

    def _listen(self, stream: Stream, call: Any) -> None:
        import grpc

        if self._stopping.is_set():
            call.cancel()
        try:
            for message in call:
                stream.hear(message)
        except grpc.RpcError as error:
            code, detail = call.code(), (call.details() or "").split("\n")[0]
            if code is not grpc.StatusCode.CANCELLED:
                self.last_problem = f"{code.name}: {detail}"
                self._say_broken(code, error)
            if self._cut:
                self._close_channel()

    def _stub(self, address: str) -> Any:
        grpc, collector_pb2_grpc = load_grpc(self._log)
        secrets = read_secrets(self._config)
        if self._channel is None or self._channel_to != (address, secrets):
            self._close_channel()
            self._channel = open_channel(grpc, self._config, secrets, address, self._options())
            self._channel_to = (address, secrets)
        self._cut = False
        return collector_pb2_grpc.CollectorStub(self._channel)

    def _options(self) -> list[tuple[str, int]]:
        longest = max(int(self._config.max_backoff_seconds * 1000), 100)
        return [
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", longest),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.ping_timeout_ms", 20_000),
            ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
            ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
        ]

    def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _drop_channel_after(self, call: Any) -> None:
        """A peer that hangs keeps its connection: only a new channel makes a new one."""
        self._cut = True
        call.cancel()

    def _backoff(self) -> float:
        longest = self._config.backoff_seconds * 2.0 ** min(self._attempts, 16)
        longest = min(longest, self._config.max_backoff_seconds)
        return random.uniform(longest / 2, longest)

    def _patience(self) -> float:
        """How long a collector may take to answer a hello, growing with each round of addresses."""
        rounds = self._attempts // max(len(self._config.collector), 1)
        growing = self._config.next_address_seconds * 2.0 ** min(rounds, 10)
        if len(self._config.collector) == 1:
            growing = self._config.ack_timeout_seconds
        return min(growing, self._config.ack_timeout_seconds)

    # ------------------------------------------------------------------ what the collector says

    def welcomed(self, welcome: pb.Welcome) -> None:
        if welcome.durable_sequence < self.acked_sequence:
            self._say(
                "warning",
                "behind",
                f"the collector at {self.address} has batches up to {welcome.durable_sequence}, "
                f"but up to {self.acked_sequence} were acknowledged before: its store was replaced",
            )
        self.welcome = welcome
        self.connected = True
        self._tell()

    def acknowledged(self, sequence: int) -> None:
        if sequence > self.acked_sequence:
            self.acked_sequence = sequence
            self._attempts = 0
        self._skip_refused()
        self._outbox.acknowledge(self.acked_sequence)
        self._tell()

    def refuses_tensors(self, refuses: bool) -> None:
        tensors = getattr(self._outbox, "tensors", None)  # left-over spools capture nothing
        if tensors is not None:
            tensors.refused = refuses

    def refused(self, sequence: int, message: str) -> None:
        self.refused_batches += sequence not in self._refused
        self._refused.add(sequence)
        self._say("error", "refused", f"the collector refused a batch: {message}")
        self.acknowledged(0)

    def _skip_refused(self) -> None:
        while self.acked_sequence + 1 in self._refused:
            self._refused.discard(self.acked_sequence + 1)
            self.acked_sequence += 1

    def troubled(self, problem: pb.Problem) -> None:
        name = pb.Problem.Code.Name(problem.code)
        self.last_problem = f"{name}: {problem.message}"
        if problem.code != pb.Problem.SEQUENCE_GAP:
            self._say("warning", name, f"the collector at {self.address} says {self.last_problem}")
        hopeless = problem.code in (pb.Problem.REFUSED, pb.Problem.INVALID)
        if hopeless and problem.closes_stream and self._stream is not None:
            pause = max(problem.retry_after_seconds, REFUSED_PAUSE_SECONDS)
            self._stream.retry_after_seconds = pause

    def farewell(self, farewell: pb.Farewell) -> None:
        self.goodbye_answer = farewell
        self._tell()

    def noticed(self, notice: pb.Notice) -> None:
        self._say(notice.level or "info", "notice:" + notice.text, notice.text)

    # ------------------------------------------------------------------ what the user is told

    def _say_unreachable(self) -> None:
        if not self.address or self._asked_why:
            return
        self._asked_why = True
        if not self._config.collector:
            return self._say_why("")
        asking = threading.Thread(target=self._ask_why, name="rankscope-why", daemon=True)
        try:
            asking.start()
        except RuntimeError:
            self._say_why("")

    def _ask_why(self) -> None:
        """gRPC does not say why it cannot connect, so a connection of our own is asked."""
        why = ""
        if uses_tls(self._config) or not self.last_problem:
            with suppress(Exception):
                why = why_not(self._config, self.address, _WHY_SECONDS)
        self._say_why(why)

    def _say_why(self, why: str) -> None:
        if self.welcome is not None or self._stopping.is_set():
            return
        if why:
            self.last_problem = why
        where = ", ".join(self._config.collector) or self.address
        why = why or self.last_problem
        why = f" ({why})" if why else ""
        kept = self._kept()
        self._say("warning", "unreachable", f"no collector answers at {where}{why}; {kept}")

    def _say_broken(self, code: Any, error: Exception) -> None:
        if self.welcome is not None and not self._stopping.is_set():
            text = f"lost the collector at {self.address} ({code.name}); {self._kept()}"
            self._say("warning", "broken", text)

    def _kept(self) -> str:
        folder = getattr(self._outbox, "folder", None)
        return f"records wait in {folder or 'memory'} and are sent when one does"

    def _say(self, level: str, key: str, text: str) -> None:
        """Each key once; a bounded number of keys, so that a chatty collector cannot fill a log."""
        if key not in self._said and len(self._said) < 50:
            self._said.add(key)
            self._log(level, text)


def load_grpc(log: LogFunction) -> tuple[Any, Any]:
    """Import gRPC and its stubs so that forks stay harmless and nothing is printed.

    Call it first on the script's own thread: a fork while another thread imports is not safe.
    """
    fork_support = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower()
    if "grpc" in sys.modules and fork_support not in ("0", "false", "no", "off"):
        _warn_about_fork(log)
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    from rankscope.v1 import collector_pb2_grpc

    return grpc, collector_pb2_grpc


_warned_about_fork = False


def _warn_about_fork(log: LogFunction) -> None:
    global _warned_about_fork
    if not _warned_about_fork:
        _warned_about_fork = True
        log(
            "warning",
            "grpc was imported before the debugger started: set GRPC_ENABLE_FORK_SUPPORT=0 in the "
            "environment, else forks (DataLoader workers) may be slow, print messages or hang",
        )
