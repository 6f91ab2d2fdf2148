"""Standard deviations and samples of tensors on an accelerator, queued and fetched as its other
results are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from .columns import Overrides
from .device import GROUP, DeviceResults, Rows, fetch, plain_numbers
from .faults import PATIENCE
from .guard import unseen
from .spread import positions
from .table import float_dtype


class DeviceFigures(DeviceResults):
    """Figures of one device's tensors. Samples wait on the device as float64 (float32 where it has
    none), `samples` numbers a tensor.
    """

    def __init__(self, device: torch.device, samples: int, with_std: bool) -> None:
        super().__init__(device)
        self._samples, self._with_std = samples, with_std
        self._lengths: list[int] = []

    def add(self, entry: int, tensor: torch.Tensor) -> None:
        """Queue the figures of a tensor; of the stored values where it is sparse."""
        self._remember_stream()
        tensor = plain_numbers(tensor)
        if tensor.numel() == 0:
            return
        wide = float_dtype(self.device)
        if self._with_std:
            # torch adds in the tensor's own width; short floats would leave it.
            precise = tensor if tensor.dtype in (torch.float32, wide) else tensor.to(wide)
            self._keep(entry, "std", torch.std(precise, correction=0))
        if self._samples:
            chosen = _indices(tensor.numel(), self._samples, self.device)
            if tensor.is_contiguous():
                picked = tensor.view(-1)[chosen]
            else:
                picked = tensor[torch.unravel_index(chosen, tensor.shape)]
            self._keep(entry, "samples", picked.to(wide))
            self._lengths.append(min(tensor.numel(), self._samples))
        self._entries.append(entry)
        self._waiting += 1
        if self._waiting >= GROUP:
            self._join_streams()
            self._pack()

    def _keep(self, entry: int, name: str, result: torch.Tensor) -> None:
        entries, results = self._results.setdefault((result.dtype, name), ([], []))
        entries.append(entry)
        results.append(result)

    def reduce(self, events: list[Any], rows: Rows, overrides: Overrides, checksum: str) -> None:
        """Wait for `events` and write everything into `rows`."""
        PATIENCE.wait_for(events)
        with unseen(), self._aside():
            self._pack()
            values = fetch([packed for _, _, packed in self._packed])
        for (name, entries, _), column in zip(self._packed, values, strict=True):
            shape = (len(entries), -1) if name == "samples" else (len(entries),)
            rows[name][entries] = column.astype(np.float64).reshape(shape)
        if self._samples:
            rows["sample_count"][self._entries] = self._lengths

    def _pack(self) -> None:
        for (_, name), (entries, results) in self._results.items():
            self._packed.append((name, entries, torch.stack(results).reshape(-1)))
        self._results = {}
        self._waiting = 0


@lru_cache(maxsize=1024)
def _indices(elements: int, samples: int, device: torch.device) -> torch.Tensor:
    """Positions of the samples, made on the device; always `samples` of them, so that those of many
    tensors can be stacked: the last is repeated.
    """
    if elements <= samples or samples == 1:
        return torch.arange(samples, device=device).clamp(max=elements - 1 if samples > 1 else 0)
    if (samples - 1) * (elements - 1) < 2**63:
        return torch.arange(samples, device=device) * (elements - 1) // (samples - 1)
    return torch.from_numpy(positions(elements, samples)).to(device)
