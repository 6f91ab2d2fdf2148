"""The gRPC service: reads streams into queues and writes what comes back. It decides nothing.

Everything slow is done in the threads of a run. A stream is not read further while too much of it,
or of all streams together, waits for its commit; HTTP/2 flow control then slows the agent's sender.
"""

import asyncio
import importlib.metadata
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import grpc.aio

from rankscope.collector import answers, contract
from rankscope.collector.config import Config
from rankscope.collector.security import Access, Certificates, Tokens
from rankscope.collector.streams import Budget, Stream
from rankscope.collector.wire import read_message
from rankscope.v1 import collector_pb2 as pb
from rankscope.v1 import collector_pb2_grpc

if TYPE_CHECKING:
    from rankscope.collector.daemon import LazyRuns
    from rankscope.collector.runs import RunService

__all__ = ["VERSION", "Budget", "Servicer", "Stream", "start"]

log = logging.getLogger(__name__)

VERSION = importlib.metadata.version("rankscope")
SERVICE = "rankscope.v1.Collector"


class Refused(Exception):
    """Why a stream is ended, for its client."""


class Servicer(collector_pb2_grpc.CollectorServicer):
    """Serves streams into the given runs."""

    def __init__(
        self,
        runs: "LazyRuns",
        config: Config,
        tokens: Tokens | None = None,
        status: Callable[[], pb.Status] = pb.Status,
    ) -> None:
        """With `tokens` a Hello must show one of them. `status` is asked in a thread."""
        self._runs, self._config, self._tokens, self._status = runs, config, tokens, status
        self._budget = Budget(config.max_memory_bytes)
        self._readers: set[asyncio.Task[None]] = set()
        self._open: set[Stream] = set()
        self._by_peer: Counter[str] = Counter()
        self._draining = False
        self.ever = 0
        """Opened so far."""
        self.refused: Counter[str] = Counter()
        """Streams that were refused, by why: "streams", "peer", "hello", "token", "version"."""

    @property
    def streams(self) -> int:
        """Open now."""
        return len(self._open)

    @property
    def held_bytes(self) -> int:
        """Read, and not committed yet."""
        return self._budget.held

    async def Collect(
        self,
        requests: AsyncIterator[pb.FromAgent],
        context: "grpc.aio.ServicerContext[pb.FromAgent, pb.FromCollector]",
    ) -> AsyncIterator[pb.FromCollector]:
        """One agent's stream."""
        peer = context.peer().rpartition(":")[0]
        if (reason := self._no_room(peer)) is not None:
            yield answers.overloaded(reason)
            return
        stream = Stream(self._budget, self._config, context.peer())
        stream.handler = asyncio.current_task()
        self._open.add(stream)
        self._by_peer[peer] += 1
        self.ever += 1
        reader = asyncio.create_task(self._read(requests, stream))
        self._readers.add(reader)
        try:
            while (message := await stream.next()) is not None:
                yield message
        finally:
            self._open.discard(stream)
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]
            self._readers.discard(reader)
            reader.cancel()
            stream.drop()

    def stop_reading(self) -> None:
        """Take nothing more from any stream; what was read is still answered."""
        self._draining = True
        for reader in self._readers:
            reader.cancel()

    def reload_tokens(self) -> None:
        """Look at the token file; streams whose token is in it no more are ended."""
        if self._tokens is None or not self._tokens.reload():
            return
        for stream in self._open:
            if stream.token is not None and not self._tokens.holds(stream.token):
                stream.send(answers.refused("the token of this stream is not valid any more"))
                stream.close()

    def _no_room(self, peer: str) -> str | None:
        if self.streams >= self._config.max_streams:
            self.refused["streams"] += 1
            return f"{self.streams} streams are open, which is the limit (max_streams)"
        if self._by_peer[peer] >= self._config.max_streams_per_peer:
            self.refused["peer"] += 1
            return (
                f"{self._by_peer[peer]} streams of this host are open, which is the limit "
                "(max_streams_per_peer)"
            )
        return None

    async def _read(self, requests: AsyncIterator[pb.FromAgent], stream: Stream) -> None:
        try:
            hello = await self._first(requests)
            if hello is None:
                self.refused["hello"] += 1
                stream.send(answers.invalid(self._why_no_hello()))
                return stream.close()
            if (refused := self._refusal(hello, stream)) is not None:
                stream.send(refused)
                return stream.close()
            if hello.probe:
                await self._answer_probe(hello, stream)
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
        try:
            message = await asyncio.wait_for(anext(requests), self._config.hello_seconds)
        except (asyncio.TimeoutError, StopAsyncIteration):
            return None
        return message.hello if message.HasField("hello") else None

    def _why_no_hello(self) -> str:
        return (
            "the first message of a stream must be a Hello of 1 MiB at most, within "
            f"{self._config.hello_seconds:g} s"
        )

    def _refusal(self, hello: pb.Hello, stream: Stream) -> pb.FromCollector | None:
        if (reason := contract.refusal(hello)) is not None:
            self.refused["version"] += 1
            return answers.refused(reason)
        if self._tokens is not None:
            self.reload_tokens()
            stream.token = self._tokens.admit(hello.token)
            if stream.token is None:
                self.refused["token"] += 1
                log.warning("%s: refused, its token is %s", stream.peer, _how_wrong(hello))
                return answers.refused(
                    f"the token is {_how_wrong(hello)}: set token_file (RANKSCOPE_TOKEN_FILE) to a "
                    "file with the token of this collector"
                )
        hello.ClearField("token")
        return None

    async def _answer_probe(self, hello: pb.Hello, stream: Stream) -> None:
        if hello.status:
            status = await asyncio.to_thread(self._status)
            status.streams, status.held_bytes = self.streams, self.held_bytes
            stream.send(pb.FromCollector(status=status))
        stream.send(contract.who_answers(VERSION, self._config.max_message_bytes))

    async def _enter(self, hello: pb.Hello, stream: Stream) -> "RunService | None":
        from rankscope.collector.runs import BadHello, TooMuch
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
        except TooMuch as error:
            stream.send(answers.overloaded(str(error)))
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
                elif stream.too_many_heartbeats():  # a message that says nothing counts as one
                    stream.send(answers.overloaded("this stream floods: too many heartbeats"))
                    stream.close()
                    break
                elif message.HasField("heartbeat"):
                    stream.send(answers.ack(stream.durable, stream.refuses_tensors))
        except asyncio.CancelledError:
            if not self._draining:
                committer.post(partial(committer.broken, process, stream))
            raise
        committer.post(partial(committer.half_closed, process, stream))


