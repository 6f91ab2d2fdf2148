"""Two ranks, two steps, values of every kind: nested, odd types, NaN, infinities, empty, scalars.

Not compared with msProbe; the tables and dump.json are compared with each other.
"""

import torch
import torch.distributed as dist
from torch import nn

CONFIG = {"level": "mix", "risk_level": "ALL"}
RANKS = 2


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x, pair, *options, table=None, **more):
        y = x * self.w + pair[0] - table["b"][0]["c"]
        return {"y": y, "list": [y + 1, None, 7], "empty": [], "flag": True}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.nested, self.head = Nested(), nn.Linear(3, 2)

    def forward(self, x):
        table = {"a": None, "b": [{"c": x * 0, "größe": "ä"}], "e": {}}
        more = {"dtype": torch.float16, "nan": float("nan"), "size": torch.Size([2, 3])}
        options = (slice(0, 3), ..., float("-inf"), torch.float32, object(), 1 + 2j, ())
        out = self.nested(x, (x + 1, 2), *options, table=table, **more)
        return self.head(out["y"]), out["list"][0]


def odd_tensors():
    torch.abs(torch.tensor([float("nan"), float("inf"), -1.0]))
    torch.abs(torch.arange(-3, 4))
    torch.abs(torch.full((2, 2), 1.5, dtype=torch.float64))
    torch.abs(torch.tensor(-2.5))
    torch.abs(torch.full((4,), 6e4, dtype=torch.float16))
    torch.abs(torch.linspace(0, 1, 9, dtype=torch.bfloat16))
    torch.abs(torch.empty(0, 3))
    torch.logical_not(torch.tensor([True, False]))


def run(debugger):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = Net()
    for _ in range(2):
        debugger.start(model=net)
        scores, rest = net(torch.randn(2, 3, requires_grad=True))
        (scores.sum() + rest.mean()).backward()
        odd_tensors()
        dist.all_reduce(torch.full((4,), float(rank)))
        debugger.stop()
        debugger.step()
    dist.destroy_process_group()
