"""Statistics of tensors on an accelerator: results stay there and come over in one copy a flush.

Nothing here waits for the device while a tensor is added. What is held on the device: seven 0-d
results a tensor until GROUP tensors have come together (at most 512 bytes each, 4 MB in all), then
56 bytes a tensor until they are taken; while a tensor is counted, one byte an element. Checksums
need the bytes: a copy to pinned memory is queued and read at the flush. Only where copies of more
than COPIED_BYTES wait does adding wait for the device, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rankscope.v1.collector_pb2 import HAS_CHECKSUM

from .checksum import CHECKSUMS
from .columns import MEASURED, Overrides
from .faults import PATIENCE, Failed, reason_of
from .guard import unseen
from .table import STATISTICS

Rows = npt.NDArray[Any]

#: Tensors whose results are gathered into one buffer.
GROUP = 1024

#: Copies waiting for their checksum, in host memory.
COPIED_BYTES = 256 << 20


class DeviceResults:
    """Results of one device's tensors, in the order they were added."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._entries: list[int] = []
        self._results: dict[tuple[torch.dtype, str], tuple[list[int], list[torch.Tensor]]] = {}
        self._waiting = 0
        self._packed: list[tuple[str, list[int], torch.Tensor]] = []
        self._streams: dict[int, Any] = {}
        self._copies: list[tuple[int, torch.Tensor]] = []
        self._copied_bytes = 0
        self._checksums: list[tuple[int, int]] = []

    def add(self, entry: int, tensor: torch.Tensor) -> None:
        """Queue the computation of all statistics of a tensor's values on the current stream."""
        self._remember_stream()
        tensor = plain_numbers(tensor)
        floating = tensor.dtype.is_floating_point
        found = {
            statistic.name: statistic.on_device(tensor)
            for statistic in STATISTICS
            if floating or statistic.name not in ("nan_count", "inf_count")
        }
        for name, result in found.items():
            entries, results = self._results.setdefault((result.dtype, name), ([], []))
            entries.append(entry)
            results.append(result)
        self._entries.append(entry)
        self._waiting += 1
        if self._waiting >= GROUP:
            self._join_streams()
            self._pack()

    def add_bytes(self, entry: int, tensor: torch.Tensor, checksum: str) -> None:
        """Queue a copy of the bytes of a tensor's values for its checksum."""
        self._remember_stream()
        values = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
        flat = values.contiguous().reshape(-1).view(torch.uint8)
        pinned = self.device.type != "cpu"
        copy = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=pinned)
        self._copies.append((entry, copy.copy_(flat, non_blocking=True)))
        self._copied_bytes += copy.numel()
        if self._copied_bytes > COPIED_BYTES:
            PATIENCE.wait_for(self.finish())
            self._sum_copies(checksum)

    def finish(self) -> list[Any]:
        """Events that stand after what was queued, one a stream that was used. Never raises: the
        one who waits learns what is wrong.
        """
        try:
            return [stream.record_event() for stream in self._streams.values()]
        except Exception as error:
            return [Failed(error)]

    def reduce(self, events: list[Any], rows: Rows, overrides: Overrides, checksum: str) -> None:
        """Wait for `events` and write everything into `rows`; one copy from the device a dtype.
        Where that raises, `lose` is to be called.
        """
        PATIENCE.wait_for(events)
        with unseen(), self._aside():
            self._pack()
            values = fetch([packed for _, _, packed in self._packed])
        for (name, entries, _), column in zip(self._packed, values, strict=True):
            for entry, value in zip(entries, column.tolist(), strict=True):
                rows[name][entry] = value
                if isinstance(value, int) and abs(value) > 2**53:
                    overrides.setdefault(entry, {})[name] = value
        rows["flags"][self._entries] |= np.uint64(MEASURED)
        self._sum_copies(checksum)
        for entry, value in self._checksums:
            rows["checksum"][entry] = value
            rows["flags"][entry] |= np.uint64(HAS_CHECKSUM)

    def lose(self, rows: Rows, overrides: Overrides, error: Exception) -> None:
        """Nothing can be had from the device: the entries go without values and say why."""
        waiting = [entry for entry, _ in (*self._copies, *self._checksums)]
        note = f"statistics failed: {reason_of(error)}"
        for entry in {*self._entries, *waiting}:
            rows[entry] = np.zeros((), rows.dtype)
            overrides[entry] = {"note": note}

    def _sum_copies(self, checksum: str) -> None:
        for entry, data in self._copies:
            self._checksums.append((entry, CHECKSUMS[checksum]([data.numpy()])))
        self._copies.clear()
        self._copied_bytes = 0

    def _pack(self) -> None:
        for (_, name), (entries, results) in self._results.items():
            self._packed.append((name, entries, torch.stack(results)))
        self._results = {}
        self._waiting = 0

    def _aside(self) -> AbstractContextManager[Any]:
        """A stream of our own, so that fetching queues behind nothing."""
        module: Any = getattr(torch, self.device.type, None)
        has_streams = hasattr(module, "Stream") and hasattr(module, "stream")
        if self.device.type == "cpu" or not has_streams:
            return nullcontext()
        stream: AbstractContextManager[Any] = module.stream(module.Stream(device=self.device))
        return stream

    def _join_streams(self) -> None:
        """Let the current stream wait, on the device, for the others that hold results."""
        if len(self._streams) < 2:
            return
        current = getattr(torch, self.device.type).current_stream(self.device)
        for stream in self._streams.values():
            if stream != current:
                current.wait_stream(stream)
        for _, results in self._results.values():
            for result in results:
                result.record_stream(current)

    def _remember_stream(self) -> None:
        module = getattr(torch, self.device.type, None)
        current = getattr(module, "current_stream", None)
        if self.device.type != "cpu" and current is not None:
            stream = current(self.device)
            self._streams[hash(stream)] = stream


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether work queued now would go into a graph instead of being done."""
    module = None if tensor.is_cpu else getattr(torch, tensor.device.type, None)
    asks = getattr(module, "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


def plain_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """What the statistics of a tensor are taken of; without a sync."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        return tensor.abs()
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.to(torch.float32)
    return tensor


def fetch(packed: list[torch.Tensor]) -> list[npt.NDArray[Any]]:
    """All buffers on the host, with one copy a dtype."""
    found: dict[int, npt.NDArray[Any]] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in packed):
        which = [i for i, tensor in enumerate(packed) if tensor.dtype is dtype]
        joined = torch.cat([packed[i] for i in which]).cpu()
        plain = joined.float() if joined.dtype is torch.bfloat16 else joined
        sizes = np.cumsum([packed[i].numel() for i in which])[:-1]
        found.update(zip(which, np.split(plain.numpy(), sizes), strict=True))
    return [found[i] for i in range(len(packed))]
