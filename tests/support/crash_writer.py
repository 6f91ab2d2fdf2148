"""A committer in a process of its own, to be killed: goes on after what is durable.

Usage: crash_writer.py RUN COLLECTOR_ID PROCESS ACKS. Appends each acknowledged sequence to ACKS.
"""

import os
import sys
from pathlib import Path

from batches import linear_batch

from rankscope.collector.decode import decode
from rankscope.collector.store import RunStore
from rankscope.v1 import collector_pb2 as pb

BATCHES_PER_COMMIT = 3
BATCHES_PER_STEP = 5


def main() -> None:
    run, collector_id, process, acks = sys.argv[1:]
    descriptor = os.open(acks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    store = RunStore.open(Path(run), collector_id)
    sequence = store.durable_sequence(process)
    os.write(descriptor, f"start {sequence}\n".encode())
    while True:
        group = [_batch(process, sequence + i) for i in range(1, BATCHES_PER_COMMIT + 1)]
        rows = [
            {"step": batch.steps_seen[0], "process": process, "batch": batch.sequence}
            for batch in group
        ]
        store.commit(group, steps=rows)
        sequence += BATCHES_PER_COMMIT
        os.write(descriptor, f"{sequence}\n".encode())
        store.maintain()
        if sequence % 4 == 0:
            store.seal(group[0].steps_seen[0], {process: 0})


def _batch(process: str, sequence: int):
    message = linear_batch(sequence, step=sequence // BATCHES_PER_STEP)
    message.stacks.append(pb.Stack(id=1000 + sequence, frames=["frame"]))
    payload = message.SerializeToString()
    return decode(payload, process=process, sequence=sequence, summary_mode="statistics")


if __name__ == "__main__":
    main()
