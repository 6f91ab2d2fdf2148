"""Five tokens generated, the calls 1 and 2 of them recorded."""

import torch
from torch import nn

CONFIG = {"level": "mix"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, ids):
        return self.out(self.emb(ids)).softmax(-1)


def run(debugger):
    torch.manual_seed(17)
    net = Net().eval()
    ids = torch.tensor([[3]])
    debugger.start(model=net, token_range=[1, 2])
    with torch.no_grad():
        for _ in range(5):
            following = net(ids)[:, -1:].argmax(-1)
            ids = torch.cat([ids, following], dim=1)
    debugger.stop()
    debugger.step()
