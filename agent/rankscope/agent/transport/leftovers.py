"""Spools that dead processes left: found, claimed by lock, delivered under their own name."""

import fcntl
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.segment import Stored, parse_name, read_at, read_frames
from rankscope.agent.transport.sender import FixedAddresses, Locator, Sender
from rankscope.agent.transport.stream import LogFunction
from rankscope.agent.transport.tensor_files import TensorPlace, files_of, places_in
from rankscope.v1 import collector_pb2 as pb

LEFTOVER_SECONDS = 300.0
"""Longest time that one look at the folder may keep delivering."""


class LeftoverSpool:
    """Outbox over the segments of one dead process; its caller holds the claim."""

    def __init__(self, folder: Path, paths: Iterable[Path]) -> None:
        self.folder = folder
        self.hello: pb.Hello | None = None
        """None when no segment holds one that can be read: nothing can be delivered."""
        self.last_sequence = 0
        self._places: dict[bytes, TensorPlace] | None = None  # of all batches, once asked for
        self._paths = sorted(paths)
        self._index: list[tuple[Path, int, array[int]]] = []
        for path in self._paths:
            self._read_index(path)

    def read(self, sequence: int) -> Stored | None:
        for path, first, offsets in self._index:
            if sequence < first + len(offsets):
                at = max(sequence, first)
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    return read_at(fd, offsets[at - first])
                finally:
                    os.close(fd)
        return None

    def acknowledge(self, sequence: int) -> None:
        """Files are removed together, by `remove`."""

    def tensor(self, digest: bytes) -> TensorPlace | None:
        if self._places is None:
            stored = (self.read(n) for n in range(1, self.last_sequence + 1))
            batches = (pb.Batch.FromString(s.payload) for s in stored if s is not None)
            self._places = places_in(self.folder, batches)
        return self._places.get(digest)

    def remove(self) -> None:
        """Delete the segments; to be called when all is acknowledged."""
        uuid = self.hello.process_uuid if self.hello is not None else ""
        for path in [*self._paths, *(files_of(self.folder, uuid) if uuid else ())]:
            path.unlink(missing_ok=True)

    def _read_index(self, path: Path) -> None:
        first, offsets = 0, array("Q")
        for stored, offset in read_frames(path):
            if stored.sequence == 0:
                self.hello = pb.Hello.FromString(stored.payload)
            elif not offsets or stored.sequence == first + len(offsets):
                first = first or stored.sequence
                offsets.append(offset)
                self.last_sequence = max(self.last_sequence, stored.sequence)
        if offsets:
            self._index.append((path, first, offsets))


@dataclass(frozen=True)
class Delivery:
    """What became of one dead process's spool."""

    process_uuid: str
    batches: int = 0
    delivered: bool = False
    problem: str = ""
    """Why it was not delivered: "in use", "unreadable", or what the collector said."""


def spools_in(folder: Path) -> dict[str, list[Path]]:
    """Segments by process, of live and dead ones; empty when there is no such folder."""
    found: dict[str, list[Path]] = {}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return found
    for name in names:
        if parsed := parse_name(name):
            found.setdefault(parsed[0], []).append(folder / name)
    return found


@contextmanager
def claim(folder: Path, process_uuid: str) -> Iterator[bool]:
    """True while the spool is ours alone: its process is gone and nobody else delivers it."""
    path = folder / f"{process_uuid}.lock"
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        claimed = os.fstat(fd).st_ino == path.stat().st_ino
    except OSError:  # held, no rights, or a file system that cannot tell
        claimed = False
    try:
        yield claimed
    finally:
        if claimed and process_uuid not in spools_in(folder):
            path.unlink(missing_ok=True)
        if fd >= 0:
            os.close(fd)


