"""One captured content: its bytes while they are in memory, its digest once it is known."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from rankscope.agent.statistics.faults import PATIENCE
from rankscope.agent.statistics.memory import array_at

from .memory import Region

_SMALL_BYTES = 1 << 14
_U1 = np.dtype("u1")
#: What was written so long ago is written again when it is seen again.
RENEW_SECONDS = 600.0


class Blob:
    """Equal contents of one dtype and shape share one, as far as that is noticed."""

    __slots__ = (
        *("digest", "dtype", "event", "failed", "host", "made"),
        *("region", "shape", "size", "stored"),
    )

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], size: int) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self.size = size
        self.digest = b""
        self.made = time.monotonic()
        self.region: Region | None = None  # None: the bytes are not in memory any more
        self.host: torch.Tensor | None = None  # copy from a device, complete after `event`
        self.event: Any = None
        self.stored = False
        self.failed = False  # the device never gave the bytes

    @property
    def view(self) -> memoryview:
        """The bytes; waits for a copy that is under way. Raises what the device raises."""
        if self.event is not None:
            event, self.event = self.event, None
            PATIENCE.wait_for([event])
        if self.host is not None:
            return self.host.numpy().data
        assert self.region is not None
        return self.region.view

    @property
    def is_fresh(self) -> bool:
        """Whether a collector surely has what this process wrote of it. `rankscope rm` may take
        away what was not brought for an hour.
        """
        return time.monotonic() - self.made < RENEW_SECONDS


def digest(dtype: torch.dtype, shape: Sequence[int], data: Any) -> bytes:
    """What names a tensor, see Blob in collector.proto."""
    hasher = blake3(f"{dtype} {','.join(map(str, shape))}\n".encode())
    hasher.update(data)
    return hasher.digest()


def bytes_at(address: int, size: int) -> Any:
    """Memory as a buffer; valid while its owner lives."""
    if size <= _SMALL_BYTES:  # cheaper to copy than to make a view of
        return ctypes.string_at(address, size)
    return array_at(address, _U1, (size,))
