"""One of two ranks that train a tiny net for three steps; rank 1 gets one NaN in step 2.

python sql_job.py DUMP_PATH, with RANK and WORLD_SIZE set; no process group.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

from rankscope.agent import PrecisionDebugger

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
debugger = PrecisionDebugger(dump_path=str(folder / "run"), level="mix")
for step in range(3):
    x = torch.randn(4 - (rank and step == 1), 4)
    if rank == 1 and step == 2:
        x[0, 0] = float("nan")
    debugger.start(model)
    loss = model(x).square().mean()
    loss.backward()
    debugger.stop()
    optimizer.step()
    optimizer.zero_grad()
    debugger.step()