def _how_wrong(hello: pb.Hello) -> str:
    return "wrong" if hello.token else "missing"


def _broken(process: str, stream: Stream, entering: "asyncio.Future[RunService]") -> None:
    """The stream ended while its run was being opened."""
    if not entering.cancelled() and entering.exception() is None:
        committer = entering.result().committer
        committer.post(partial(committer.broken, process, stream))


async def start(
    servicer: Servicer,
    config: Config,
    address: str,
    access: Access | None = None,
    *,
    health: bool = False,
) -> tuple[grpc.aio.Server, int]:
    """A server that listens on HOST:PORT (port 0 takes a free one) or unix:/PATH, and its port.

    Raises AccessError for files that cannot be used, RuntimeError for an address that cannot.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_time_ms", 60_000),  # a peer that is gone without a word
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", config.max_message_bytes),
        ]
    )
    server.add_generic_rpc_handlers((_handlers(servicer),))
    if health:
        await _add_health(server)
    port = _bind(server, address, access or Access())
    await server.start()
    return server, port


def _handlers(servicer: Servicer) -> grpc.GenericRpcHandler:
    """As the generated code has them, but that messages are looked at before they are parsed."""
    collect = grpc.stream_stream_rpc_method_handler(
        servicer.Collect,
        request_deserializer=read_message,
        response_serializer=pb.FromCollector.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Collect": collect})


async def _add_health(server: grpc.aio.Server) -> None:
    """grpc.health.v1, for probes; it asks for no token and says nothing but SERVING."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_health.v1.health import aio

    servicer = aio.HealthServicer()
    await servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)


def _bind(server: Any, address: str, access: Access) -> int:
    mask = os.umask(0o177) if address.startswith("unix:") else None  # the socket is its owner's
    try:
        if access.uses_tls:
            return int(server.add_secure_port(address, Certificates(access).credentials()))
        return int(server.add_insecure_port(address))
    finally:
        if mask is not None:
            os.umask(mask)
