"""`rankscope doctor`: what is wrong with a set-up, and what to do. No torch, no pyarrow.

A check is a function that returns findings; `examine` is the list of them.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rankscope.agent.checks import addresses
from rankscope.agent.doctor import host, job, network, software
from rankscope.agent.doctor.finding import LEVELS, Finding, worst
from rankscope.agent.transport.config import TransportConfig

_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}


def doctor(
    address: Annotated[
        str | None, typer.Argument(help="HOST:PORT of a collector; default: the settings'.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A config.json, which is checked key by key.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each address.")] = 5.0,
) -> None:
    """Say what is wrong with this set-up, and what to do about it.

    Run it where the job runs, in the job's environment. Exit status: 0 all is well, 1 there are
    warnings, 2 something does not work.

    Example: rankscope doctor storage7:4317 --config config.json
    """
    if address is not None:
        try:
            addresses(address)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; allowed: HOST:PORT") from None
    findings = list(examine(address, config, os.environ, timeout))
    status = worst(findings)
    if as_json:
        listed = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"status": LEVELS[status], "findings": listed}, indent=2))
    else:
        for finding in findings:
            typer.echo("\n".join(_lines(finding)))
    raise typer.Exit(status)


def examine(
    address: str | None,
    config_path: Path | None,
    environ: Mapping[str, str],
    timeout_seconds: float,
) -> Iterator[Finding]:
    """All findings, from the installation to the collector."""
    if address is not None:
        environ = {**environ, "RANKSCOPE_COLLECTOR": address}
    yield from software.versions()
    yield software.contract()
    yield from software.compiled()
    if config_path is not None:
        yield from job.config_file(config_path)
    config, faults = job.settings(config_path, environ)
    yield from faults
    yield from job.variables(environ)
    yield from job.rank(environ)
    yield from host.limits()
    yield host.forks(environ)
    yield from host.disks(config, environ)
    if not config.collector:
        yield software.collector()
    for place in config.collector:
        yield from network.collector_at(
            place, timeout_seconds, TransportConfig.from_mapping(vars(config))
        )


def _lines(finding: Finding) -> Iterator[str]:
    level = f"{finding.level:8}"
    if "NO_COLOR" not in os.environ:
        level = typer.style(level, fg=_COLOURS[finding.level])  # echo takes it off for no terminal
    yield f"{level} {finding.name}: {finding.what}"
    if finding.remedy:
        yield f"{'':8} -> {finding.remedy}"
