"""Processes that end while daemon threads that torch knows live: `daemon_threads.py FOLDER COUNT`.

Each is a fork that records, and ends in order. Its threads have called torch, and at the exit they
wait for a queue, sleep and wake up all the time, or end just then; none is inside torch, where
torch itself aborts the process. Prints how often each exit status was seen, as JSON.
"""

import collections
import json
import os
import queue
import random
import sys
import threading
import time
from pathlib import Path

import torch

from rankscope.agent import PrecisionDebugger

TENSOR = torch.ones(2)


def wait_for_ever():
    torch.relu(TENSOR)
    queue.SimpleQueue().get()


def wake_up_all_the_time():
    torch.relu(TENSOR)
    while True:
        time.sleep(0.0005)


def end_at(moment):
    torch.relu(TENSOR)
    time.sleep(max(moment - time.monotonic(), 0.0))


def child(config, number):
    debugger = PrecisionDebugger(config_path=str(config))
    debugger.start()
    moment = time.monotonic() + 0.05
    rng = random.Random(number)
    targets = [(wait_for_ever, ()), (wake_up_all_the_time, ())]
    targets += [(end_at, (moment + rng.uniform(0.0, 0.15),)) for _ in range(6)]
    for target, arguments in targets:
        threading.Thread(target=target, args=arguments, daemon=True).start()
    time.sleep(max(moment - time.monotonic(), 0.0))
    if number % 2:
        debugger.stop()


def main(folder, count):
    torch.set_num_threads(1)
    config = folder / "config.json"
    settings = {"collector": ["127.0.0.1:9"], "spool_path": str(folder / "spool")}
    settings |= {"exit_seconds": 0.05, "run": "r"}
    content = {"level": "L1", "dump_path": str(folder / "dump"), "rankscope": settings}
    config.write_text(json.dumps(content))
    seen = collections.Counter()
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            child(config, number)
            return
        seen[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] += 1
    os.write(1, ("\n" + json.dumps(seen)).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
