"""Runs one case under the debugger, in a process of its own: run_case.py CASE.py CONFIG.json."""

import importlib.util
import sys

import torch

from rankscope.agent import PrecisionDebugger

torch.set_num_threads(1)
case, config = sys.argv[1:3]
spec = importlib.util.spec_from_file_location("case", case)
module = sys.modules["case"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.run(PrecisionDebugger(config_path=config))
