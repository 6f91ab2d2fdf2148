"""Who this process is and its way to the collector: the rank as it becomes known, and the transport
from the first recorded step on.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable

import torch

from rankscope.agent import hello as hello_message
from rankscope.agent import identity
from rankscope.agent.config import Config
from rankscope.agent.coordinates import coordinates
from rankscope.agent.log import log
from rankscope.agent.recorder import Recorder
from rankscope.agent.statistics.faults import PATIENCE
from rankscope.agent.transport import Transport, TransportConfig, signals
from rankscope.agent.transport.tensor_files import TensorFiles
from rankscope.v1 import collector_pb2 as pb

#: Rank sources that a later look cannot better.
_FINAL = ("rank_id", "RANKSCOPE_RANK_ID", "process_group")


class Connection:
    """Carries what the recorder holds to the collector. Called under the recording's lock, but for
    `take` and `lost`, which are the transport thread's.
    """

    def __init__(self, recorder: Recorder, on_signal: Callable[[float], None]) -> None:
        """`on_signal(seconds)` is called when a signal ends the process: stop, and close within
        that time.
        """
        self._recorder = recorder
        self._on_signal = on_signal
        self.rank: pb.Rank | None = None
        self._rank_id: int | None = None
        self._coordinates: dict[str, int] = {}
        self._starts = 0
        self._transport: Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def open(self, config: Config) -> None:
        """Say hello and begin to send; the first recorded step does it."""
        transport_config = TransportConfig.from_mapping(vars(config))
        process_uuid = uuid.uuid4().hex
        hello = hello_message.hello(
            config,
            process_uuid,
            rank=self.rank,
            device=_device(),
            spool_path=transport_config.spool_folder(),
        )
        os.environ[identity.PARENT_VARIABLE] = identity.parent_value(process_uuid, os.environ)
        self._transport = Transport(transport_config, hello, self, log, self.use_files)
        if (capture := self._recorder.capture) is not None:
            capture.wake = self._transport.wake
        self._transport.start()
        signals.install(self._on_signal, self._recorder.when_free)

    def wake(self) -> None:
        """Something is worth sending now; waits where the job is to wait for the spool."""
        if self._transport is not None:
            self._transport.wake()
            self._transport.throttle()

    def close(self, reason: str, timeout_seconds: float) -> None:
        """Flush within the deadline and say goodbye. Safe to call twice."""
        if self._transport is not None:
            self._update_rank()
            PATIENCE.shorten(timeout_seconds / 2)
            self._transport.close(reason, timeout_seconds)

    def abandon_after_fork(self) -> None:
        """In a forked child: nothing of the parent's is this process's."""
        if self._transport is not None:
            self._transport.abandon_after_fork()

    # ------------------------------------------------------------------------------------ the rank

    def call_rank(self, rank_id: int | None) -> None:
        """Take the script's own word for the rank, as long as nothing has been sent."""
        if self._transport is None:
            self._rank_id = rank_id

    def learn_rank(self) -> None:
        """Look for the rank until a final source has told it, and for coordinates, which may be
        set up later; on the script's thread, between taps.
        """
        self._coordinates.update(coordinates(meshes=self._looks_at_meshes()))
        if self.rank is not None and self.rank.source in _FINAL:
            rank = pb.Rank()
            rank.CopyFrom(self.rank)
            rank.coordinates.update(self._coordinates)
            return self._take_rank(rank)
        claim = identity.find_rank(self._rank_id, identity.group_rank(), os.environ)
        if claim is not None:
            self._take_rank(hello_message.rank_message(claim, self._coordinates))

    def _looks_at_meshes(self) -> bool:
        """At the first starts, then ever more rarely: finding meshes looks at every object."""
        self._starts += 1
        return self._starts.bit_count() == 1

    def _update_rank(self) -> None:
        """The same from the transport's thread: only the process group can be news."""
        if self.rank is not None and self.rank.source in _FINAL:
            return
        group = identity.group_rank()
        if group is not None:
            claim = identity.find_rank(self._rank_id, group, os.environ)
            if claim is not None:
                self._take_rank(hello_message.rank_message(claim, self._coordinates))

    def _take_rank(self, rank: pb.Rank) -> None:
        if rank != self.rank:
            self.rank = rank
            if self._transport is not None:
                self._recorder.rank_learned(rank)

    # --------------------------------------------------------------------- what the transport asks

    def take(self) -> pb.Batch | None:
        """The next batch."""
        self._update_rank()
        return self._recorder.take()

    def lost(self, batch: pb.Batch, reason: str) -> None:
        """A batch that will never be sent."""
        self._recorder.lost(batch, reason)

    def use_files(self, files: TensorFiles | None) -> None:
        """Where whole tensors go without the stream, when the collector is on this host."""
        if (capture := self._recorder.capture) is not None:
            capture.keeper = files


def _device() -> str:
    """The accelerator this process has chosen so far, without creating a context on one."""
    try:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            return "cpu"
        return f"{accelerator.type}:{torch.accelerator.current_device_index()}"
    except (AttributeError, RuntimeError):
        return ""
