"""`rankscope serve`: the collector daemon."""

import asyncio
import fcntl
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rankscope.collector import daemon, server
from rankscope.collector.config import Config, ConfigError

_DEFAULTS = Config()
_IDLE_CHECK_SECONDS = 10.0
_COLLECTORS = ".collectors"


def serve(
    store: Annotated[Path, typer.Option(help="Folder of all runs; made if missing.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Port 0 takes a free one.")
    ] = "127.0.0.1:50707",
    port_file: Annotated[
        Path | None, typer.Option(help="JSON with address, pid, boot_id and collector_id.")
    ] = None,
    spool: Annotated[
        list[Path] | None,
        typer.Option(help="Further spool folder whose left-overs are taken in at the start."),
    ] = None,
    commit_interval_seconds: Annotated[
        float, typer.Option(help="Batches wait this long at most for their commit.")
    ] = _DEFAULTS.commit_interval_seconds,
    commit_rows: Annotated[
        int, typer.Option(help="So many waiting events begin a commit early.")
    ] = _DEFAULTS.commit_rows,
    seal_after_seconds: Annotated[
        float, typer.Option(help="A step is sealed this long after its first END at the latest.")
    ] = _DEFAULTS.seal_after_seconds,
    lost_after_seconds: Annotated[
        float, typer.Option(help="A process without a stream is lost after this long.")
    ] = _DEFAULTS.lost_after_seconds,
    close_seconds: Annotated[
        float, typer.Option(help="At the end, steps are written and sealed this long at most.")
    ] = _DEFAULTS.close_seconds,
    layout: Annotated[
        str, typer.Option(help="eager: write dump.json at once; on_demand: only by export.")
    ] = _DEFAULTS.layout,
    split_replicas: Annotated[
        bool,
        typer.Option(
            "--split-replicas", help="Groups that number their ranks independently get own ranks."
        ),
    ] = _DEFAULTS.split_replicas,
    tensors: Annotated[
        str, typer.Option(help="auto: read this host's spools; stream: have all tensors sent.")
    ] = _DEFAULTS.tensors,
    layout_max_processes: Annotated[
        int, typer.Option(help="A run with more processes is written on demand.")
    ] = _DEFAULTS.layout_max_processes,
    max_message_bytes: Annotated[
        int, typer.Option(help="Larger messages are refused.")
    ] = _DEFAULTS.max_message_bytes,
    max_stream_bytes: Annotated[
        int, typer.Option(help="Bytes of one stream that may wait for their commit.")
    ] = _DEFAULTS.max_stream_bytes,
    max_memory_bytes: Annotated[
        int, typer.Option(help="Bytes of all streams that may wait for their commit.")
    ] = _DEFAULTS.max_memory_bytes,
    max_streams: Annotated[
        int, typer.Option(help="Further streams are told to come again later.")
    ] = _DEFAULTS.max_streams,
) -> None:
    """Collect from agents into a store, until SIGTERM or SIGINT."""
    values: dict[str, Any] = {k: v for k, v in locals().items() if hasattr(_DEFAULTS, k)}
    try:
        config = Config(**values)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise typer.BadParameter(f"--listen: {listen!r} is not HOST:PORT")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    store = store.absolute()
    store.mkdir(parents=True, exist_ok=True)
    collector_id, lock = _claim_id(store)
    runs = daemon.LazyRuns(lambda: _runs(config, collector_id, store))
    try:
        asyncio.run(
            daemon.serve(
                runs,
                config,
                listen,
                collector_id=collector_id,
                port_file=port_file,
                life=lambda runs, _: _live(runs, spool or []),
            )
        )
    except daemon.ListenError as error:
        typer.echo(f"rankscope serve: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        os.close(lock)


async def _live(runs: daemon.LazyRuns, spools: list[Path]) -> None:
    await asyncio.to_thread(runs.get)  # load what it takes before somebody waits for it
    await asyncio.to_thread(runs.get().resume)
    for spool in spools:
        await asyncio.to_thread(runs.get().take_in, spool.absolute())
    while True:
        await asyncio.sleep(_IDLE_CHECK_SECONDS)
        await asyncio.to_thread(runs.get().look_for_dead)
        await asyncio.to_thread(runs.get().close_idle)


def _runs(config: Config, collector_id: str, store: Path) -> Any:
    from rankscope.collector.memory import Memory
    from rankscope.collector.runs import Runs

    memory = Memory(store / _COLLECTORS / f"{collector_id}.json")
    return Runs(config, collector_id, server.VERSION, store=store, memory=memory)


def _claim_id(store: Path) -> tuple[str, int]:
    """An id that no other living collector of this store has, and a restarted one takes again.

    The descriptor holds the claim until it is closed.
    """
    folder = store / _COLLECTORS
    folder.mkdir(exist_ok=True)
    number = 0
    while True:
        collector_id = f"{daemon.host_id()}-{number}"
        fd = os.open(folder / f"{collector_id}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            number += 1
        else:
            return collector_id, fd
