"""What a collector shows: Prometheus metrics on a port of their own, and `rankscope status`.

Everything is read when it is asked for, from counts that the threads of the runs keep anyway.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.v1 import collector_pb2 as pb

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from rankscope.collector.daemon import LazyRuns
    from rankscope.collector.runs import RunService
    from rankscope.collector.security import Access
    from rankscope.collector.server import Servicer

#: name -> (kind, labels, help). docs/security.md has a line for each.
METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "rankscope_streams": ("gauge", (), "Streams that are open."),
    "rankscope_streams_total": ("counter", (), "Streams that were opened."),
    "rankscope_streams_refused": ("counter", ("reason",), "Streams refused, by reason."),
    "rankscope_held_bytes": ("gauge", (), "Read from streams and not committed yet."),
    "rankscope_disk_free_bytes": ("gauge", (), "Free where the store lies."),
    "rankscope_events": ("counter", ("run",), "Events stored."),
    "rankscope_rows": ("counter", ("run",), "Rows of the table records stored."),
    "rankscope_received_bytes": ("counter", ("run",), "Bytes of batches stored."),
    "rankscope_batches": ("counter", ("run",), "Batches stored."),
    "rankscope_refused_batches": ("counter", ("run",), "Malformed batches set aside."),
    "rankscope_acks": ("counter", ("run",), "Acknowledgements sent."),
    "rankscope_queue_depth": ("gauge", ("run",), "Messages that wait to be looked at."),
    "rankscope_commits": ("counter", ("run",), "Commits."),
    "rankscope_commit_seconds": ("counter", ("run",), "Time that commits took."),
    "rankscope_seals": ("counter", ("run",), "Steps sealed."),
    "rankscope_seal_seconds": ("counter", ("run",), "Time that seals took."),
    "rankscope_disk_bytes": ("gauge", ("run",), "Of the run's tables, measured every 10 s."),
    "rankscope_blocked": ("gauge", ("run",), "1: nothing is stored (disk or quota)."),
    "rankscope_processes": ("gauge", ("run", "state"), "Processes: connected, away, left."),
    "rankscope_lag_batches": ("gauge", ("run", "process"), "Batches in a spool, not stored yet."),
    "rankscope_dropped_events": (
        "counter",
        ("run", "process"),
        "Events that an agent dropped, as far as it said.",
    ),
}


def status_of(runs: "LazyRuns") -> pb.Status:
    """The open runs and their processes. Any thread but the event loop's."""
    made = runs.made
    services = made.open() if made is not None else []
    return pb.Status(runs=[_run(service) for service in services])


def _run(service: "RunService") -> pb.RunStatus:
    committer = service.committer
    counts = committer.counts
    problem = committer.unavailable or service.why_full() or ""
    return pb.RunStatus(
        run=service.run_path.name,
        events=counts.events,
        bytes=counts.bytes,
        disk_bytes=counts.disk_bytes,
        queued=committer.queued,
        problem=problem,
        processes=_processes(service),
    )


def _processes(service: "RunService") -> Iterator[pb.ProcessStatus]:
    now = time.monotonic()
    dropped = service.committer.counts.dropped
    for process, position in service.committer.positions.all():
        hello = position.hello
        state = "left" if position.left else "connected" if position.session else "away"
        yield pb.ProcessStatus(
            process_uuid=process,
            host=hello.host,
            pid=hello.pid,
            folder=service.folder_of(process),
            state=state,
            step=position.step,
            durable_sequence=position.durable,
            behind=max(position.newest, position.accepted) - position.durable,
            silent_seconds=max(now - position.heard_at, 0.0),
            dropped_events=min(dropped.get(process, 0), 2**64 - 1),
            refused_batches=position.refused,
        )


class Exporter:
    """A collector in the sense of prometheus_client."""

    def __init__(self, runs: "LazyRuns", servicer: "Servicer", store: Path) -> None:
        self._runs, self._servicer, self._store = runs, servicer, store

    def describe(self) -> "list[Metric]":
        """Nothing is read when it is registered."""
        return []

    def collect(self) -> "Iterator[Metric]":
        """All metrics, as they are now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        families = {
            name: kinds[kind](name, help_line, labels=labels)
            for name, (kind, labels, help_line) in METRICS.items()
        }
        for name, labels, value in self._values():
            families[name].add_metric(labels, value)
        yield from families.values()

    def _values(self) -> Iterator[tuple[str, list[str], float]]:
        yield "rankscope_streams", [], self._servicer.streams
        yield "rankscope_streams_total", [], self._servicer.ever
        yield "rankscope_held_bytes", [], self._servicer.held_bytes
        yield "rankscope_disk_free_bytes", [], shutil.disk_usage(self._store).free
        for reason, count in list(self._servicer.refused.items()):
            yield "rankscope_streams_refused", [reason], count
        for service in self._runs.made.open() if self._runs.made is not None else []:
            yield from self._of_run(service)

    def _of_run(self, service: "RunService") -> Iterator[tuple[str, list[str], float]]:
        run, committer = [service.run_path.name], service.committer
        counts = committer.counts
        seals, seal_seconds = service.seals
        yield "rankscope_events", run, counts.events
        yield "rankscope_rows", run, counts.rows
        yield "rankscope_received_bytes", run, counts.bytes
        yield "rankscope_batches", run, counts.batches
        yield "rankscope_refused_batches", run, counts.refused
        yield "rankscope_acks", run, counts.acks
        yield "rankscope_queue_depth", run, committer.queued
        yield "rankscope_commits", run, counts.commits
        yield "rankscope_commit_seconds", run, counts.commit_seconds
        yield "rankscope_seals", run, seals
        yield "rankscope_seal_seconds", run, seal_seconds
        yield "rankscope_disk_bytes", run, counts.disk_bytes
        blocked = committer.unavailable or service.why_full()
        yield "rankscope_blocked", run, float(blocked is not None)
        states = {"connected": 0, "away": 0, "left": 0}
        for process in _processes(service):
            states[process.state] += 1
            labels = [*run, process.process_uuid]
            if process.behind:
                yield "rankscope_lag_batches", labels, process.behind
            if process.dropped_events:
                yield "rankscope_dropped_events", labels, process.dropped_events
        for state, count in states.items():
            yield "rankscope_processes", [*run, state], count


def serve_metrics(exporter: Exporter, address: str, access: "Access") -> int:
    """Answer Prometheus on HOST:PORT from a thread; with TLS where the collector uses it and other
    hosts can come. Returns the port."""
    from prometheus_client import CollectorRegistry, start_http_server

    from rankscope.collector.security import stays_here

    registry = CollectorRegistry()
    registry.register(exporter)
    host, _, port = address.rpartition(":")
    tls = {}
    if access.uses_tls and not stays_here(address):
        tls = {
            "certfile": os.fspath(access.tls_cert or ""),
            "keyfile": os.fspath(access.tls_key or ""),
        }
        if access.client_ca is not None:
            tls |= {"client_cafile": os.fspath(access.client_ca), "client_auth_required": True}  # type: ignore[dict-item]
    server, _ = start_http_server(int(port), host.strip("[]"), registry, **tls)  # type: ignore[arg-type]
    return int(server.server_port)
