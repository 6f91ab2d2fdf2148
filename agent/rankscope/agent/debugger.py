"""PrecisionDebugger: the calls a training script makes, with msProbe's names and meaning.

debugger = PrecisionDebugger(config_path="config.json")
for batch in data:
    debugger.start(model)
    train(batch)
    debugger.stop()
    debugger.step()
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from rankscope.agent.config import Config
from rankscope.agent.errors import UsageError
from rankscope.agent.exits import at_exit
from rankscope.agent.log import log
from rankscope.agent.recording import Recording
from rankscope.agent.taps.modules import Model

_T = TypeVar("_T")


class _OnInstanceOrClass:
    """A method that msProbe's users call on the object or on the class; on the class it means the
    one instance.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            target = instance if instance is not None else owner._instance
            if target is None:
                raise UsageError(
                    f"PrecisionDebugger.{self.__name__}() was called before there is one; "
                    "make it first: PrecisionDebugger(config_path=...)"
                )
            return self._function(target, *args, **kwargs)

        method.__name__, method.__doc__ = self.__name__, self.__doc__
        return method


class PrecisionDebugger:
    """Records what a model computes. One per process: a second construction returns the first
    object, and a warning names its arguments that change nothing.

    `config_path` names a config.json in msProbe's form; `task`, `dump_path`, `level` and `step` win
    over it. Raises ConfigError when something in them is wrong, and leaves nothing behind then.
    """

    _instance: ClassVar[PrecisionDebugger | None] = None
    _recording: Recording
    _given: dict[str, Any]

    def __new__(
        cls,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        step: Any = None,
    ) -> PrecisionDebugger:
        given = {
            "config_path": config_path and os.fspath(config_path),
            "task": task,
            "dump_path": dump_path and os.fspath(dump_path),
            "level": level,
            "step": step,
        }
        if cls._instance is None:
            load = functools.partial(Config.load, config_path, task, dump_path, level, step)
            instance = super().__new__(cls)
            instance._recording = Recording(load(), load)
            at_exit(functools.partial(instance._recording.close, "exit"))
            instance._given = given
            cls._instance = instance
        else:
            _say_what_is_ignored(given, cls._instance._given)
        return cls._instance

    @property
    def needs_model(self) -> bool:
        """Whether the level records modules, so that `start` needs the model."""
        return self._recording.needs_model

    @_OnInstanceOrClass
    def start(
        self,
        model: Model | None = None,
        token_range: list[int] | None = None,
        rank_id: int | None = None,
        scheduled_tokens: Any = None,
    ) -> None:
        """Record from here on. `model` (a module, or a list or tuple of them) is needed at levels
        L0 and mix.

        `token_range` [a, b] limits recording to the model's calls a to b (from 0) after this start.
        `rank_id` says which rank this process is when its process group does not; the first start's
        counts. `scheduled_tokens` is taken for msProbe's sake and changes nothing.
        """
        self._recording.start(model, token_range, rank_id)

    @_OnInstanceOrClass
    def stop(self) -> None:
        """Pause until the next start; what is recorded of this step is written."""
        self._recording.stop()

    @_OnInstanceOrClass
    def step(self) -> None:
        """The step is over: its files are completed and the next one begins, with call numbers from
        0.
        """
        self._recording.end_step()

    @_OnInstanceOrClass
    def save(self, variable: Any, name: str, save_backward: bool = True) -> None:
        """Record one value at level debug: a tensor, int, float or str, or lists, tuples and dicts
        of these; with `save_backward` also the gradients that its tensors will get in this step.
        """
        self._recording.save(variable, name, save_backward)

    @_OnInstanceOrClass
    def set_init_step(self, step: int) -> None:
        """Count steps from this number; before the training loop."""
        self._recording.set_init_step(step)

    @_OnInstanceOrClass
    def module_dump(self, module: torch.nn.Module, module_name: str) -> None:
        """Until module_dump_end, record this module alone, as `Module.{module_name}.{Class}`."""
        self._recording.module_dump(module, module_name)

    @_OnInstanceOrClass
    def module_dump_end(self) -> None:
        """Record everything again."""
        self._recording.module_dump_end()

    @_OnInstanceOrClass
    def register_custom_api(self, module: Any, api: str, api_prefix: str | None = None) -> None:
        """Record calls of the function `api` of a module or class, as `{api_prefix}.{api}.{n}`; the
        prefix is by default the module's name.
        """
        self._recording.custom.register(module, api, api_prefix)

    @_OnInstanceOrClass
    def restore_custom_api(self, module: Any, api: str) -> None:
        """Record calls of the function no longer."""
        self._recording.custom.restore(module, api)


def _say_what_is_ignored(given: dict[str, Any], first: dict[str, Any]) -> None:
    """Of a second construction, by another library perhaps."""
    ignored = [f"{n}={value!r}" for n, value in given.items() if value not in (None, first[n])]
    if ignored:
        names = ", ".join(ignored)
        log(
            "warning",
            f"PrecisionDebugger({names}) changes nothing: there is one in a process, and it was "
            "made before",
        )


def module_dump(module: torch.nn.Module, module_name: str) -> None:
    """PrecisionDebugger.module_dump."""
    PrecisionDebugger.module_dump(module, module_name)


def module_dump_end() -> None:
    """PrecisionDebugger.module_dump_end."""
    PrecisionDebugger.module_dump_end()
