"""Two steps of an MLP with residual blocks at level mix."""

import torch
from torch import nn
from torch.nn import functional as F

CONFIG = {"level": "mix"}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return F.relu(self.head(self.blocks(x)))


def run(debugger):
    torch.manual_seed(1)
    net = Net()
    for _ in range(2):
        debugger.start(model=net)
        loss = (net(torch.randn(4, 8)) * 0.5).pow(2).mean()
        loss.backward()
        debugger.stop()
        debugger.step()
