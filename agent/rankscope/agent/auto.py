"""Recording a script that knows nothing of it: models are found when they are called, steps are
counted by optimizer steps or by another function's calls.

Recording of a step begins with the first call of a model in it. A model is a module that is called
without being part of one that is known; the first has the record names of `start(model)`, the n-th
found (from 1) those of the n-th in a list, `Module.{n}.…`.
"""

from __future__ import annotations

import functools
import importlib
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from rankscope.agent.debugger import PrecisionDebugger
from rankscope.agent.errors import UsageError

#: Environment variables that stand for the launcher's options.
CONFIG_VARIABLE, STEP_VARIABLE = "RANKSCOPE_CONFIG", "RANKSCOPE_STEP_ON"

STEP_ON = "optimizer, forward, or MODULE:FUNCTION of an importable module"


class AutoRecorder:
    """Drives the debugger of this process. `install` once, before the script runs."""

    def __init__(self, debugger: PrecisionDebugger, step_on: str = "optimizer") -> None:
        self._debugger = debugger
        self._step_on = step_on
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._roots: list[weakref.ref[nn.Module]] = []
        self._waiting = True  # for the first call of a model in this step
        self._counted: weakref.ref[torch.optim.Optimizer] | None = None

    def install(self) -> None:
        """Watch calls of modules and what ends a step; a UsageError says what cannot be had."""
        if self._step_on == "optimizer":
            register_optimizer_step_post_hook(self._optimizer_stepped)
        elif self._step_on != "forward":
            self._wrap(self._step_on)
        register_module_forward_pre_hook(self._called)

    # ----------------------------------------------------------------------------------- the start

    def _called(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module in self._known:
            if self._waiting:
                self._start()
            return
        self._known.update(module.modules())
        if next(module.children(), None) is not None:
            self._roots.append(weakref.ref(module))
            if self._step_on == "forward":
                module.register_forward_hook(self._forward_ended)
        self._start()

    def _start(self) -> None:
        self._waiting = False
        roots = [root for ref in self._roots if (root := ref()) is not None]
        if not roots:
            # Loss functions and the like: enough for APIs, not for the records of modules.
            if not self._debugger.needs_model:
                self._debugger.start()
            else:
                self._waiting = True
            return
        self._debugger.start(model=roots[0])
        if len(roots) > 1:  # modules that have a name keep it
            self._debugger.start(model=roots)

    # ------------------------------------------------------------------------------------ the step

    def _end_step(self) -> None:
        self._debugger.stop()
        self._debugger.step()
        self._waiting = True

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Where there are several, the one that stepped first counts."""
        if self._counted is None or self._counted() is None:
            self._counted = weakref.ref(optimizer)
        if self._counted() is optimizer:
            self._end_step()

    def _forward_ended(self, module: nn.Module, *_: Any) -> None:
        first = self._roots[0]()
        if (first is None or first is module) and not torch.compiler.is_compiling():
            self._end_step()

    def _wrap(self, name: str) -> None:
        owner, attribute, function = _resolve(name)

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                self._end_step()

        setattr(owner, attribute, counted)


def install(config: str | None, step_on: str = "optimizer") -> AutoRecorder:
    """Make the debugger and watch this process from now on. Raises ConfigError and UsageError."""
    recorder = AutoRecorder(PrecisionDebugger(config_path=config), step_on)
    recorder.install()
    return recorder


def install_from_environment(environ: Mapping[str, str] = os.environ) -> AutoRecorder:
    """`install` with what RANKSCOPE_CONFIG and RANKSCOPE_STEP_ON say."""
    return install(environ.get(CONFIG_VARIABLE) or None, environ.get(STEP_VARIABLE) or "optimizer")


def _resolve(name: str) -> tuple[Any, str, Callable[..., Any]]:
    module, colon, path = name.partition(":")
    *outer, attribute = path.split(".")
    try:
        if not colon or not attribute:
            raise ImportError("not of this form")
        owner: Any = importlib.import_module(module)
        for part in outer:
            owner = getattr(owner, part)
        function = getattr(owner, attribute)
        if not callable(function):
            raise TypeError(f"{path} is no function")
    except (ImportError, AttributeError, TypeError) as error:
        raise UsageError(f"--step-on {name}: {error}; allowed: {STEP_ON}") from error
    return owner, attribute, function