def deliver_leftover(
    folder: Path,
    process_uuid: str,
    locator: Callable[[pb.Hello], Locator],
    config: TransportConfig,
    log: LogFunction,
    deadline: float,
    wanted: Callable[[pb.Hello], bool] = lambda hello: True,
    stopped: Callable[[], bool] = lambda: False,
) -> Delivery:
    """Send one dead process's batches and remove its files once all are acknowledged.

    Safe to repeat and to run from several processes at once. `deadline` is by time.monotonic().
    """
    with claim(folder, process_uuid) as claimed:
        if not claimed:
            return Delivery(process_uuid, problem="in use")
        spool = LeftoverSpool(folder, spools_in(folder).get(process_uuid, []))
        if spool.hello is None:
            return Delivery(process_uuid, problem="unreadable")
        if not wanted(spool.hello):
            return Delivery(process_uuid, problem="not ours")
        if spool.last_sequence == 0:
            spool.remove()
            return Delivery(process_uuid, delivered=True)
        spool.hello.delivered_later = True
        return _send(spool, locator(spool.hello), config, log, deadline, stopped)


def _send(
    spool: LeftoverSpool,
    locator: Locator,
    config: TransportConfig,
    log: LogFunction,
    deadline: float,
    stopped: Callable[[], bool],
) -> Delivery:
    hello = spool.hello
    assert hello is not None
    sender = Sender(replace(config, connect_notice_seconds=5.0), spool, lambda: hello, locator, log)
    delivery = Delivery(hello.process_uuid, spool.last_sequence)
    sender.start()
    try:
        while sender.is_running and not _is_done(sender):
            if time.monotonic() >= deadline or stopped():
                break
            sender.tick()
            time.sleep(0.02)
    finally:
        done = _is_done(sender)
        sender.stop(timeout_seconds=1.0 if done else 0.0)
    if not done:
        reason = sender.last_problem or f"no answer from {sender.address or 'a collector'} in time"
        return replace(delivery, problem=reason)
    spool.remove()
    return replace(delivery, delivered=True)


def _is_done(sender: Sender) -> bool:
    return sender.welcome is not None and sender.backlog <= 0


_END_SECONDS = 3.0


class LeftoverWatch:
    """Now and then, when this process has nothing of its own to send, delivers what others left."""

    def __init__(
        self, config: TransportConfig, sender: Sender, folder: Path | None, hello: pb.Hello
    ) -> None:
        self._config = config
        self._sender = sender
        self._folder = folder
        self._hello = hello
        self._stopping = False
        self._next_look = 0.0
        self._thread: threading.Thread | None = None

    def tick(self, idle: bool) -> None:
        """Called by the pump; starts a thread only when there is something to look at."""
        now = time.monotonic()
        if self._folder is None or not idle or not self._sender.connected or now < self._next_look:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._next_look = now + self._config.leftovers_seconds
        others = [uuid for uuid in spools_in(self._folder) if uuid != self._hello.process_uuid]
        if others and not self._stopping:
            self._thread = threading.Thread(
                target=self._deliver, args=(others,), name="rankscope-leftovers", daemon=True
            )
            with suppress(RuntimeError):  # no more threads: the next process finds them
                self._thread.start()

    def stop(self) -> None:
        """Cut a delivery short: what is not acknowledged stays for the next one."""
        self._stopping = True
        if self._thread is not None and self._thread.is_alive():
            # It ends with its stream, within a second; gRPC's threads must be gone by the end.
            self._thread.join(_END_SECONDS)

    def _deliver(self, uuids: list[str]) -> None:
        assert self._folder is not None
        deadline = time.monotonic() + LEFTOVER_SECONDS
        for uuid in uuids:
            if self._stopping or time.monotonic() > deadline:
                return
            try:
                deliver_leftover(
                    self._folder,
                    uuid,
                    lambda hello: FixedAddresses((self._sender.address,)),
                    self._config,
                    _silent,
                    deadline,
                    wanted=self._is_of_this_host,
                    stopped=lambda: self._stopping,
                )
            except Exception:  # somebody else's spool must not disturb this process; it stays
                continue

    def _is_of_this_host(self, hello: pb.Hello) -> bool:
        """Locks say nothing about the processes of other hosts on a shared folder."""
        return hello.boot_id == self._hello.boot_id or hello.host == self._hello.host


def _silent(level: str, text: str) -> None:
    """What goes wrong with another process's spool is not this user's concern."""
