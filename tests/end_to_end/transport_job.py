"""A process with a transport and nothing else, told by its arguments what to do.

    transport_job.py SETTINGS_JSON SCENARIO

It records numbered batches and prints what the tests wait for.
"""

import atexit
import json
import os
import sys
import threading
import time
import uuid
from pathlib import Path

from rankscope.agent.transport import Transport, TransportConfig, signals
from rankscope.v1 import collector_pb2 as pb


def say(*words):
    """One write: a fork in another thread must not copy half a line in a buffer."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Source:
    def __init__(self, size):
        self.size = size
        self.recorded = self.taken = 0

    def record(self, count=1):
        self.recorded += count

    def take(self):
        if self.taken == self.recorded:
            return None
        self.taken += 1
        step = pb.StepEvent(step=self.taken, kind=pb.StepEvent.END)
        return pb.Batch(steps=[step], stacks=[pb.Stack(id=self.taken, frames=["x" * self.size])])

    def lost(self, batch, reason):
        say("lost", reason)


def main():
    settings = json.loads(sys.argv[1])
    paths = {"dump_path", "spool_path"}
    settings = {k: Path(v) if k in paths else v for k, v in settings.items()}
    settings["collector"] = tuple(settings.get("collector", ()))
    source = Source(settings.pop("batch_bytes", 100))
    config = TransportConfig(**{"flush_seconds": 0.02, "settle_seconds": 0.0} | settings)
    hello = pb.Hello(
        protocol_version=1,
        process_uuid=uuid.uuid4().hex,
        run_key="transport-test",
        host=os.uname().nodename,
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid=os.getpid(),
        dump_path=str(config.dump_path),
        process_started=time.time(),
        recording=pb.Recording(task="statistics", level="L1", summary_mode="statistics"),
    )
    say("uuid", hello.process_uuid)
    transport = Transport(config, hello, source, lambda _, text: say(text))
    os.register_at_fork(after_in_child=transport.abandon_after_fork)
    transport.start()
    SCENARIOS[sys.argv[2]](transport, source)


def record(transport, source, count):
    for _ in range(count):
        before = source.taken
        source.record()
        transport.wake()
        while source.taken == before:
            time.sleep(0.001)


def close_at_exit(transport, source):
    atexit.register(lambda: say("closed", transport.close("exit").complete))
    record(transport, source, 20)


def raise_at_end(transport, source):
    close_at_exit(transport, source)
    raise ValueError("the script's own error")


def no_close(transport, source):
    record(transport, source, 20)


def hold(transport, source):
    record(transport, source, 20)
    say("recorded")
    while line := sys.stdin.readline():
        record(transport, source, 5)
        say("recorded" if line == "\n" or transport.flush(20) else "not acknowledged")
    say("closed", transport.close("exit").complete)


def await_signal(transport, source):
    signals.install(lambda seconds: transport.close("signal 15", seconds))
    record(transport, source, 20)
    say("recorded")
    while True:
        threading.Event().wait(60)


def fork_connected(transport, source):
    while transport.stats().state != "connected":
        time.sleep(0.001)
    fork(transport, source)


def fork(transport, source):
    for leave in (os._exit, sys.exit):
        child = os.fork()
        if child == 0:
            source.record()
            transport.wake()
            assert transport.flush(5) is False
            assert transport.close("exit").complete is False
            leave(3)
        say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    record(transport, source, 5)
    say("closed", transport.close("exit").complete)


SCENARIOS = {
    function.__name__: function
    for function in (
        close_at_exit,
        raise_at_end,
        no_close,
        hold,
        await_signal,
        fork,
        fork_connected,
    )
}

if __name__ == "__main__":
    main()
