"""Many light processes of one job: swarm.py ADDRESS RUN COUNT STEPS KILLED GO.

Each of COUNT forked processes is an agent without torch. The first KILLED of them kill themselves
in the last step. All others say goodbye when the file GO is there. Exits with 0 when those that
live were told farewell.
"""

import os
import signal
import sys
import time
from pathlib import Path

from fake_agent import FakeAgent, hello, here, linear_batch, step_batch

from rankscope.v1 import collector_pb2 as pb


def main(address, run, count, steps, killed, go):
    children = [start(rank, address, run, steps, rank < killed, go) for rank in range(count)]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    expected = [signal.SIGKILL] * killed + [0] * (count - killed)
    return 0 if statuses == expected else 1


def start(rank, address, run, steps, dies, go):
    if child := os.fork():
        return child
    status = 1
    try:
        agent = FakeAgent(address, hello(run, rank=rank, **here()))
        agent.connect()
        for step in range(steps - 1):
            agent.send(step_batch(step + 1, step))
        agent.send(linear_batch(steps, steps - 1))
        agent.wait_durable()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        end = pb.StepEvent(step=steps - 1, kind=pb.StepEvent.END, events=4)
        agent.send(pb.Batch(steps=[end]))
        while not Path(go).exists():
            time.sleep(0.05)
        agent.farewell()
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    where, name, *numbers, file = sys.argv[1:]
    sys.exit(main(where, name, *map(int, numbers), file))
