"""An msProbe script with its import line replaced: drop_in.py CONFIG.json."""

import sys

import torch
from torch import nn

from rankscope.agent import PrecisionDebugger, seed_all

seed_all(seed=7, mode=False)
debugger = PrecisionDebugger(config_path=sys.argv[1])
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for _ in range(3):
    PrecisionDebugger.start(model)
    loss = model(torch.randn(2, 4)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    PrecisionDebugger.stop()
    PrecisionDebugger.step()

again = PrecisionDebugger(task="structure", dump_path="elsewhere")
print("same object:", again is debugger)
print(f"loss {loss.item():.6f}")
