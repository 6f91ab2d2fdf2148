"""Which tensors are kept whole, and their way from the loop to the spool.

In the loop: a CRC finds what was seen before (checked byte by byte, or by digest), all else is
copied. In the transport's thread: digests, and files for what this process has not written yet.
When the memory is full the loop waits for the disk; a tensor is left out, and counted, only when
nothing gets free for `patience_seconds`, or when the spool is full for as long.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rankscope.agent.log import log
from rankscope.agent.statistics import Description
from rankscope.agent.statistics.checksum import crc32_at
from rankscope.agent.statistics.guard import unseen
from rankscope.v1 import collector_pb2 as pb

from .blob import Blob, bytes_at, digest
from .device import DeviceCopies
from .memory import Memory, copy, is_equal, room_for
from .values import dense, is_dense, is_unsupported, is_wrapped, source_of, unwrapped

_MOST_REMEMBERED = 200_000
_GROUP_BYTES = 16 << 20
# The transport is woken when so much waits: the less waits, the fewer pages are used in turn.
_WAKE_BYTES = 64 << 20
_WAKE_SHARE = 4

Leaf = torch.Tensor | Description


class _Refused(Exception):
    """A quota is used up."""


class TensorKeeper(Protocol):
    """Where bytes wait until they are acknowledged."""

    refused: bool
    """Nothing new is to be captured: the collector's quota is used up."""

    def keep(self, tensors: Sequence[tuple[pb.Blob, memoryview]]) -> int:
        """Write bytes and fill in where they lie; how many were written, the rest did not fit."""


