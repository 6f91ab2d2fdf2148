"""Arguments and results of every kind and nesting at level L0."""

import collections
import dataclasses

import torch
from torch import nn

CONFIG = {"level": "L0"}
Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: dict
    note: str = "ok"


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x, pair, *, scale=1.0, flags=None, items=(), table=None):
        y = x * self.w * scale + pair.left - pair.right + items[0] + table["b"]["c"]
        return {"y": y, "list": [y + 1, None, 7], "pair": Pair(y * 2, "text"), "flag": True}


class Scalars(nn.Module):
    def forward(self, x, *args, **kwargs):
        return Result(x * 2, {"k": (x + 1, 2.5)})


class Both(nn.Module):
    def forward(self, *, x):
        return Pair(x + 1, [x * 2, None])


PLAIN = (1, True, None, "s", slice(0, 3, None), torch.Size([2, 3]), ..., float("inf"))
ODD = (torch.float16, torch.device("cpu"), object(), {1}, (), [], {}, 1 + 2j)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scalars, self.both = Inner(), Scalars(), Both()

    def forward(self, x):
        out = self.inner(
            x,
            Pair(x + 1, x - 1),
            scale=2.0,
            flags=[True, None],
            items=[x, 3],
            table={"a": None, "b": {"c": x * 0}},
        )
        res = self.scalars(
            out["y"],
            *PLAIN,
            *ODD,
            dtype=torch.bfloat16,
            device="cpu",
            fmt=torch.channels_last,
            empty=None,
            nan=float("nan"),
        )
        both = self.both(x=x)
        lists = out["list"][0].sum() + out["pair"].left.sum() + both.right[0].sum()
        return res.hidden.sum() + lists


def run(debugger):
    torch.manual_seed(7)
    net = Net()
    debugger.start(model=net)
    x = torch.randn(2, 3, requires_grad=True)
    net(x * 1.0).backward()
    debugger.stop()
    debugger.step()
