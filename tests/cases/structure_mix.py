"""Task structure: the call tree and the stacks, no data."""

import torch
from torch import nn

CONFIG = {"task": "structure", "level": "mix"}


def run(debugger):
    torch.manual_seed(19)
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    debugger.start(model=net)
    (net(torch.randn(3, 4)) + 1).sum().backward()
    debugger.stop()
    debugger.step()
