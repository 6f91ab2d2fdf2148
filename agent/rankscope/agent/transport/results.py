"""What the transport asks of the recording side, and what it tells about itself."""

from dataclasses import dataclass
from typing import Protocol

from rankscope.v1 import collector_pb2 as pb


class BatchSource(Protocol):
    """The recording side. Never called by two threads at once."""

    def take(self) -> pb.Batch | None:
        """Everything recorded since the last call; None: nothing. May be changed by the caller."""

    def lost(self, batch: pb.Batch, reason: str) -> None:
        """This batch will never be sent: a later one is to count its events per step, announce its
        stacks again and repeat its steps, rank, recording and drops (not its goodbye)."""


@dataclass(frozen=True)
class TransportStats:
    """Counts since the start."""

    state: str
    """"new", "waiting" (for a collector), "connected" or "closed"."""
    spooled_batches: int
    spooled_bytes: int
    sent_batches: int
    """Repeats after a broken stream included."""
    sent_bytes: int
    acked_batches: int
    refused_batches: int
    dropped_batches: int
    address: str
    run_path: str
    spool_path: str
    """Empty: the spool is in memory."""
    last_problem: str


@dataclass(frozen=True)
class CloseResult:
    """How the end went."""

    complete: bool
    """Every batch is durable at the collector."""
    farewell: bool
    """The collector wrote this process's layout files."""
    unsent_batches: int = 0
    """They lie in `spool_path`; lost when that is empty."""
    spool_path: str = ""
    run_path: str = ""
    folders: tuple[str, ...] = ()
    """Written for this process, relative to `run_path`."""
    seconds: float = 0.0
