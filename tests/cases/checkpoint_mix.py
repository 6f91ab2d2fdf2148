"""Activations computed again in the backward pass: not reentrant, then reentrant."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CONFIG = {"level": "mix"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 1)

    def forward(self, x, reentrant):
        return self.head(checkpoint(self.block, x, use_reentrant=reentrant))


def run(debugger):
    torch.manual_seed(11)
    net = Net()
    for reentrant in (False, True):
        debugger.start(model=net)
        x = torch.randn(3, 4, requires_grad=True)
        net(x, reentrant).sum().backward()
        debugger.stop()
        debugger.step()
