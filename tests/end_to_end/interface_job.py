"""Every call of the interface in one job: interface_job.py CONFIG.json.

At level debug only save() records.
"""

import os
import sys

import torch
from torch import nn

import rankscope.agent
from rankscope.agent import PrecisionDebugger, module_dump, module_dump_end, random_save, seed_all


def add_and_mul(a, b, c):
    return (a + b) * c


def with_debugger():
    net, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        PrecisionDebugger.start(rank_id=5)
        y = torch.nn.init.normal_(torch.empty(2)) + add_and_mul(x, 1, 2)
        module_dump(net, "Mine")
        y = net(y)
        module_dump_end()
        torch.bernoulli(torch.ones(1))  # replaced by random_save and seed_all before the debugger
        PrecisionDebugger.save(y, "y")
        y.sum().backward()
        PrecisionDebugger.stop()
        PrecisionDebugger.step()


random_save("randomness")
seed_all(3, is_enhanced=True)
try:
    PrecisionDebugger(config_path=sys.argv[1], task="no such task")
except ValueError as error:
    print("refused:", error)
debugger = PrecisionDebugger(config_path=sys.argv[1])
debugger.set_init_step(10)
with_debugger()
print("public:", rankscope.agent.__all__ == sorted(rankscope.agent.__all__), os.getpid())
