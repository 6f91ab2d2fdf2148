"""Where batches go that cannot be understood: RUN.rankscope/refused/."""

import os
from pathlib import Path

from rankscope.v1 import collector_pb2 as pb


def set_aside(side_path: Path, process: str, batch: pb.SequencedBatch) -> Path:
    """Keep the payload of a malformed batch; durable when this returns."""
    folder = side_path / "refused"
    folder.mkdir(exist_ok=True)
    path = folder / f"{process}-{batch.sequence:020d}.batch"
    with open(path, "wb") as file:
        file.write(batch.payload)
        os.fsync(file.fileno())
    return path
