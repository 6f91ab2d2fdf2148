"""One rank trains the same twice, bare and recorded, and writes where bits differ.

bit_equal_ddp.py LEVEL RESULTS CONFIG.json
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent import PrecisionDebugger

torch.set_num_threads(1)
level, results, config = sys.argv[1:4]


def train(debugger, steps=3):
    torch.manual_seed(dist.get_rank())
    layers = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4)
    )
    net = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    bits = []
    for _ in range(steps):
        if debugger is not None:
            debugger.start(model=net)
        x = torch.randn(6, 8)
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
        if debugger is not None:
            debugger.stop()
            debugger.step()
        bits += [loss.detach().clone(), *(p.grad.clone() for p in net.parameters())]
    return [*bits, *net.state_dict().values(), torch.random.get_rng_state()]


dist.init_process_group("gloo")
bare = train(None)
recorded = train(PrecisionDebugger(config_path=config, level=level))
pairs = enumerate(zip(bare, recorded, strict=True))
different = [index for index, pair in pairs if not torch.equal(*pair)]
report = {"compared": len(bare), "different": different}
(Path(results) / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
dist.destroy_process_group()
