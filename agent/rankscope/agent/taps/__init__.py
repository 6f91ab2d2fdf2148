"""Where values are seen. A tap is put on by `start()` and taken off by `stop()`; nothing of it
stays in torch.
"""

from __future__ import annotations

from rankscope.agent.session import Session
from rankscope.agent.taps.distributed import DistributedTap
from rankscope.agent.taps.functions import FunctionTap
from rankscope.agent.taps.modules import Model, ModuleTap
from rankscope.agent.taps.scopes import ScopeTap
from rankscope.agent.taps.threads import ThreadTap


class Taps:
    """The taps that a session's level needs."""

    def __init__(self, session: Session) -> None:
        self._functions = FunctionTap(session) if session.watches_apis else None
        self._modules = ModuleTap(session) if session.watches_modules else None
        self._distributed = DistributedTap(session) if session.watches_apis else None
        self._threads = ThreadTap(self._functions) if self._functions is not None else None
        self._scopes = ScopeTap(session) if session.config.level == "mix" else None

    def watch(self, model: Model) -> None:
        """Hook a model's modules until `stop`."""
        if self._modules is not None:
            self._modules.start(model)

    def start(self) -> None:
        """Idempotent; on the thread that will run the model."""
        for tap in (self._distributed, self._scopes, self._functions, self._threads):
            if tap is not None:
                tap.start()

    def stop(self) -> None:
        """Idempotent; safe from inside a hook of ours."""
        for tap in (self._threads, self._functions, self._scopes, self._distributed, self._modules):
            if tap is not None:
                tap.stop()

    def end_step(self) -> None:
        """The step's records are over: what is open is closed."""
        if self._modules is not None:
            self._modules.end_step()
