"""Two ranks record twelve steps and pause in the middle: interrupted_job.py FOLDER CONFIG.json.

At step 4 rank 0 makes FOLDER/middle; both go on when FOLDER/resume is there.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from rankscope.agent import PrecisionDebugger

torch.set_num_threads(1)
folder, config = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
debugger = PrecisionDebugger(config_path=config)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
for step in range(12):
    debugger.start(model=net)
    net(torch.randn(3, 4)).sum().backward()
    debugger.stop()
    debugger.step()
    if step == 4:
        if rank == 0:
            (folder / "middle").touch()
        until = time.monotonic() + 60
        while not (folder / "resume").exists() and time.monotonic() < until:
            time.sleep(0.01)
dist.destroy_process_group()
