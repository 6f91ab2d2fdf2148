"""A collector that serves until it is told to stop: what `serve` and the embedded one share."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.collector import allocator, liveness, server
from rankscope.collector.config import Config
from rankscope.collector.metrics import Exporter, serve_metrics, status_of
from rankscope.collector.security import Access, Tokens

if TYPE_CHECKING:
    from rankscope.collector.runs import Runs

log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0


class ListenError(OSError):
    """The address cannot be listened on."""


class LazyRuns:
    """Runs that are made when first needed: their libraries take a while to load."""

    def __init__(self, make: Callable[[], "Runs"]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self.made: Runs | None = None

    def get(self) -> "Runs":
        """The runs. Blocks when called first."""
        with self._lock:
            if self.made is None:
                allocator.limit_arrow()
                self.made = self._make()
            return self.made

    def close(self) -> None:
        """Commit, render and seal everything."""
        with self._lock:
            if self.made is not None:
                self.made.close()


@dataclass(frozen=True)
class Metrics:
    """What a daemon shows about itself."""

    store: Path
    """Whose disk is looked at."""
    address: str = ""
    """HOST:PORT for Prometheus; empty: none."""


#: Returns when it is time to stop, signals apart.
Life = Callable[[LazyRuns, server.Servicer], Awaitable[None]]


async def serve(
    runs: LazyRuns,
    config: Config,
    address: str,
    *,
    collector_id: str,
    port_file: Path | None = None,
    life: Life,
    access: Access | None = None,
    metrics: Metrics | None = None,
) -> None:
    """Serve on HOST:PORT or unix:/PATH until a signal or the end of `life`; then commit, render and
    seal. With `metrics` the health service is offered, too. Raises ListenError and AccessError.
    """
    access = access or Access()
    tokens = Tokens(access.token_file) if access.token_file is not None else None
    allocator.limit_heaps()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    servicer = server.Servicer(runs, config, tokens, lambda: status_of(runs))
    try:
        grpc_server, port = await server.start(
            servicer, config, address, access, health=metrics is not None
        )
        if metrics is not None and metrics.address:
            exporter = Exporter(runs, servicer, metrics.store)
            shown = serve_metrics(exporter, metrics.address, access)
            log.info("metrics on %s:%d", metrics.address.rpartition(":")[0], shown)
    except (RuntimeError, OSError) as error:
        raise ListenError(f"cannot listen on {address}: {error}") from error
    is_unix = address.startswith("unix:")
    listening = address if is_unix else f"{address.rpartition(':')[0]}:{port}"
    if port_file is not None:
        write_port_file(port_file, listening, collector_id)
    log.info("listening on %s", listening)
    living = asyncio.ensure_future(life(runs, servicer))
    trimming = asyncio.ensure_future(allocator.keep_trimmed())
    reloading = asyncio.ensure_future(_reload(servicer))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((living, stopped), return_when=asyncio.FIRST_COMPLETED)
    for task in (living, stopped, trimming, reloading):
        task.cancel()
    if port_file is not None:
        remove_port_file(port_file)
    closing = asyncio.ensure_future(grpc_server.stop(grace=3600))
    servicer.stop_reading()
    await asyncio.to_thread(runs.close)
    await asyncio.wait((closing,), timeout=1.0)
    await grpc_server.stop(grace=None)
    await asyncio.gather(closing, living, trimming, reloading, return_exceptions=True)
    log.info("ended")


async def _reload(servicer: server.Servicer) -> None:
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        servicer.reload_tokens()


def write_port_file(path: Path, address: str, collector_id: str) -> None:
    """Say where this collector listens; written aside and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    content = {
        "address": address,
        "pid": os.getpid(),
        "boot_id": liveness.boot_id(),
        "collector_id": collector_id,
    }
    aside.write_text(json.dumps(content) + "\n")
    os.replace(aside, path)


def remove_port_file(path: Path) -> None:
    """Remove the port file if it is this process's."""
    try:
        if json.loads(path.read_text())["pid"] == os.getpid():
            path.unlink()
    except (OSError, ValueError, KeyError):
        pass


def host_id() -> str:
    """Tells this host from others that share its store: name and hardware address."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())[:40]
    return f"{name}-{uuid.getnode():012x}"
