"""kill -9 at many random moments, and what must be left afterwards."""

import contextlib
import random
import time

from rankscope.collector.store import RunStore

from .stage import until

SEED = 2026


def kill_often(moments):
    """An action: kills the collector so many times while the job goes on, then ends the job.

    Every second time it may first commit something: on a busy machine it dies too young else.
    """

    def action(stage):
        rng = random.Random(SEED)
        for number in range(moments):
            if number % 2:
                _await_commit(stage)
            time.sleep(rng.uniform(0.0, 0.6))
            stage.kill_daemon()
            stage.start_daemon()
        (stage.folder / "stop").touch()

    return action


def _await_commit(stage):
    log = stage.side / "tables" / "nodes" / "_delta_log"
    entries = lambda: len(list(log.glob("*.json")))  # noqa: E731
    before = entries()
    with contextlib.suppress(TimeoutError):
        until(lambda: entries() > before, 10)


def kill_writer_often(nurseries, script, arguments, acks, moments, output, environ):
    """Start a writer and kill it, so many times, each a random while after it acknowledged."""
    rng = random.Random(SEED)
    for _ in range(moments):
        acks.touch()
        size = acks.stat().st_size
        writer = nurseries.collectors.start(script, *arguments, environ=environ, output=output)

        def acknowledged(size=size, writer=writer):
            assert writer.poll() is None, output.read_text()
            return acks.stat().st_size > size

        try:
            until(acknowledged)
            time.sleep(rng.uniform(0.0, 0.3))  # the moment of the fault
        finally:
            writer.kill()
            writer.wait(20)


def verify_store(run, process, acks):
    """What crash_writer acknowledged is there, and everything that is there is there once."""
    acknowledged = max(int(line.split()[-1]) for line in acks.read_text().splitlines())
    store = RunStore.open(run, "one")
    durable = store.durable_sequence(process)
    assert durable >= acknowledged
    sequences, leaves = [], 0
    for step in store.step_numbers():
        nodes, records = store.read_step(step)
        sequences += nodes["seq"].to_pylist()
        leaves += records.num_rows
    assert sorted(sequences) == list(range(4 * durable))
    assert leaves == 8 * durable
    batches = sorted(store.steps_rows()["batch"].to_pylist())
    assert batches[:durable] == list(range(1, durable + 1))
    assert len(set(batches)) == len(batches)
    store.close()
    return durable
