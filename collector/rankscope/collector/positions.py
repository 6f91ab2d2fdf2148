"""How far each process of a run is, and the stream it has."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rankscope.v1 import collector_pb2 as pb


class Session(Protocol):
    """The stream of one process. Called from any thread, never blocks."""

    def send(self, message: pb.FromCollector) -> None:
        """Put a message on the stream."""

    def close(self) -> None:
        """End the stream after what was sent."""

    def release(self, size: int) -> None:
        """So many bytes that were read are not held any more."""


@dataclass
class Position:
    """How far a process is. `accepted` counts what waits for its commit, too."""

    hello: pb.Hello
    accepted: int
    durable: int
    session: Session | None = None
    lost_at: float | None = None  # when it counts as lost if it does not come back
    watched: bool = False  # lost, but not provably gone
    left: bool = False  # nothing more will come
    newest: int = 0  # of its spool, as far as it said
    step: int | None = None  # the highest one of which anything is stored
    heard_at: float = field(default_factory=time.monotonic)
    refused: int = 0  # batches


class Positions:
    """The positions of a run. Owned by its committer; any thread may count."""

    def __init__(self, durable_sequence: Callable[[str], int]) -> None:
        self._durable_sequence = durable_sequence
        self._known: dict[str, Position] = {}

    def get(self, process: str) -> Position | None:
        """The position of a process that said hello."""
        return self._known.get(process)

    def __getitem__(self, process: str) -> Position:
        return self._known[process]

    def enter(self, hello: pb.Hello) -> Position:
        """The process said hello, or was told of; it is not lost."""
        position = self._known.get(hello.process_uuid)
        if position is None:
            durable = self._durable_sequence(hello.process_uuid)
            position = self._known[hello.process_uuid] = Position(hello, durable, durable)
        position.hello = hello
        position.lost_at = None
        position.watched = False
        position.heard_at = time.monotonic()
        return position

    def all(self) -> list[tuple[str, Position]]:
        """Every process with its position."""
        return list(self._known.items())

    def count(self) -> int:
        """Processes that are known."""
        return len(self._known)

    def sessions(self) -> int:
        """Processes with a stream."""
        return sum(position.session is not None for _, position in self.all())

    def waiting(self) -> int:
        """Processes that broke off and may come back."""
        return sum(p.session is None and not p.left for _, p in self.all())

    def send(self, process: str, message: pb.FromCollector) -> None:
        """To one process, if it has a stream."""
        position = self._known.get(process)
        if position is not None and position.session is not None:
            position.session.send(message)

    def send_all(self, message: pb.FromCollector) -> None:
        """To every process that has a stream."""
        for process, _ in self.all():
            self.send(process, message)

    def close_all(self) -> None:
        """End every stream."""
        for _, position in self.all():
            if position.session is not None:
                position.session.close()
