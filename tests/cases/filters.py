"""What the filters keep of one training step, and the calls that choose what is recorded.

`CASES` holds name -> (what runs, configuration); ../golden/filters has msProbe's output for each.
"""

import types

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x):
        return torch.mul(self.act(self.fc(x)), 2.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block0, self.block1, self.head = Block(), Block(), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.tanh(x)
        x = self.block0(x)
        x = F.gelu(x)
        x = self.block1(x)
        x = torch.sigmoid(x)
        return self.head(x)


def net():
    torch.manual_seed(3)
    return Net()


def train(debugger):
    model = net()
    debugger.start(model=model)
    x = torch.randn(3, 4, requires_grad=True)
    first, second = model(x), model(x + 1)
    (first.sum() + second.reshape(-1).sum()).backward()
    debugger.stop()
    debugger.step()


def own_functions():
    """A module with functions of the user's."""

    def add_and_mul(a, b, c):
        return (a + b) * c

    def as_dict(a):
        return {"u": a * 2, "v": [a + 1]}

    def pair(a, k=1):
        return a.relu(), k

    module = types.ModuleType("my_ops")
    module.add_and_mul, module.as_dict, module.pair = add_and_mul, as_dict, pair
    return module


def custom(debugger):
    ops = own_functions()
    debugger.register_custom_api(ops, "add_and_mul")
    debugger.register_custom_api(ops, "as_dict", "Mine")
    debugger.register_custom_api(ops, "pair", api_prefix="a.b")
    x = torch.ones(3, requires_grad=True)
    for number in range(2):
        debugger.start()
        y = ops.add_and_mul(x, 2, c=x)
        z = ops.as_dict(y)
        w = ops.pair(z["u"], k=3)
        torch.exp(w[0]).sum().backward()
        if number == 0:
            ops.add_and_mul(x, 1, 1)
        debugger.stop()
        debugger.step()
        debugger.restore_custom_api(ops, "add_and_mul")


def save(debugger):
    torch.manual_seed(16)
    w = torch.randn(3, 2, requires_grad=True)
    for _ in range(2):
        x = torch.randn(4, 3)
        y = x @ w
        debugger.save(y, "y")
        z = {"a": y * 2, "b": [y + 1, 5, "s"], "c": (1.5, True)}
        debugger.save(z, "z")
        debugger.save(x, "x", save_backward=False)
        debugger.save(x, "xb")
        debugger.save(y, "y")
        debugger.save(3, "n")
        debugger.save([y, y], "twice")
        debugger.save(None, "none")
        debugger.save("text", "t")
        debugger.save({"k": None, "s": torch.Size([1])}, "odd")
        (z["a"].sum() + z["b"][0].pow(2).sum()).backward()
        debugger.step()


def _mix(**section):
    return (train, {"level": "mix", "statistics": section})


CASES = {
    "forward": _mix(data_mode=["forward"]),
    "backward_output": _mix(data_mode=["backward", "output"]),
    "input": _mix(data_mode=["input"]),
    "list_module": _mix(list=["Module.block1"]),
    "scope_modules": _mix(
        scope=["Module.block1.Block.backward.1", "Module.block0.Block.backward.1"]
    ),
    "scope_calls": (
        train,
        {
            "level": "L1",
            "statistics": {"scope": ["Torch.sigmoid.1.forward", "Functional.gelu.0.backward"]},
        },
    ),
    "slice": _mix(
        slice=[{"dim": 0, "begin": 1, "end": 3}, {"dim": 1, "begin": 0, "end": 1, "size": 2}]
    ),
    "custom": (custom, {"level": "L1"}),
    "save": (save, {"level": "debug"}),
    "save_md5": (save, {"level": "debug", "statistics": {"summary_mode": "md5"}}),
}
