"""`rankscope status`: who is connected to a collector, at which step, how far behind."""

import json
import os
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from rankscope.agent.errors import ConfigError
from rankscope.agent.hello import PROTOCOL_VERSION
from rankscope.agent.transport.channel import open_channel, read_secrets, why_not, with_token
from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.sender import load_grpc
from rankscope.v1 import collector_pb2 as pb


class NoAnswer(Exception):
    """Why a collector says nothing."""


def status(
    address: Annotated[str, typer.Argument(help="HOST:PORT or unix:/PATH of a collector.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    watch: Annotated[float, typer.Option(help="Ask again every so many seconds; 0: once.")] = 0.0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 5.0,
) -> None:
    """Say who is connected to a collector, at which step and how far behind.

    RANKSCOPE_TOKEN_FILE and RANKSCOPE_TLS_CA are used as an agent uses them. Exit status: 0 all is
    well, 1 a process is away or lost records, or a run stores nothing, 2 no answer.

    Example: rankscope status storage7:4317 --watch 2
    """
    try:
        config = TransportConfig.from_env({**os.environ, "RANKSCOPE_COLLECTOR": address})
        while True:
            answer = ask(config, address, timeout)
            typer.echo(as_text(answer) if not as_json else json.dumps(as_dict(answer), indent=2))
            if not watch:
                raise typer.Exit(int(is_troubled(answer)))
            time.sleep(watch)
    except (NoAnswer, ConfigError) as error:
        typer.echo(f"rankscope status: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def ask(config: TransportConfig, address: str, timeout_seconds: float) -> pb.Status:
    """The collector's Status; raises NoAnswer."""
    grpc, stubs = load_grpc(lambda level, text: None)
    hello = with_token(config, pb.Hello(protocol_version=PROTOCOL_VERSION, probe=True, status=True))
    options = [("grpc.enable_http_proxy", 0)]
    try:
        with open_channel(grpc, config, read_secrets(config), address, options) as channel:
            call = stubs.CollectorStub(channel).Collect(
                iter([pb.FromAgent(hello=hello)]), timeout=timeout_seconds
            )
            for answer in call:
                if answer.HasField("status"):
                    return answer.status  # type: ignore[no-any-return]
                if answer.HasField("problem"):
                    raise NoAnswer(f"{address} says {answer.problem.message}")
    except grpc.RpcError as error:
        why = why_not(config, address, 1.0) or f"{error.code().name}: {error.details()}"
        raise NoAnswer(f"{address} does not answer: {why}") from None
    raise NoAnswer(f"{address} is a collector that knows no status: upgrade it")


def is_troubled(answer: pb.Status) -> bool:
    """Whether somebody should look."""
    return any(
        run.problem
        or any(p.state == "away" or p.dropped_events or p.refused_batches for p in run.processes)
        for run in answer.runs
    )


def as_dict(answer: pb.Status) -> dict[str, Any]:
    """With every field, whether it is zero or not; `step` is null where nothing came."""
    return {
        "streams": answer.streams,
        "held_bytes": answer.held_bytes,
        "runs": [
            {
                "run": run.run,
                "events": run.events,
                "bytes": run.bytes,
                "disk_bytes": run.disk_bytes,
                "queued": run.queued,
                "problem": run.problem or None,
                "processes": [_process(process) for process in run.processes],
            }
            for run in answer.runs
        ],
    }


def as_text(answer: pb.Status) -> str:
    """A line for each run and one for each of its processes."""
    return "\n".join(_lines(answer))


def _process(process: pb.ProcessStatus) -> dict[str, Any]:
    found = {field.name: getattr(process, field.name) for field in process.DESCRIPTOR.fields}
    return found | {"step": process.step if process.HasField("step") else None}


def _lines(answer: pb.Status) -> Iterator[str]:
    held = answer.held_bytes / 2**20
    yield f"{answer.streams} streams, {held:.1f} MiB wait for their commit"
    for run in answer.runs:
        disk = run.disk_bytes / 2**20
        yield f"{run.run}: {run.events} events, {disk:.1f} MiB on disk, {run.queued} queued"
        if run.problem:
            yield f"  nothing is stored: {run.problem}"
        for one in sorted(run.processes, key=lambda p: (len(p.folder), p.folder)):
            step = f"step {one.step}" if one.HasField("step") else "no step"
            lost = f", {one.dropped_events} events dropped" if one.dropped_events else ""
            lost += f", {one.refused_batches} batches refused" if one.refused_batches else ""
            yield (
                f"  {one.folder or one.process_uuid[:8]:10} {one.state:9} {step}, {one.behind} "
                f"batches behind, heard {one.silent_seconds:.0f} s ago{lost} ({one.host})"
            )
