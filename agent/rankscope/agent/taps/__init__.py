"""Where values are seen. A tap is put on by `start()` and taken off by `stop()`; nothing of torch
stays replaced, see `scopes` for the two hooks that stay and do nothing.
"""

from __future__ import annotations

from torch import nn

from rankscope.agent.session import Session
from rankscope.agent.taps.border import Border
from rankscope.agent.taps.compiled import CompiledTap
from rankscope.agent.taps.distributed import DistributedTap
from rankscope.agent.taps.functions import FunctionTap
from rankscope.agent.taps.modules import Model, ModuleTap
from rankscope.agent.taps.scopes import ScopeTap
from rankscope.agent.taps.threads import ThreadTap
from rankscope.agent.taps.wrappers import LibraryTap


class Taps:
    """The taps that a session's level needs."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._functions = FunctionTap(session) if session.watches_apis else None
        self._modules = ModuleTap(session, self._functions) if session.watches_modules else None
        self._distributed = DistributedTap(session) if session.watches_apis else None
        self._libraries = LibraryTap(session) if session.watches_apis else None
        self._threads = ThreadTap(self._functions) if self._functions is not None else None
        self._compiled = None
        if self._functions is not None:
            self._compiled = CompiledTap(self._functions, Border(session))
        self._scopes = ScopeTap(session) if session.config.level == "mix" else None

    def watch(self, model: Model) -> None:
        """Hook a model's modules until `stop`."""
        if self._modules is not None:
            self._modules.start(model)

    def start(self) -> None:
        """Idempotent; on the thread that will run the model."""
        order = (self._distributed, self._libraries, self._scopes, self._functions, self._threads)
        for tap in (*order, self._compiled):
            if tap is not None:
                tap.start()

    def stop(self) -> None:
        """Idempotent; safe from inside a hook of ours."""
        order = (self._threads, self._functions, self._scopes, self._libraries, self._distributed)
        for tap in (self._compiled, *order, self._modules):
            if tap is not None:
                tap.stop()

    def dump_module(self, module: nn.Module, name: str) -> bool:
        """Until `end_dump`, `module` is the only record. False, and no change, when it is watched
        as a part of a model.
        """
        if self._modules is None:
            self._modules = ModuleTap(self._session, self._functions)
        if not self._modules.dump(module, name):
            return False
        self._session.mute(True)
        return True

    def end_dump(self) -> None:
        self._session.mute(False)
        if self._modules is not None:
            self._modules.end_dump()

    def end_step(self) -> None:
        """The step's records are over: what is open is closed."""
        if self._modules is not None:
            self._modules.end_step()
