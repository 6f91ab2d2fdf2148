"""`rankscope serve`: the collector daemon."""

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rankscope.collector import daemon, logs, server
from rankscope.collector.config import Config, ConfigError
from rankscope.collector.security import Access, AccessError

_DEFAULTS = Config()
_IDLE_CHECK_SECONDS = 10.0
_COLLECTORS = ".collectors"


def serve(
    store: Annotated[Path, typer.Option(help="Folder of all runs; made if missing.")],
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Port 0 takes a free one; or unix:/PATH."),
    ] = "127.0.0.1:50707",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Speak plaintext with other hosts, too.")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM of this collector's certificate; read again on change.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM of its key.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(help="PEM of who signs agents' certificates: they must have one.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A token a line; agents must show one of them.")
    ] = None,
    metrics: Annotated[str, typer.Option(metavar="HOST:PORT", help="Answer Prometheus here.")] = "",
    log_format: Annotated[str, typer.Option(help="text, or json: an object a line.")] = "text",
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
    max_streams_per_peer: Annotated[
        int, typer.Option(help="The same for the streams that come from one address.")
    ] = _DEFAULTS.max_streams_per_peer,
    hello_seconds: Annotated[
        float, typer.Option(help="A stream must say who it is within this long.")
    ] = _DEFAULTS.hello_seconds,
    max_open_runs: Annotated[
        int, typer.Option(help="Processes of further runs are told to come again later.")
    ] = _DEFAULTS.max_open_runs,
    max_processes: Annotated[
        int, typer.Option(help="Further processes of a run are refused.")
    ] = _DEFAULTS.max_processes,
    quota_bytes: Annotated[
        int, typer.Option(help="A run whose tables take so much disk gets no more; 0: no limit.")
    ] = _DEFAULTS.quota_bytes,
    quota_rows: Annotated[
        int, typer.Option(help="A run that has so many events gets no more; 0: no limit.")
    ] = _DEFAULTS.quota_rows,
) -> None:
    """Collect from agents into a store, until SIGTERM or SIGINT.

    Exit status: 0 ended by a signal, 1 it cannot listen, 2 an option is wrong.

    Example: rankscope serve --store /data/runs --listen 0.0.0.0:4317 --tls-cert c.pem
    --tls-key k.pem --token-file token
    """
    values: dict[str, Any] = {k: v for k, v in locals().items() if hasattr(_DEFAULTS, k)}
    try:
        config = Config(**values)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    for option, value in (("--listen", listen), ("--metrics", metrics)):
        _check_address(option, value)
    try:
        access = Access(token_file, tls_cert, tls_key, client_ca, insecure)
        access.allow("--listen", listen)
        access.allow("--metrics", metrics or "127.0.0.1:0")
        logs.begin(log_format)
    except AccessError as error:
        raise typer.BadParameter(str(error)) from None
    except ValueError as error:
        raise typer.BadParameter(f"--log-format: {error}") from None
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
                access=access,
                metrics=daemon.Metrics(store, metrics),
            )
        )
    except AccessError as error:
        raise typer.BadParameter(str(error)) from None
    except daemon.ListenError as error:
        typer.echo(f"rankscope serve: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        os.close(lock)


def _check_address(option: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if option == "--listen" and address.startswith("unix:/"):
        return
    if address and not (host and port.isdigit()):
        raise typer.BadParameter(f"{option}: {address!r} is not HOST:PORT")


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
