"""Batches that bring tensors wait here until these are durable; their order stays.

The state belongs to the committer's thread; the disk is used in threads of its own, which post what
they did.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rankscope.collector import answers
from rankscope.collector.blobs.sources import Receiver, bring, spool_of
from rankscope.collector.blobs.store import BlobStore
from rankscope.collector.positions import Positions, Session
from rankscope.v1 import collector_pb2 as pb

log = logging.getLogger(__name__)

_BATCH_THREADS = 2
_FILE_THREADS = 3
_RETRY_SECONDS = 2.0

T = TypeVar("T")


class Owner(Protocol):
    """The committer, as the intake sees it."""

    def post(self, call: Callable[[], None]) -> None:
        """Have something done in the committer's thread."""

    def admit(self, held: Any) -> None:
        """A batch may be committed; in order for each process."""


@dataclass
class _Held:
    item: Any
    """What is given back."""
    lacking: dict[bytes, pb.Blob] = field(default_factory=dict)
    looked: bool = True
    """False while the spool is being read."""

    @property
    def ready(self) -> bool:
        return self.looked and not self.lacking


class Intake:
    """Holds batches of one run."""

    def __init__(
        self,
        store: BlobStore,
        positions: Positions,
        owner: Owner,
        read_spools: bool = True,
        quota_bytes: int = 0,
    ) -> None:
        """Without `read_spools` everything is asked for over the streams. With `quota_bytes`
        processes are told to capture nothing new once so much is stored.
        """
        self._quota = quota_bytes
        self._store, self._positions, self._owner = store, positions, owner
        self._read_spools = read_spools
        self._held: dict[str, deque[_Held]] = {}
        self._asked: dict[bytes, str] = {}
        self._gone: set[str] = set()
        self._receivers: dict[str, Receiver] = {}
        self._stopping = threading.Event()
        self._batches = ThreadPoolExecutor(_BATCH_THREADS, "rankscope-tensors")
        self._files = ThreadPoolExecutor(_FILE_THREADS, "rankscope-tensor-files")
        self._chunks = ThreadPoolExecutor(1, "rankscope-chunks")

    # ------------------------------------------------------------------ the committer's thread

    def must_hold(self, process: str, blobs: Iterable[pb.Blob]) -> bool:
        """Whether a batch with these tensors has to wait."""
        return bool(blobs) or process in self._held

    def hold(self, process: str, item: Any, blobs: Iterable[pb.Blob]) -> None:
        """Bring in the tensors; `admit(item)` follows when they and earlier batches are there."""
        wanted = list(blobs)
        held = _Held(item, looked=not wanted)
        self._held.setdefault(process, deque()).append(held)
        if wanted:
            position = self._positions[process]
            read = self._read_spools or position.session is None
            spool = spool_of(position.hello) if read else None
            self._read(process, held, wanted, spool)

    def holds(self, process: str) -> bool:
        """Whether a batch of the process waits here."""
        return process in self._held

    @property
    def is_full(self) -> bool:
        """Whether the quota is used up. What is on its way is stored all the same."""
        return bool(self._quota) and self._store.stored_bytes >= self._quota

    def busy(self) -> bool:
        """Whether any batch waits that does not wait for a process that is away."""
        return any(
            not batch.looked or self._has_stream(process)
            for process, batches in self._held.items()
            for batch in batches
        )

    def resumed(self, process: str) -> None:
        """The process has a new stream: what the old one did not bring is asked for again."""
        self._gone.discard(process)
        self._unask(process)
        if receiver := self._receivers.get(process):
            self._submit(self._chunks, receiver.drop)
        self._ask_for_lacking()

    def broken(self, process: str) -> None:
        """The process has no stream: others that have the same tensors are asked."""
        self._unask(process)
        self._ask_for_lacking()

    def gone(self, process: str) -> None:
        """The process will never bring what is lacking, nor what is found to be lacking."""
        self._gone.add(process)
        spool = spool_of(self._positions[process].hello)
        for batch in self._held.get(process, ()):
            if batch.lacking:  # it was to be sent: what the spool still has is read after all
                batch.looked = False
                self._read(process, batch, list(batch.lacking.values()), spool)

    def chunk(self, process: str, chunk: pb.TensorChunk, session: Session) -> None:
        """A chunk arrived; its bytes are released on the session when they are written."""
        self._submit(self._chunks, lambda: self._take(process, chunk, session))

    def stop(self) -> None:
        """Take in nothing more; what waits was never acknowledged."""
        self._stopping.set()
        for pool in (self._batches, self._chunks, self._files):
            pool.shutdown(cancel_futures=True)
        for receiver in self._receivers.values():
            receiver.drop()
        self._store.close()

    def _looked(self, process: str, held: _Held, lacking: Iterable[pb.Blob]) -> None:
        held.looked = True
        held.lacking = {blob.digest: blob for blob in lacking}
        if process in self._gone:
            self._give_up(process, held.lacking)
            held.lacking = {}
        self._ask_for_lacking(process)
        self._release(process)

    def _arrived(self, digests: Iterable[bytes]) -> None:
        digests = list(digests)
        for digest in digests:
            self._asked.pop(digest, None)
        for process, batches in list(self._held.items()):
            for batch in batches:
                for digest in digests:
                    batch.lacking.pop(digest, None)
            self._release(process)

    def _failed(self, process: str, digest: bytes, why: str) -> None:
        """It cannot be had from this process."""
        self._asked.pop(digest, None)
        for batch in self._held.get(process, ()):
            if blob := batch.lacking.pop(digest, None):
                self._give_up(process, {digest: blob}, why)
        self._ask_for_lacking()
        self._release(process)

    def _give_up(self, process: str, blobs: dict[bytes, pb.Blob], why: str = "") -> None:
        if blobs:
            text = f"{len(blobs)} tensors are lost: {why or 'their bytes cannot be read any more'}"
            log.error("%s: %s", process, text)
            self._positions.send(process, answers.notice("error", text))

    def _release(self, process: str) -> None:
        batches = self._held.get(process)
        while batches and batches[0].ready:
            self._owner.admit(batches.popleft().item)
        if not batches:
            self._held.pop(process, None)

    def _unask(self, process: str) -> None:
        self._asked = {digest: who for digest, who in self._asked.items() if who != process}

    def _has_stream(self, process: str) -> bool:
        position = self._positions.get(process)
        return position is not None and position.session is not None

    def _ask_for_lacking(self, only: str | None = None) -> None:
        for process in [only] if only is not None else list(self._held):
            if not self._has_stream(process):
                continue
            wanted: dict[bytes, pb.Blob] = {}
            for batch in self._held.get(process, ()):
                for digest, blob in batch.lacking.items():
                    if digest not in self._asked:
                        wanted[digest] = blob
            if wanted:
                self._asked.update(dict.fromkeys(wanted, process))
                self._ask(process, list(wanted.values()))

    def _ask(self, process: str, blobs: list[pb.Blob]) -> None:
        receiver = self._receivers.setdefault(process, Receiver(self._store))
        self._submit(self._chunks, lambda: receiver.expect(blobs))
        want = pb.Want(digests=[blob.digest for blob in blobs])
        self._positions.send(process, pb.FromCollector(want=want))

    def _read(self, process: str, held: _Held, blobs: list[pb.Blob], spool: Path | None) -> None:
        self._submit(self._batches, lambda: self._look(process, held, blobs, spool))

    # ------------------------------------------------------------------ the intake's threads

    def _look(self, process: str, held: _Held, blobs: list[pb.Blob], spool: Path | None) -> None:
        lacking: list[pb.Blob] | None = blobs
        try:
            lacking = self._until_stored(lambda: bring(self._store, blobs, spool, self._files))
        finally:
            if lacking is not None:
                self._owner.post(lambda: self._looked(process, held, lacking))

    def _take(self, process: str, chunk: pb.TensorChunk, session: Session) -> None:
        receiver = self._receivers.get(process)
        if receiver is None:  # nothing was asked for
            return session.release(len(chunk.data))
        try:
            if chunk.missing:
                arrived = receiver.missing(chunk.digest)
                why = "the process does not have it any more"
                self._owner.post(lambda: self._failed(process, chunk.digest, why))
            else:
                arrived = self._until_stored(lambda: receiver.chunk(chunk)) or []
            if arrived:
                self._owner.post(lambda: self._arrived(arrived))
        except ValueError as error:
            text = str(error)
            receiver.missing(chunk.digest)
            self._owner.post(lambda: self._failed(process, chunk.digest, text))
        finally:
            session.release(len(chunk.data))

    def _until_stored(self, store: Callable[[], T]) -> T | None:
        """Repeat while the disk refuses; None when it is time to end."""
        told = False
        while not self._stopping.is_set():
            try:
                return store()
            except OSError as error:
                if not told:
                    log.error("tensors cannot be stored: %s", error)
                    text = answers.no_space(str(error))
                    self._owner.post(lambda text=text: self._positions.send_all(text))  # type: ignore[misc]
                told = True
                self._stopping.wait(_RETRY_SECONDS)
        return None

    def _submit(self, pool: ThreadPoolExecutor, task: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                task()
            except Exception:
                log.exception("a tensor cannot be taken in")

        if not self._stopping.is_set():
            pool.submit(guarded)
