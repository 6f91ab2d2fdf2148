"""random_save: a table of every call of a random function of torch, with the place in the script.

The replacements stay for the life of the process. Functions that a module bound before the call are
not seen.
"""

from __future__ import annotations

import atexit
import csv
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F

from rankscope.agent.errors import ConfigError
from rankscope.agent.identity import find_rank, group_rank
from rankscope.agent.log import log
from rankscope.agent.seeding import TENSOR_RANDOM, TORCH_RANDOM
from rankscope.agent.stacks import StackTable

_FUNCTIONAL_RANDOM = (
    "alpha_dropout",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
    "gumbel_softmax",
    "rrelu",
)
_WATCHED = (
    ("torch_random", torch, TORCH_RANDOM),
    ("tensor_random", torch.Tensor, TENSOR_RANDOM),
    ("functional_random", F, _FUNCTIONAL_RANDOM),
)

_table: _Table | None = None


def random_save(output_path: str | os.PathLike[str] = "./output") -> None:
    """Write each further call of a random function to a csv file in `output_path`, with its name
    and stack: `random_rank{R}_{time}.csv`, or `random_proc{pid}_{time}.csv` without a rank.
    """
    global _table
    if not isinstance(output_path, str | os.PathLike):
        raise ConfigError(f"random_save: output_path {output_path!r} is not allowed; allowed: path")
    if _table is None:
        _table = _Table(Path(output_path).absolute())
        for prefix, owner, names in _WATCHED:
            for name in names:
                if hasattr(owner, name):
                    setattr(owner, name, _watched(_table, f"{prefix}.{name}", getattr(owner, name)))
        atexit.register(_table.close)


class _Table:
    """The csv file of this process; made at the first row, when the rank may be known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._began = time.strftime("%Y%m%d%H%M%S")
        self._file: TextIO | None = None
        self._counts: Counter[str] = Counter()
        self._stacks = StackTable()
        self._lock = threading.RLock()
        self.local = threading.local()

    def add(self, name: str) -> None:
        """A row for a call of the function; the process that a fork made writes nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            frames = self._stacks.frames(self._stacks.capture())
            number = self._counts[name]
            self._counts[name] += 1
            try:
                csv.writer(self._opened()).writerow([f"{name}.{number}", "\n".join(frames)])
            except OSError as error:
                self._counts[name] -= 1
                self._say_once(f"random_save cannot write to {self._folder}: {error}")

    def _opened(self) -> TextIO:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # A byte order mark: Excel takes the file for UTF-8 then, as with msProbe's.
            self._file = self._path().open("w", newline="", encoding="utf-8-sig", buffering=1 << 16)
            csv.writer(self._file).writerow(["api_name", "stack"])
        return self._file

    def _path(self) -> Path:
        claim = find_rank(None, group_rank(), os.environ)
        who = f"rank{claim.rank}" if claim is not None else f"proc{self._pid}"
        return self._folder / f"random_{who}_{self._began}.csv"

    def _say_once(self, text: str) -> None:
        if not self._counts["said"]:
            self._counts["said"] = 1
            log("warning", text)

    def close(self) -> None:
        """The process ends: the rows are in the file, under the rank it has by now."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            file = self._opened()
            file.close()
            if Path(file.name) != self._path():
                os.replace(file.name, self._path())
            log("info", f"calls of random functions are in {self._path()}")


def _watched(table: _Table, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    local = table.local

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if getattr(local, "open", False):  # F.dropout draws by the means of another function
            return original(*args, **kwargs)
        local.open = True
        try:
            table.add(name)
            return original(*args, **kwargs)
        finally:
            local.open = False

    draw._rankscope_original = original  # type: ignore[attr-defined]  # names its records
    return draw
