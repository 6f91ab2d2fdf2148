"""Three steps with Adam, zero_grad and clipping: the parents "optimizer" and "clip_grad"."""

import torch
from torch import nn
from torch.nn import functional as F

CONFIG = {"level": "mix"}


def run(debugger):
    torch.manual_seed(12)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, foreach=False)
    for _ in range(3):
        x, target = torch.randn(4, 6), torch.randn(4, 2)
        debugger.start(model=net)
        optimizer.zero_grad()
        F.mse_loss(net(x), target).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=False)
        optimizer.step()
        debugger.stop()
        debugger.step()
