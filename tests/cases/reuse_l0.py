"""Level L0: a module called three times, one under two names, a frozen weight, one never called.

Two start/stop pairs in one step, with a pass between them that is not recorded.
"""

import torch
from torch import nn

CONFIG = {"level": "L0"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.shared_a = nn.Linear(4, 4)
        self.shared_b = self.shared_a
        self.frozen = nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.ident = nn.Identity()

    def forward(self, x):
        x = self.twice(torch.tanh(self.twice(x)))
        x = self.shared_b(self.shared_a(x))
        with torch.no_grad():
            y = self.ident(self.twice(x))
        return self.frozen(x) + y


def run(debugger):
    torch.manual_seed(5)
    net = Net()
    debugger.start(model=net)
    net(torch.randn(3, 4)).sum().backward()
    debugger.stop()
    net(torch.randn(3, 4))
    debugger.start(model=net)
    net(torch.randn(2, 4)).sum().backward()
    debugger.stop()
    debugger.step()
