"""`rankscope deliver`: sends what processes left in their spools. No torch, no pyarrow."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.embedded import EmbeddedCollector
from rankscope.agent.transport.leftovers import Delivery, deliver_leftover, spools_in
from rankscope.agent.transport.segment import parse_name
from rankscope.agent.transport.sender import FixedAddresses, Locator
from rankscope.agent.transport.stream import LogFunction
from rankscope.v1 import collector_pb2 as pb


@dataclass(frozen=True)
class DeliverReport:
    """One entry per process whose spool was looked at."""

    deliveries: tuple[Delivery, ...]

    @property
    def complete(self) -> bool:
        """Nothing is left but the spools of living processes."""
        return all(d.delivered or d.problem == "in use" for d in self.deliveries)


def deliver(spools: list[Path], collector: str = "", timeout: float = 60.0) -> None:
    """Send the records that ended processes left in SPOOLS (folders or *.spool files).

    May be repeated: what a collector has already is not stored again, and files go away only when
    all they hold is acknowledged. Spools of processes that still run are left to them. Without
    --collector (host:port) and RANKSCOPE_COLLECTOR, a spool beside a dump folder goes to the
    collector of that folder, which is started for it.
    """
    try:
        report = deliver_spools(spools, collector or None, timeout, _to_stderr)
    except (OSError, ValueError) as error:
        raise SystemExit(f"rankscope deliver: {error}") from None
    for delivery in report.deliveries:
        print(_line(delivery))
    if not report.deliveries:
        print("nothing to deliver")
    if not report.complete:
        raise SystemExit(1)


def deliver_spools(
    paths: Sequence[Path], address: str | None, timeout_seconds: float, log: LogFunction
) -> DeliverReport:
    """Deliver every spool under `paths`, one process after the other, within the time in all.

    `address` is "host:port" (several joined by commas) or None: from the environment, else the
    embedded collector of the dump folder. Raises FileNotFoundError for a path that is none.
    """
    config = _config(address)
    deadline = time.monotonic() + timeout_seconds
    deliveries = []
    for folder, uuid in _wanted(paths):
        locator = _locator_for(config, folder, log)
        deliveries.append(deliver_leftover(folder, uuid, locator, config, log, deadline))
    return DeliverReport(tuple(deliveries))


def _config(address: str | None) -> TransportConfig:
    environ = dict(os.environ)
    if address is not None:
        environ["RANKSCOPE_COLLECTOR"] = address
    return TransportConfig.from_env(environ)


def _wanted(paths: Iterable[Path]) -> list[tuple[Path, str]]:
    """(folder, process) of each spool, once; folders are searched with what lies below them."""
    found: dict[tuple[Path, str], None] = {}
    for path in paths:
        path = path.absolute()
        parsed = parse_name(path.name)
        if parsed and path.is_file():
            found[(path.parent, parsed[0])] = None
        elif path.is_dir():
            for folder in (path, *sorted(p for p in path.rglob("*") if p.is_dir())):
                found.update(dict.fromkeys((folder, uuid) for uuid in spools_in(folder)))
        else:
            raise FileNotFoundError(f"{path}: neither a folder nor a *.spool file")
    return list(found)


def _locator_for(
    config: TransportConfig, folder: Path, log: LogFunction
) -> Callable[[pb.Hello], Locator]:
    def locator(hello: pb.Hello) -> Locator:
        if config.collector:
            return FixedAddresses(config.collector)
        sidecar = folder.parent
        if folder.name == "spool" and sidecar.name.endswith(".rankscope"):
            return EmbeddedCollector(sidecar.with_name(sidecar.name[: -len(".rankscope")]), log)
        return EmbeddedCollector(Path(hello.dump_path), log)

    return locator


def _line(delivery: Delivery) -> str:
    who = f"process {delivery.process_uuid}"
    if delivery.delivered:
        return f"{who}: delivered {delivery.batches} batches"
    if delivery.problem == "in use":
        return f"{who}: still running, or being delivered by somebody else; left alone"
    return f"{who}: not delivered: {delivery.problem}"


def _to_stderr(level: str, text: str) -> None:
    print(f"rankscope: {level}: {text}", file=sys.stderr)
