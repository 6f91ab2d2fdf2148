"""The gRPC service: reads streams into queues and writes what comes back. It decides nothing.

Everything slow is done in the threads of a run. A stream is not read further while too much of it,
or of all streams together, waits for its commit; HTTP/2 flow control then slows the agent's sender.
"""

import asyncio
import importlib.metadata
import logging
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import grpc.aio

from rankscope.collector import answers, contract
from rankscope.collector.config import Config
from rankscope.v1 import collector_pb2 as pb
from rankscope.v1 import collector_pb2_grpc

if TYPE_CHECKING:
    from rankscope.collector.daemon import LazyRuns
    from rankscope.collector.runs import RunService

log = logging.getLogger(__name__)

VERSION = importlib.metadata.version("rankscope")


class Budget:
    """Bytes that may be held at once. Used in the event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._freed = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait until there is room; something larger than all room gets it alone."""
        while self._held and self._held + size > self._limit:
            self._freed.clear()
            await self._freed.wait()
        self._held += size

    def give_back(self, size: int) -> None:
        """Make room again."""
        self._held -= size
        self._freed.set()


class Stream:
    """One agent's stream, as the threads of its run see it (`ingest.Session`)."""

    def __init__(self, budget: Budget, config: Config) -> None:
        self._loop = asyncio.get_running_loop()
        self._total, self._own = budget, Budget(config.max_stream_bytes)
        self._held = 0
        self.out: asyncio.Queue[pb.FromCollector | None] = asyncio.Queue()
        self.durable = 0
        self.refuses_tensors = False

    def send(self, message: pb.FromCollector) -> None:
        """Put a message on the stream; from any thread."""
        self._in_loop(self._put, message)

    def close(self) -> None:
        """End the stream after what was sent; from any thread."""
        self._in_loop(self._put, None)

    def release(self, size: int) -> None:
        """So many bytes are not held any more; from any thread."""
        self._in_loop(self._release, size)

    async def hold(self, size: int) -> None:
        """Wait until so many bytes may be held."""
        await self._own.take(size)
        await self._total.take(size)
        self._held += size

    def drop(self) -> None:
        """The stream ended: nothing of it counts any more."""
        self._total.give_back(self._held)
        self._held = 0

    def _put(self, message: pb.FromCollector | None) -> None:
        if message is not None and message.HasField("ack"):
            self.durable = max(self.durable, message.ack.durable_sequence)
            self.refuses_tensors = message.ack.refuses_tensors
        elif message is not None and message.HasField("welcome"):
            self.durable = message.welcome.durable_sequence
        self.out.put_nowait(message)

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


class Servicer(collector_pb2_grpc.CollectorServicer):
    """Serves streams into the given runs."""

    def __init__(self, runs: "LazyRuns", config: Config) -> None:
        self._runs, self._config = runs, config
        self._budget = Budget(config.max_memory_bytes)
        self._readers: set[asyncio.Task[None]] = set()
        self._draining = False
        self.streams = 0
        """Open now."""
        self.ever = 0
        """Opened so far."""

    async def Collect(
        self,
        requests: AsyncIterator[pb.FromAgent],
        context: "grpc.aio.ServicerContext[pb.FromAgent, pb.FromCollector]",
    ) -> AsyncIterator[pb.FromCollector]:
        """One agent's stream."""
        if self.streams >= self._config.max_streams:
            yield answers.overloaded(f"{self.streams} streams are open, which is the limit")
            return
        stream = Stream(self._budget, self._config)
        self.streams += 1
        self.ever += 1
        reader = asyncio.create_task(self._read(requests, stream))
        self._readers.add(reader)
        try:
            while (message := await stream.out.get()) is not None:
                yield message
        finally:
            self.streams -= 1
            self._readers.discard(reader)
            reader.cancel()
            stream.drop()

    def stop_reading(self) -> None:
        """Take nothing more from any stream; what was read is still answered."""
        self._draining = True
        for reader in self._readers:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.FromAgent], stream: Stream) -> None:
        try:
            hello = await self._first(requests)
            if hello is None:
                stream.send(answers.invalid("the first message of a stream must be a Hello"))
                return stream.close()
            if (reason := contract.refusal(hello)) is not None:
                stream.send(answers.refused(reason))
                return stream.close()
            if hello.probe:
                stream.send(contract.who_answers(VERSION, self._config.max_message_bytes))
                return stream.close()
            service = await self._enter(hello, stream)
            if service is not None:
                await self._forward(requests, stream, service, hello.process_uuid)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("a stream failed")
            stream.send(answers.failed(f"the collector failed: {error}"))
            stream.close()

    async def _first(self, requests: AsyncIterator[pb.FromAgent]) -> pb.Hello | None:
        async for message in requests:
            return message.hello if message.HasField("hello") else None
        return None

    async def _enter(self, hello: pb.Hello, stream: Stream) -> "RunService | None":
        from rankscope.collector.runs import BadHello
        from rankscope.collector.store import StoreError

        entering = asyncio.ensure_future(
            asyncio.to_thread(lambda: self._runs.get().enter(hello, stream))
        )
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:
            entering.add_done_callback(partial(_broken, hello.process_uuid, stream))
            raise
        except BadHello as error:
            stream.send(answers.refused(str(error)))
        except StoreError as error:
            log.error("%s", error)
            stream.send(answers.no_space(str(error), closes_stream=True))
        stream.close()
        return None

    async def _forward(
        self,
        requests: AsyncIterator[pb.FromAgent],
        stream: Stream,
        service: "RunService",
        process: str,
    ) -> None:
        committer = service.committer
        if committer.unavailable:
            stream.send(answers.no_space(committer.unavailable))
        try:
            async for message in requests:
                if message.HasField("batch"):
                    await stream.hold(len(message.batch.payload))
                    committer.post(partial(committer.batch, process, message.batch, stream))
                elif message.HasField("tensor_chunk"):
                    await stream.hold(len(message.tensor_chunk.data))
                    chunk = message.tensor_chunk
                    committer.post(partial(committer.chunk, process, chunk, stream))
                elif message.HasField("heartbeat"):
                    stream.send(answers.ack(stream.durable, stream.refuses_tensors))
        except asyncio.CancelledError:
            if not self._draining:
                committer.post(partial(committer.broken, process, stream))
            raise
        committer.post(partial(committer.half_closed, process, stream))


def _broken(process: str, stream: Stream, entering: "asyncio.Future[RunService]") -> None:
    """The stream ended while its run was being opened."""
    if not entering.cancelled() and entering.exception() is None:
        committer = entering.result().committer
        committer.post(partial(committer.broken, process, stream))


async def start(servicer: Servicer, config: Config, address: str) -> tuple[grpc.aio.Server, int]:
    """A server that listens on HOST:PORT, and its port (port 0 takes a free one)."""
    server = grpc.aio.server(
        options=[
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", config.max_message_bytes),
        ]
    )
    collector_pb2_grpc.add_CollectorServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, port
