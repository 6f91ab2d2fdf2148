"""Convolution, batch norm and pooling at level L1, in training and then in evaluation."""

import torch
from torch import nn
from torch.nn import functional as F

CONFIG = {"level": "L1"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        x = self.pool(torch.relu(self.bn(self.conv(x))))
        x = F.adaptive_avg_pool2d(x, 1)
        return self.fc(torch.flatten(x, 1))


def run(debugger):
    torch.manual_seed(3)
    net = Net()
    debugger.start(model=net)
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([1, 4])
    F.nll_loss(F.log_softmax(net(images), dim=1), labels).backward()
    net.eval()
    with torch.no_grad():
        top = net(torch.randn(1, 3, 8, 8)).topk(2, dim=1)
        torch.sum(top.values)
    debugger.stop()
    debugger.step()
