"""Whole tensors as an agent would bring them, made without torch."""

import os
import random

from batches import EVERY_FLAG, Event, Leaf, batch
from blake3 import blake3

from rankscope.v1 import collector_pb2 as pb

HEAD_BYTES = 4096


def data_of(size, seed=0):
    """Bytes that no other seed gives."""
    return random.Random(seed).randbytes(size)


def blob_of(data, shape=None, dtype="torch.uint8", **place):
    shape = [len(data)] if shape is None else list(shape)
    text = f"{dtype} {','.join(map(str, shape))}\n".encode()
    return pb.Blob(
        digest=blake3(text + data).digest(), dtype=dtype, shape=shape, size=len(data), **place
    )


class SpoolFolder:
    """A spool folder as an agent leaves it, but for its segments."""

    def __init__(self, folder, process):
        self.folder, self.process, self.number = folder, process, 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{process}.lock").touch()

    def large(self, data, **more):
        """A file for one tensor."""
        path = self._path("tensor")
        path.write_bytes(bytes(HEAD_BYTES) + data)
        return blob_of(data, file=path.name, offset=HEAD_BYTES, **more)

    def small(self, *tensors):
        """A file for several."""
        path = self._path("tensors")
        path.write_bytes(b"".join(tensors))
        starts = [sum(map(len, tensors[:i])) for i in range(len(tensors))]
        return [blob_of(t, file=path.name, offset=s) for t, s in zip(tensors, starts, strict=True)]

    def files(self):
        return sorted(p.name for p in self.folder.iterdir() if ".tensor" in p.name)

    def _path(self, ending):
        self.number += 1
        return self.folder / f"{self.process}-{self.number:020d}.{ending}"


def named(process, number, ending="tensor"):
    """The name of a tensor file that need not exist."""
    return f"{process}-{number:020d}.{ending}"


def capturing(sequence, step, blobs, known=(), record="Functional.linear.{}.forward", **more):
    """A batch with one captured input a blob; `known` ones it does not bring."""
    everything = [*blobs, *known]
    events = [
        Event(
            record.format(i),
            structure={"input_args": [0]},
            leaves=(
                Leaf(
                    *("input_args", "0"),
                    dtype=blob.dtype,
                    shape=tuple(blob.shape),
                    flags=EVERY_FLAG | pb.IS_CAPTURED,
                    numbers={"digest": i + 1},
                ),
            ),
            step=step,
        )
        for i, blob in enumerate(everything)
    ]
    digests = [blob.digest for blob in everything]
    first = (sequence - 1) * 1000
    steps = [pb.StepEvent(step=step, kind=k, events=len(events), time=1.0) for k in (1, 3)]
    return batch(events, first, digests=digests, blobs=blobs, steps=steps, **more)


def held_by(path):
    """How many names a file has."""
    return os.stat(path).st_nlink
