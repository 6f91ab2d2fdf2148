"""Processes whose stream broke: when they count as lost, and what their spool still holds.

A process that comes back in time is not lost. One of this host that is provably gone is lost at
once, and the rest of its batches is read from its spool. One that is lost but not provably gone is
looked after: its spool is read when it is.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rankscope.collector import liveness, spool_reader
from rankscope.collector.config import Config
from rankscope.collector.positions import Position, Positions
from rankscope.v1 import collector_pb2 as pb

_IMPORT_BYTES = 8 << 20
_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.05


class Ingest(Protocol):
    """Where batches of the dead go."""

    def batch(self, process: str, batch: pb.SequencedBatch, session: None) -> None:
        """One batch out of a spool."""

    def commit(self) -> None:
        """Store what came."""

    def lost(self, process: str) -> None:
        """The process is lost."""

    def holds(self, process: str) -> bool:
        """Whether batches of the process wait for tensors."""

    def exhausted(self, process: str) -> None:
        """Nothing more will come of the process: what waits for more may go on without."""


@dataclass
class _Import:
    process: str
    folder: Path
    frames: Iterator[spool_reader.Frame]


class Absence:
    """Looks after the processes of a run that have no stream. Owned by the committer."""

    def __init__(self, positions: Positions, ingest: Ingest, config: Config) -> None:
        self._positions, self._ingest, self._config = positions, ingest, config
        self._imports: list[_Import] = []
        self._imported: set[str] = set()
        self._read: list[_Import] = []  # to the end, but not all of it is committed
        self._look_at = 0.0

    def begin(self, position: Position, grace_seconds: float | None = None) -> None:
        """A process has no stream any more, or none yet in this life of the collector."""
        if position.left:  # it may have ended without hearing so: its spool is then ours to remove
            position.watched = liveness.on_this_host(position.hello.host, position.hello.boot_id)
            return
        gone = position.hello.delivered_later or liveness.is_gone(position.hello)
        grace = self._config.lost_after_seconds if grace_seconds is None else grace_seconds
        position.lost_at = time.monotonic() + (0.0 if gone else grace)

    def may_adopt(self, process: str) -> bool:
        """Whether the left-over spool of a process is still to be read."""
        position = self._positions.get(process)
        return process not in self._imported and (position is None or position.session is None)

    def read_spool(self, process: str) -> None:
        """Read the rest of a dead process from its spool; then it has left or is lost."""
        position = self._positions[process]
        folder = Path(position.hello.spool_path)
        segments = spool_reader.left_over(folder).get(process, []) if folder.is_absolute() else []
        frames = spool_reader.read_batches(segments, after=position.accepted)
        self._imports.append(_Import(process, folder, frames))
        if folder.is_absolute():  # else it is not known yet where the spool lies
            self._imported.add(process)

    def look(self) -> None:
        """Do what is due: declare processes lost, read spools for a while."""
        now = time.monotonic()
        for process, position in self._positions.all():
            if position.lost_at is not None and position.lost_at <= now:
                position.lost_at = None
                self._lose(process, position)
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            for process, position in self._positions.all():
                if position.watched and liveness.is_gone(position.hello):
                    position.watched = False
                    self.read_spool(process)
        if self._imports:
            self._pull()
        for ended in [ended for ended in self._read if not self._ingest.holds(ended.process)]:
            self._read.remove(ended)
            self._ingest.commit()
            self._end(ended)

    def next_due(self) -> float:
        """When `look` is to be called next."""
        if self._imports:
            return 0.0
        if self._read:
            return time.monotonic() + _POLL_SECONDS
        lost_at = [p.lost_at for _, p in self._positions.all() if p.lost_at is not None]
        return min([self._look_at, *lost_at])

    def busy(self) -> bool:
        """Whether somebody may still come back in time, or a spool is being read."""
        return bool(self._imports or self._read) or any(
            p.lost_at is not None for _, p in self._positions.all()
        )

    def _lose(self, process: str, position: Position) -> None:
        if liveness.is_gone(position.hello):
            self.read_spool(process)
            return
        position.watched = not position.hello.delivered_later
        position.left = position.hello.delivered_later
        self._ingest.lost(process)

    def _pull(self) -> None:
        size = 0
        current = self._imports[0]
        while size < _IMPORT_BYTES:
            if (frame := next(current.frames, None)) is None:
                self._imports.pop(0)
                break
            size += len(frame.payload)
            sequence, payload, crc32 = frame
            batch = pb.SequencedBatch(sequence=sequence, payload=payload, crc32=crc32)
            self._ingest.batch(current.process, batch, None)
        self._ingest.commit()
        if current not in self._imports:
            self._ingest.exhausted(current.process)
            self._read.append(current)

    def _end(self, ended: _Import) -> None:
        position = self._positions[ended.process]
        if position.session is not None:
            return  # it lives after all
        if not position.left:
            position.left = True
            self._ingest.lost(ended.process)
        if ended.folder.is_absolute():
            spool_reader.remove(ended.folder, ended.process, position.durable)
