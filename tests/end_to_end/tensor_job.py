"""A job that captures tensors and saves what it saw itself, by the names that msProbe gives."""

import argparse
import os
import time

import torch
from torch import nn

from rankscope.agent import PrecisionDebugger

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--big", type=int, default=0, help="MiB of one more tensor a step")
parser.add_argument("--pause", type=float, default=0, help="seconds after each step")
parser.add_argument("--keep", help="where the tensors that were seen are saved")
parser.add_argument("--die", action="store_true", help="end by SIGKILL after the last step")
parser.add_argument("config")
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(7)
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
net = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 3))
debugger = PrecisionDebugger(config_path=options.config)
seen = {}
for step in range(options.steps):
    debugger.start(model=net)
    x = torch.randn(5, 64, requires_grad=True)
    y = net(x)
    y.sum().backward()
    records = {
        "Module.0.Linear.forward.0.input.0.pt": x,
        "Module.2.Linear.forward.0.output.0.pt": y,
        "Module.0.Linear.forward.0.parameters.weight.pt": net[0].weight,
        "Module.2.Linear.parameters_grad.0.weight.pt": net[2].weight.grad,
    }
    if options.big:
        records["Torch.sin.0.forward.input.0.pt"] = torch.full((options.big << 18,), step + 0.5)
        torch.sin(records["Torch.sin.0.forward.input.0.pt"])
    seen |= {f"step{step}/{name}": value.detach().clone() for name, value in records.items()}
    debugger.stop()
    debugger.step()
    net.zero_grad()
    print("step", step, flush=True)
    time.sleep(options.pause)
if options.keep:
    torch.save(seen, options.keep)
if options.die:
    time.sleep(1.0)  # what was recorded in the last quarter of a second may be lost
    os.kill(os.getpid(), 9)
