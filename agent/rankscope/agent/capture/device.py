"""Copies off an accelerator that nobody waits for: pinned memory, and a stream of their own where
the accelerator has streams.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from .values import dense


class DeviceCopies:
    """One side stream a device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A flat copy of the bytes in host memory, and the event after which it is complete.

        The copy is of what the tensor holds once the work queued so far is done.
        """
        flat = dense(tensor).reshape(-1).view(torch.uint8)
        host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        module: Any = getattr(torch, tensor.device.type, None)
        if not hasattr(module, "Stream") or not hasattr(module, "current_stream"):
            host.copy_(flat)
            return host, None
        side = self._streams.get(tensor.device)
        if side is None:
            side = self._streams[tensor.device] = module.Stream(device=tensor.device)
        side.wait_stream(module.current_stream(tensor.device))
        within = module.stream(side) if hasattr(module, "stream") else nullcontext()
        with within:
            host.copy_(flat, non_blocking=True)
        # What the loop does next to this memory has to wait for the copy, on the device.
        module.current_stream(tensor.device).wait_stream(side)
        flat.record_stream(side)
        return host, side.record_event()
