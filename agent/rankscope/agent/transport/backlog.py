"""From the recording side into the spool: one batch per take, drops counted, nothing else lost."""

import time
from collections.abc import Callable

from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.disk_spool import DiskSpool
from rankscope.agent.transport.results import BatchSource
from rankscope.agent.transport.spool import MemorySpool, Spool
from rankscope.agent.transport.stream import LogFunction
from rankscope.agent.transport.tensor_files import TensorFiles
from rankscope.v1 import collector_pb2 as pb

GOODBYE_RESERVE_BYTES = 1 << 20


class Backlog:
    """Takes, serializes and spools; only its owner's thread calls it, but for `set_hello`."""

    def __init__(
        self,
        config: TransportConfig,
        hello: pb.Hello,
        source: BatchSource,
        log: LogFunction,
        use_files: Callable[[TensorFiles | None], None] = lambda files: None,
    ) -> None:
        """`use_files` is told where whole tensors are kept, once the spool is open."""
        self._use_files = use_files
        self.hello = hello
        self.spool: Spool | None = None
        self.dropped_batches = 0
        self.spooled_bytes = 0
        self.waits_for_space = False
        self.hurry = False
        """Set by whoever cannot wait: what finds no space from now on is dropped at once."""
        self._config = config
        self._source = source
        self._log = log
        self._said: set[str] = set()

    @property
    def last_sequence(self) -> int:
        return self.spool.last_sequence if self.spool is not None else 0

    @property
    def folder(self) -> str:
        """Where the spool lies; empty: in memory, or not open."""
        return str(self.spool.folder or "") if self.spool is not None else ""

    def open(self) -> Spool:
        """The spool, opened by the first call: in the best folder that works, else in memory."""
        if self.spool is None:
            self.spool = self._open_spool()
            self._use_files(self.spool.tensors)
            self.set_hello(self.hello)
        return self.spool

    def set_hello(self, hello: pb.Hello) -> None:
        """Use this one for later streams and segments."""
        copy = pb.Hello()
        copy.CopyFrom(hello)
        copy.spool_path = self.folder
        self.hello = copy
        if self.spool is not None:
            self.spool.hello = copy.SerializeToString()

    def take(self) -> None:
        """One batch from the source into the spool; never raises for what the source does."""
        self.open()
        batch = self._next_batch()
        if batch is not None and (reason := self._keep(batch, self._may_wait_seconds)):
            self._drop(batch, reason)

    def add_goodbye(self, reason: str) -> None:
        """Take the rest as the last batch, with a goodbye; a full spool has room for it."""
        self.open()
        for _ in range(2):  # should the rest not fit: what the source says about the loss does
            batch = self._next_batch() or pb.Batch()
            batch.goodbye.reason = reason
            failure = self._keep(batch, 0.0, GOODBYE_RESERVE_BYTES)
            if not failure:
                return
            self._drop(batch, failure)

    def abandon(self) -> None:
        """In a forked child."""
        if self.spool is not None:
            self.spool.abandon()
        self.spool = None

    def say(self, level: str, text: str) -> None:
        """Log each text once."""
        if text not in self._said and len(self._said) < 50:
            self._said.add(text)
            self._log(level, text)

    def _open_spool(self) -> Spool:
        config = self._config
        problem = ""
        for folder in dict.fromkeys((config.spool_folder(), config.fallback_folder())):
            try:
                return DiskSpool(
                    folder,
                    self.hello.process_uuid,
                    self._hello_for(str(folder)),
                    config.spool_limit_bytes,
                    config.segment_bytes,
                    config.block_seconds,
                )
            except OSError as error:
                problem = f"{folder}: {error.strerror or error}"
        self.say(
            "warning",
            f"no spool on disk ({problem}): records not yet at a collector are kept in memory, up "
            f"to {config.memory_limit_bytes >> 20} MiB, and are lost when this process is killed",
        )
        return MemorySpool(self.hello.SerializeToString(), config.memory_limit_bytes)

    def _hello_for(self, folder: str) -> bytes:
        hello = pb.Hello()
        hello.CopyFrom(self.hello)
        hello.spool_path = folder
        return hello.SerializeToString()

    def _next_batch(self) -> pb.Batch | None:
        try:
            return self._source.take()
        except Exception as error:
            self.say("error", f"records cannot be taken ({type(error).__name__}: {error})")
            return None

    @property
    def _may_wait_seconds(self) -> float:
        return self._config.block_seconds if self._config.on_full == "block" else 0.0

    def _keep(self, batch: pb.Batch, wait_seconds: float, reserve: int = 0) -> str:
        """Append it; returns why that is impossible, or ""."""
        payload = batch.SerializeToString()
        if len(payload) > self._config.max_batch_bytes:
            return "too_large"
        if not self._append(payload, wait_seconds, reserve):
            return "spool_full"
        self.spooled_bytes += len(payload)
        if spool := self.spool:
            if spool.tensors is not None:
                spool.tensors.sealed(spool.last_sequence)
        return ""

    def _append(self, payload: bytes, wait_seconds: float, reserve: int) -> bool:
        spool = self.open()
        deadline = time.monotonic() + wait_seconds
        try:
            while not spool.append(payload, reserve):
                if self.hurry or time.monotonic() >= deadline:
                    return False
                self.waits_for_space = True
                time.sleep(0.01)
            return True
        finally:
            self.waits_for_space = False

    def _drop(self, batch: pb.Batch, reason: str) -> None:
        self.dropped_batches += 1
        if self.spool is not None and self.spool.tensors is not None:
            self.spool.tensors.discard()
        if reason == "spool_full":
            where = self.folder or "memory"
            self.say("warning", f"the spool in {where} is full: records are dropped and counted")
        else:
            self.say("warning", f"a batch of {batch.ByteSize()} bytes is too large and was dropped")
        try:
            self._source.lost(batch, reason)
        except Exception as error:
            self.say("error", f"a loss was not counted ({type(error).__name__}: {error})")
