"""Runs cases of tests/models, each in a process of its own.

    model_job.py CASE TOOL BITS CONFIG.json
    model_job.py serve GROUP...      forks one for every line of its standard input

TOOL is what watches it: rankscope, msprobe or none. What the case keeps is written to
BITS/rank{R}.json as digests, so that runs can be compared bit for bit; only a run that came to its
end writes them.
"""

import hashlib
import importlib
import json
import os
import random
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch

CASES = Path(__file__).parent.parent / "models"
TOOLS = {"rankscope": "rankscope.agent", "msprobe": "msprobe.pytorch"}


class Watch:
    """What a case gets: `with watch(model)` is one watched step, `keep` takes results."""

    def __init__(self, debugger):
        self.debugger = debugger
        self.digests = []

    @contextmanager
    def __call__(self, model):
        self.start(model)
        yield
        self.stop()

    def start(self, model):
        if self.debugger is not None:
            self.debugger.start(model=model)

    def stop(self):
        if self.debugger is not None:
            self.debugger.stop()
            self.debugger.step()

    def keep(self, **values):
        """Digest tensors, and those in modules (weights, buffers, gradients) and containers."""
        for name, value in values.items():
            self.digests += [[where, digest(tensor)] for where, tensor in _tensors(name, value)]


def _tensors(name, value):
    if isinstance(value, torch.nn.Module):
        yield from _tensors(name, value.state_dict())
        for key, parameter in value.named_parameters():
            yield from _tensors(f"{name}.{key}.grad", parameter.grad)
    elif isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}.{index}", item)


def digest(tensor):
    tensor = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous()
    head = f"{tensor.dtype} {tuple(tensor.shape)} "
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(head.encode() + raw).hexdigest()[:16]


def run(case, tool, bits, config):
    """The case under the tool; its digests are written when it came to its end."""
    torch.set_num_threads(1)
    group, name = case.split(".")
    function = getattr(importlib.import_module(group), name)
    debugger = None
    if tool in TOOLS:
        debugger = importlib.import_module(TOOLS[tool]).PrecisionDebugger(config_path=config)
    watch = Watch(debugger)
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    function(watch)
    watch.keep(random=torch.random.get_rng_state())
    Path(bits).mkdir(parents=True, exist_ok=True)
    path = Path(bits) / f"rank{os.environ.get('RANK', 0)}.json"
    path.write_text(json.dumps(watch.digests))


def serve(*groups):
    """Run each line of standard input (JSON: case, tool, bits, config, log) in a fork of its own,
    and answer with its exit status. Importing a model library takes longer than most cases.
    """
    for group in groups:
        importlib.import_module(group)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            log = os.open(job.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            run(**job)
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(CASES))
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        run(*sys.argv[1:])
