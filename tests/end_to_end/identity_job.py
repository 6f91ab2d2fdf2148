"""A small job whose processes are to be told apart: identity_job.py WHAT CONFIG.json."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

what, config = sys.argv[1:3]
if what == "numbered" and os.environ["RANK"] == "1":
    right = time.time
    time.time = lambda: right() - 3600.0

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from rankscope.agent import PrecisionDebugger  # noqa: E402

torch.set_num_threads(1)


def step(debugger, *, calls=2, **start):
    debugger.start(**start)
    for _ in range(calls):
        torch.relu(torch.ones(2))
    debugger.stop()
    debugger.step()


def clashing():
    """A 2-rank group; nobody ends before the file `go` is there."""
    dist.init_process_group("gloo")
    debugger = PrecisionDebugger(config_path=config)
    step(debugger)
    dist.all_reduce(torch.ones(1))
    step(debugger)
    wait_for_go()


def numbered():
    """Started before its group is there, with rank_id, late coordinates and one wrong clock."""
    first = int(os.environ["FIRST"])
    rank = int(os.environ["RANK"])
    debugger = PrecisionDebugger(config_path=config)
    step(debugger, rank_id=first + rank)
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    step(debugger, calls=3, rank_id=first + rank)
    assert mesh.ndim == 2
    wait_for_go()


def worker():
    """One rank of a data-parallel replica: no launcher, a group of its own."""
    rank, address = int(os.environ["WORKER"]), os.environ["ADDRESS"]
    debugger = PrecisionDebugger(config_path=config)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    debugger.start(model=model)
    torch.relu(torch.ones(2))  # recorded before the rank is known
    model(torch.ones(1, 2)).sum().backward()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    value = torch.full((2,), float(os.environ["VALUE"]))
    dist.all_reduce(value)
    debugger.stop()
    debugger.step()
    wait_for_go()


def elastic():
    """Rank 1 dies in step 2; the second attempt makes two steps with more calls."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    debugger = PrecisionDebugger(config_path=config)
    if attempt:
        for _ in range(2):
            step(debugger, calls=5)
        return
    for _ in range(2):
        step(debugger)
    debugger.start()
    torch.relu(torch.ones(2))
    debugger.stop()
    time.sleep(1.0)  # what is recorded is flushed after 0.25 s
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def helper():
    """A rank that starts a process which records too, and forks one that calls torch."""
    debugger = PrecisionDebugger(config_path=config)
    debugger.start()
    torch.relu(torch.ones(2))
    command = [sys.executable, __file__, "alone", config]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    if (child := os.fork()) == 0:
        torch.relu(torch.ones(2))
        debugger.start()
        torch.relu(torch.ones(2))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    debugger.stop()
    debugger.step()
    print(json.dumps({"helper": json.loads(done.stdout.splitlines()[-1]), "forked": child}))


def alone():
    """One process without a group; says who it is."""
    debugger = PrecisionDebugger(config_path=config)
    step(debugger)
    wait_for_go()
    print(json.dumps(os.getpid()))


def wait_for_go():
    go = os.environ.get("GO")
    until = time.monotonic() + 60
    while go and not Path(go).exists() and time.monotonic() < until:
        time.sleep(0.05)


globals()[what]()
if dist.is_initialized():
    dist.destroy_process_group()
