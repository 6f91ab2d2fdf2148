"""config.json's key "load": modules are given the inputs that an earlier tensor dump has of them.

The dump may be msProbe's or ours: `step{N}/{rank or proc folder}/dump_tensor_data/*.pt`. Unlike all
else in this package it changes what a script computes, which is what it is asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from rankscope.agent.errors import UsageError
from rankscope.agent.load_setting import NAME, Load
from rankscope.agent.log import log


class Loader:
    """Replaces inputs between `start` and `stop`; one process, calls counted by step."""

    def __init__(self, load: Load, step: Callable[[], int], rank: Callable[[], int | None]) -> None:
        """`step` and `rank` tell where the process is now."""
        self._load, self._step, self._rank = load, step, rank
        self._stems = {match[1] for name in load.modules if (match := NAME.fullmatch(name))}
        self._handles: dict[tuple[int, str], RemovableHandle] = {}
        self._calls: Counter[str] = Counter()
        self._unused = set(load.modules)

    def start(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Put the hooks on; before those that record, so that the records show what was loaded."""
        for stem, module in modules:
            key = (id(module), stem)
            if stem in self._stems and key not in self._handles:
                self._handles[key] = module.register_forward_pre_hook(
                    lambda module, args, kwargs, stem=stem: self._replace(stem, args, kwargs),
                    with_kwargs=True,
                )

    def stop(self) -> None:
        """Take them off."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def end_step(self) -> None:
        """The step is over: calls are counted from 0; what was never called is said, once."""
        self._calls.clear()
        if self._unused and self._applies():
            names = ", ".join(sorted(self._unused))
            log("warning", f"load: no module was called as {names} in step {self._step()}")
            self._unused.clear()

    def _applies(self) -> bool:
        load = self._load
        if load.steps is not None and self._step() not in load.steps:
            return False
        return load.ranks is None or self._rank() in load.ranks

    def _replace(
        self, stem: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        name = f"{stem}.forward.{self._calls[stem]}"
        self._calls[stem] += 1
        if name not in self._load.modules or not self._applies():
            return None
        self._unused.discard(name)
        folder = self._folder() / "dump_tensor_data"
        with torch._C.DisableTorchFunction():
            return (
                _replaced(args, folder, f"{name}.input"),
                _replaced(kwargs, folder, f"{name}.kwargs"),
            )

    def _folder(self) -> Path:
        """This process's folder in the dump's step."""
        step, rank = self._load.path / f"step{self._step()}", self._rank()
        if rank is not None and (step / f"rank{rank}").is_dir():
            return step / f"rank{rank}"
        there = sorted(p.name for p in step.glob("*") if re.fullmatch(r"(rank|proc)\d+", p.name))
        if len(there) == 1 and (rank is None or there[0].startswith("proc")):
            return step / there[0]
        wanted = "one rank or proc folder" if rank is None else f"a folder rank{rank}"
        raise UsageError(f"load: {step} needs {wanted}; there is {', '.join(there) or 'none'}")


def _replaced(value: Any, folder: Path, prefix: str) -> Any:
    """`value` with the tensors in its lists, tuples and dicts replaced."""

    def replace(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            return leaf
        name = ".".join([prefix, *map(_text, path)])
        return _read(folder / f"{name}.pt", leaf)

    return pytree.tree_map_with_path(replace, value)


def _text(key: Any) -> str:
    for name in ("idx", "key", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _read(path: Path, old: torch.Tensor) -> torch.Tensor:
    """The tensor in a file, with the device and the requires_grad of the one that it replaces."""
    try:
        new = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"load: {path} does not exist; is it a dump of task tensor?") from None
    except Exception as error:
        raise UsageError(f"load: {path} cannot be read: {error}") from error
    if not isinstance(new, torch.Tensor) or (new.dtype, new.shape) != (old.dtype, old.shape):
        found = f"{new.dtype} {list(new.shape)}" if isinstance(new, torch.Tensor) else type(new)
        raise UsageError(
            f"load: {path} holds {found}, the module is given {old.dtype} {list(old.shape)}"
        )
    return new.detach().to(old.device).requires_grad_(old.requires_grad)
