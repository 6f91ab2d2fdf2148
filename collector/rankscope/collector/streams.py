"""One agent's stream between the event loop and the threads of its run, and what it may hold."""

import asyncio
import logging
from collections import deque
from typing import Any

from rankscope.collector.config import Config
from rankscope.v1 import collector_pb2 as pb

log = logging.getLogger(__name__)

#: Every message counts so much beside its payload: many small ones are work, too.
MESSAGE_BYTES = 32 << 10
MOST_WAITING = 1000
MOST_HEARTBEATS = 200  # a second


class Budget:
    """Bytes that may be held at once. Used in the event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0
        self._freed = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait until there is room; something larger than all room gets it alone."""
        while self.held and self.held + size > self._limit:
            self._freed.clear()
            await self._freed.wait()
        self.held += size

    def give_back(self, size: int) -> None:
        """Make room again."""
        self.held -= size
        self._freed.set()


class Stream:
    """One agent's stream, as the threads of its run see it (`ingest.Session`)."""

    def __init__(self, budget: Budget, config: Config, peer: str = "") -> None:
        self._loop = asyncio.get_running_loop()
        self._total, self._own = budget, Budget(config.max_stream_bytes)
        self._held = 0
        self._waiting: deque[pb.FromCollector | None] = deque()
        self._filled = asyncio.Event()
        self._second, self._heartbeats = 0.0, 0
        self.peer = peer
        self.token: bytes | None = None
        self.handler: asyncio.Task[Any] | None = None
        """The task of the call; cancelled when the client does not read."""
        self.durable = 0
        self.refuses_tensors = False

    def send(self, message: pb.FromCollector) -> None:
        """Put a message on the stream; from any thread."""
        self._in_loop(self._put, message)

    def close(self) -> None:
        """End the stream after what was sent; from any thread."""
        self._in_loop(self._put, None)

    def release(self, size: int) -> None:
        """One message of so many bytes is not held any more; from any thread."""
        self._in_loop(self._release, size + MESSAGE_BYTES)

    async def hold(self, size: int) -> None:
        """Wait until one message of so many bytes may be held."""
        size += MESSAGE_BYTES
        await self._own.take(size)
        try:
            await self._total.take(size)
        except asyncio.CancelledError:
            self._own.give_back(size)
            raise
        self._held += size

    def drop(self) -> None:
        """The stream ended: nothing of it counts any more."""
        self._total.give_back(self._held)
        self._held = 0

    async def next(self) -> pb.FromCollector | None:
        """What to send next; None: end the stream."""
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        return self._waiting.popleft()

    def too_many_heartbeats(self) -> bool:
        """Count one; whether there are more in this second than any agent sends."""
        now = self._loop.time()
        if now - self._second >= 1.0:
            self._second, self._heartbeats = now, 0
        self._heartbeats += 1
        return self._heartbeats > MOST_HEARTBEATS

    def _put(self, message: pb.FromCollector | None) -> None:
        last = self._waiting[-1] if self._waiting else None
        if message is not None and message.HasField("ack"):
            self.durable = max(self.durable, message.ack.durable_sequence)
            self.refuses_tensors = message.ack.refuses_tensors
            if last is not None and last.HasField("ack"):  # who does not read needs the newest only
                self._waiting.pop()
        elif message is not None and message.HasField("welcome"):
            self.durable = message.welcome.durable_sequence
        self._waiting.append(message)
        self._filled.set()
        if len(self._waiting) == MOST_WAITING and self.handler is not None:
            log.warning("%s: the stream is cut, %d answers were not read", self.peer, MOST_WAITING)
            self.handler.cancel()

    def _release(self, size: int) -> None:
        size = min(size, self._held)
        self._held -= size
        self._own.give_back(size)
        self._total.give_back(size)

    def _in_loop(self, call: object, *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *values)  # type: ignore[arg-type]
        except RuntimeError:
            log.debug("the event loop has ended")
