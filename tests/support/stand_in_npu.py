"""A script on a machine whose torch_npu is a stand-in: stand_in_npu.py OUTPUT CONFIG.json.

torch knows the device type `npu`, and `torch.npu` and `torch_npu` are modules that note what is
asked of them; the numbers are the CPU's. So this shows which names and which code are reached,
nothing else. What was noted is written to OUTPUT.
"""

import json
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from rankscope.agent import PrecisionDebugger, seed_all
from rankscope.agent.statistics import TensorStatistics
from rankscope.agent.statistics.device import DeviceResults, is_capturing

output, config = sys.argv[1:3]
asked = []
report = {"imported torch_npu": "torch_npu" in sys.modules}


class Stream:
    def __init__(self, name):
        self.name = name

    def record_event(self):
        return SimpleNamespace(synchronize=lambda: asked.append(f"wait for {self.name}"))


@contextmanager
def switch(to):
    asked.append("on a stream of our own")
    yield


loop = Stream("the loop's stream")
torch.utils.rename_privateuse1_backend("npu")
npu = ModuleType("torch.npu")
npu.current_stream = lambda device=None: loop
npu.Stream = lambda device=None: Stream("ours")
npu.stream = switch
npu.is_current_stream_capturing = lambda: True
npu.manual_seed = lambda seed: asked.append(f"manual_seed({seed})")
npu.manual_seed_all = lambda seed: asked.append(f"manual_seed_all({seed})")
npu._is_in_bad_fork = lambda: False
npu.is_available = lambda: True
torch._register_device_module("npu", npu)
torch.accelerator.current_accelerator = lambda *_: torch.device("npu")
torch.accelerator.current_device_index = lambda: 3

library = sys.modules["torch_npu"] = ModuleType("torch_npu")
library.__version__ = "2.13.0.stand.in"
library.npu = npu


def npu_rms_norm(x, weight, epsilon=1e-6):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return x * scale * weight, scale


library.npu_rms_norm = npu_rms_norm

seed_all(5)
debugger = PrecisionDebugger(config_path=config)
debugger.start()
weight = torch.ones(4, requires_grad=True)
library.npu_rms_norm(torch.arange(8.0).reshape(2, 4), weight, epsilon=1e-5)[0].sum().backward()
debugger.stop()
debugger.step()
report["left in place"] = library.npu_rms_norm is not npu_rms_norm

results = DeviceResults(torch.device("npu:0"))
results.add(0, torch.tensor([1.0, -3.0]))
rows = np.zeros(1, TensorStatistics()._rows.dtype)
results.reduce(results.finish(), rows, {}, "")
report["max"], report["sum"] = float(rows["max"][0]), float(rows["sum"][0])
report["capturing"] = is_capturing(SimpleNamespace(is_cpu=False, device=torch.device("npu:0")))
report["asked"] = asked
with open(output, "w") as file:
    json.dump(report, file)