class Capture:
    """Captured tensors of one process. The caller holds the recorder's lock around `add`, `take`;
    `make_room` is called without it.
    """

    def __init__(
        self,
        wants: Callable[[str], bool],
        memory_bytes: int,
        patience_seconds: float,
        quota_bytes: int | None = None,
    ) -> None:
        """`wants` says by a record's name whether its tensors are kept; of distinct ones at most
        `quota_bytes` are.
        """
        self._quota = quota_bytes
        self._captured_bytes = 0
        self.memory = Memory(memory_bytes)
        self.keeper: TensorKeeper | None = None
        self.wake: Callable[[], None] = lambda: None
        self._wants = wants
        self._wanted: dict[int, bool] = {}
        self._patience = patience_seconds
        self._stuck_since = -1  # count of frees when waiting was given up
        self._ahead = 0  # room that the rest of the event at hand needs
        self._alone = False  # it is larger than the memory, and nothing else is held
        self._leaves: list[Blob | None] = []
        self._seen: OrderedDict[tuple[Any, ...], Blob] = OrderedDict()
        self._by_digest: OrderedDict[bytes, Blob] = OrderedDict()
        self._devices = DeviceCopies()
        self._guard = threading.Lock()  # between comparing memory and giving it back
        self._left_out: Counter[tuple[int, str]] = Counter()
        self._said: set[str] = set()

    # ------------------------------------------------------------------------------------ hot path

    def wants(self, name: int, text: str) -> bool:
        """Whether the tensors of a record are kept; `name` is the id of its name."""
        wanted = self._wanted.get(name)
        if wanted is None:
            wanted = self._wanted[name] = self._wants(text)
        return wanted

    def make_room(self, needed: int) -> None:
        """Wait until an event that needs so much (see `room_of`) fits into memory."""
        memory = self.memory
        if memory.used > min(_WAKE_BYTES, memory.limit // _WAKE_SHARE):
            self.wake()
        if memory.has_room(needed) or self._stuck_since == memory.freed_count:
            return
        self.wake()
        if not memory.wait(needed, self._patience):
            self._stuck_since = memory.freed_count

    def lacks_room(self, needed: int) -> bool:
        """Whether another thread has taken what `make_room` found, and waiting makes sense."""
        memory = self.memory
        return self._stuck_since != memory.freed_count and not memory.has_room(needed)

    def add(self, step: int, leaves: Sequence[Leaf], wanted: bool) -> None:
        """Keep the values that an event's tensors have now, if that is `wanted`."""
        if not wanted:
            self._leaves.extend([None] * len(leaves))
            return
        self._ahead = room_of(leaves)
        self._alone = self._ahead > self.memory.limit and not self.memory.used
        with unseen():
            for leaf in leaves:
                self._leaves.append(self._keep(step, leaf))
                self._ahead -= room_for(_size_of(leaf))

    def _keep(self, step: int, leaf: Leaf) -> Blob | None:
        try:
            tensor = source_of(leaf)
            if tensor is None:
                if is_unsupported(leaf):
                    self._leave_out(step, "tensor_unsupported")
                return None
            blob = self._copy(tensor) if tensor.is_cpu else self._fetch(tensor)
            reason = "tensor_memory_full"
        except _Refused:
            blob, reason = None, "tensor_quota"
        except Exception as error:
            blob, reason = None, "tensor_error"
            self._say(f"a tensor was not captured: {type(error).__name__}: {error}")
        if blob is None:
            self._leave_out(step, reason)
        return blob

    def _copy(self, tensor: torch.Tensor) -> Blob | None:
        values = tensor if is_dense(tensor) else dense(tensor)
        address, size = values.data_ptr(), values.numel() * values.element_size()
        key = (values.dtype, values.shape, crc32_at(address, size))
        known = self._seen.get(key)
        if known is not None and known.is_fresh and self._is_equal(known, address):
            return known
        self._admit(size)
        region = self.memory.take(size, self._ahead, self._alone)
        if region is None:
            return None
        self._captured_bytes += size
        copy(region.address, address, size)
        blob = Blob(values.dtype, values.shape, size)
        blob.region = region
        self._seen[key] = blob
        if len(self._seen) > _MOST_REMEMBERED:
            self._seen.popitem(last=False)
        return blob

    def _is_equal(self, known: Blob, address: int) -> bool:
        with self._guard:
            if known.region is not None:
                return is_equal(known.region.address, address, known.size)
        if not known.stored:
            return False
        return digest(known.dtype, known.shape, bytes_at(address, known.size)) == known.digest

    def _fetch(self, tensor: torch.Tensor) -> Blob | None:
        size = tensor.numel() * tensor.element_size()
        self._admit(size)
        region = self.memory.count(size)
        if region is None:
            return None
        self._captured_bytes += size
        shape = (tensor.numel(),) if tensor.is_nested else tensor.shape
        blob = Blob(tensor.dtype, shape, size)
        try:
            blob.host, blob.event = self._devices.copy(tensor)
        except BaseException:
            self.memory.give_back(region)
            raise
        blob.region = region
        return blob

    def _admit(self, size: int) -> None:
        """Raises _Refused when a quota has no room for a new tensor."""
        if self.keeper is not None and self.keeper.refused:
            raise _Refused
        if self._quota is not None and self._captured_bytes + size > self._quota:
            raise _Refused

    # ---------------------------------------------------------------------- the transport's thread

    def take(self) -> list[Blob | None]:
        """One entry a tensor leaf since the last call."""
        leaves, self._leaves = self._leaves, []
        return leaves

    def finish(self, batch: pb.Batch, leaves: list[Blob | None]) -> None:
        """Write what is new among the leaves of a batch and say in it which tensor is which."""
        new = [blob for blob in dict.fromkeys(leaves) if blob is not None and not blob.stored]
        self._store(batch, new)
        columns = batch.columns
        digests: dict[bytes, int] = {}
        indices = np.zeros(len(leaves), "<u4")
        steps = _Steps(columns)
        for i, blob in enumerate(leaves):
            if blob is None:
                continue
            if blob.stored:
                indices[i] = digests.setdefault(blob.digest, len(digests) + 1)
            else:
                reason = "tensor_device_failed" if blob.failed else "tensor_spool_full"
                self._leave_out(steps.of_tensor(i), reason)
        if digests:
            flags = np.frombuffer(columns.flags, np.uint8)
            columns.flags = (flags | np.where(indices, pb.IS_CAPTURED, 0).astype("u1")).tobytes()
            columns.digest = indices.tobytes()
            columns.digests.extend(digests)
        with self._guard:
            left_out, self._left_out = self._left_out, Counter()
        for (step, reason), count in left_out.items():
            batch.drops.add(step=step, events=0, reason=f"{reason}: {count} tensors")

    def lost(self, blobs: Iterable[pb.Blob]) -> None:
        """The batch that was to bring these never will."""
        gone = {blob.digest for blob in blobs}
        for name in gone:
            self._by_digest.pop(name, None)
        # Several may have the content; the loop may add to what is seen meanwhile.
        for known in tuple(self._seen.values()):
            if known.digest in gone:
                known.stored = False

    def _store(self, batch: pb.Batch, new: Iterable[Blob]) -> None:
        """In groups, so that memory gets free while there is more to write."""
        group: list[Blob] = []
        size = 0
        for blob in new:
            group.append(blob)
            size += blob.size
            if size >= _GROUP_BYTES:
                self._store_group(batch, group)
                group, size = [], 0
        self._store_group(batch, group)
        while len(self._by_digest) > _MOST_REMEMBERED:
            self._by_digest.popitem(last=False)

    def _store_group(self, batch: pb.Batch, group: list[Blob]) -> None:
        writing: list[tuple[Blob, pb.Blob]] = []
        for blob in group:
            if blob.region is None:
                continue
            try:
                view = blob.view
            except Exception:
                blob.failed = True
                continue
            blob.digest = digest(blob.dtype, blob.shape, view)
            earlier = self._by_digest.get(blob.digest)
            if earlier is not None and earlier.is_fresh:
                continue  # the same content came by two ways
            self._by_digest[blob.digest] = blob
            wire = pb.Blob(digest=blob.digest, dtype=str(blob.dtype), size=blob.size)
            wire.shape.extend(blob.shape)
            writing.append((blob, wire))
        written = 0
        if self.keeper is not None and writing:
            written = self.keeper.keep([(wire, blob.view) for blob, wire in writing])
        for i, (blob, wire) in enumerate(writing):
            blob.stored = i < written
            if blob.stored:
                batch.blobs.append(wire)
            else:
                self._by_digest.pop(blob.digest, None)
        for blob in group:
            known = self._by_digest.get(blob.digest)
            blob.stored = known is not None and known.stored
            self._release(blob)

    def _release(self, blob: Blob) -> None:
        with self._guard:
            region, blob.region, blob.host = blob.region, None, None
        if region is not None:
            self.memory.give_back(region)

    def _leave_out(self, step: int, reason: str) -> None:
        with self._guard:
            self._left_out[step, reason] += 1
        if reason == "tensor_memory_full":
            self._say(
                f"tensors wait in memory ({self.memory.limit >> 20} MiB) and none gets free: "
                "some are left out and counted; see tensor_memory_bytes"
            )
        elif reason == "tensor_unsupported":
            self._say("sparse and quantized tensors are measured, not captured; they are counted")
        elif reason == "tensor_quota":
            self._say(
                "no more tensors are captured: tensor_quota_bytes here, or the collector's, is "
                "used up; those left out are counted"
            )
        elif reason == "tensor_device_failed":
            self._say("the device fails or does not answer: tensors on it are left out and counted")
        elif reason == "tensor_spool_full":
            self._say("the spool has no room for tensors: some are left out and counted")

    def _say(self, text: str) -> None:
        if text not in self._said and len(self._said) < 20:
            self._said.add(text)
            log("warning", text)


class _Steps:
    """The step of a tensor leaf of a batch; built only when one was left out."""

    def __init__(self, columns: pb.Columns) -> None:
        self._columns = columns
        self._of_tensor: list[int] | None = None

    def of_tensor(self, index: int) -> int:
        if self._of_tensor is None:
            columns = self._columns
            counts = [0]
            for payload in columns.outlines:
                leaves = pb.Outline.FromString(payload).leaves
                counts.append(sum(leaf.form == pb.TENSOR for leaf in leaves))
            steps = np.frombuffer(columns.event_step, "<i8")
            outlines = np.frombuffer(columns.event_outline, "<u4")
            self._of_tensor = np.repeat(steps, np.array(counts)[outlines]).tolist()
        return self._of_tensor[index]


def room_of(leaves: Iterable[Leaf]) -> int:
    """What an event's tensors take of the memory at most."""
    return sum(room_for(_size_of(leaf)) for leaf in leaves)


def _size_of(leaf: Leaf) -> int:
    tensor = leaf.data if isinstance(leaf, Description) else leaf
    if tensor is None:
        return 0
    try:
        while is_wrapped(tensor):  # what is kept is the whole batch
            tensor = unwrapped(tensor)
        return tensor.numel() * tensor.element_size()
    except Exception:  # symbolic sizes, exotic subclasses: `add` will find out
        return 0
