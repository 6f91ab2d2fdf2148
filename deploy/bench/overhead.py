"""What a debugger costs one process: step times without it, with it idle, and while it records.

    python deploy/bench/overhead.py --tool rankscope.agent --workload tiny --level mix

Prints one JSON object. Times are milliseconds a step, medians; `end` is when the last recorded step
was over (seconds since the epoch), so that a caller can add what happens until the process has
ended.
"""

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

#: width, layers, heads, batch, tokens
SIZES = {"tiny": (64, 6, 4, 4, 32), "small": (256, 6, 8, 16, 128), "wide": (1024, 2, 16, 8, 128)}
VOCABULARY = 512


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (p.reshape(batch, tokens, self.heads, -1).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])
        return self.head(self.norm(self.blocks(self.token(ids) + self.position(places))))


def training_step(size: str) -> tuple[nn.Module, Callable[[], None]]:
    """A model and its step: forward, loss, backward, Adam."""
    width, layers, heads, batch, tokens = SIZES[size]
    torch.manual_seed(0)
    model = Gpt(width, layers, heads, tokens)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=False)
    ids = torch.randint(0, VOCABULARY, (batch, tokens + 1))

    def step() -> None:
        optimizer.zero_grad()
        logits = model(ids[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    return model, step


class Nothing:
    """A debugger that does nothing: what the process and this script cost by themselves."""

    def __init__(self, config_path: str) -> None: ...
    def start(self, model: nn.Module) -> None: ...
    def stop(self) -> None: ...
    def step(self) -> None: ...


def debugger(tool: str, task: str, level: str, summary: str, out: str) -> Any:
    section = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": summary}
    config = {"task": task, "dump_path": out, "rank": [], "step": [], "level": level}
    config |= {"risk_level": "ALL", task: section}
    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps(config))
    kind = Nothing if tool == "nothing" else importlib.import_module(tool).PrecisionDebugger
    return kind(config_path=str(path))


def milliseconds(function: Callable[[], None], times: int) -> float:
    """Median time of a call."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", default="rankscope.agent", help="module, or 'nothing'")
    parser.add_argument("--workload", choices=SIZES, default="tiny")
    parser.add_argument("--task", default="statistics")
    parser.add_argument("--level", default="mix")
    parser.add_argument("--summary", default="statistics")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    out = options.out or str(Path(tempfile.mkdtemp()) / "dump")
    model, step = training_step(options.workload)
    milliseconds(step, 3)
    bare = milliseconds(step, options.steps)
    watch = debugger(options.tool, options.task, options.level, options.summary, out)

    def watched() -> None:
        watch.start(model)
        step()
        watch.stop()
        watch.step()

    first = milliseconds(watched, 1)
    idle = milliseconds(step, options.steps)
    begin = time.time()
    recorded = milliseconds(watched, options.steps)
    print(
        json.dumps(
            {
                "bare": bare,
                "idle": idle,
                "recorded": recorded,
                "first": first,
                "begin": begin,
                "end": time.time(),
                "steps": options.steps,
                "out": out,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
