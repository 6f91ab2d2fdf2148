"""PrecisionDebugger: the calls a training script makes, with msProbe's names and meaning.

debugger = PrecisionDebugger(config_path="config.json")
for batch in data:
    debugger.start(model)
    train(batch)
    debugger.stop()
    debugger.step()
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from rankscope.agent.config import Config
from rankscope.agent.errors import UsageError
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
    object.

    `config_path` names a config.json in msProbe's form; `task`, `dump_path`, `level` and `step` win
    over it. Raises ConfigError when something in them is wrong, and leaves nothing behind then.
    """

    _instance: ClassVar[PrecisionDebugger | None] = None
    _recording: Recording

    def __new__(
        cls,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        step: Any = None,
    ) -> PrecisionDebugger:
        if cls._instance is None:
            config = Config.load(config_path, task, dump_path, level, step)
            instance = super().__new__(cls)
            instance._recording = Recording(config)
            atexit.register(instance._recording.close, "exit")
            cls._instance = instance
        return cls._instance

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
        counts.
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
