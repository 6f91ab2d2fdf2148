"""Calls whose inner records hang under a word: optimizer steps and gradient clipping."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import utils as nn_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rankscope.agent.session import Session

#: Taps that are on. The optimizer hooks call these and stay where they are once they are there: a
#: stop() or start() from inside an optimizer's hook must not change what torch walks over.
_active: list[ScopeTap] = []
_installed: list[object] = []

_CLIPPERS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")


class ScopeTap:
    """Opens "optimizer" between an optimizer's step hooks and "clip_grad" inside torch's clipping
    functions.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        self._outer: list[int] = []

    def start(self) -> None:
        if self in _active:
            return
        _active.append(self)
        if not _installed:
            _installed.append(register_optimizer_step_pre_hook(_entered))
            _installed.append(register_optimizer_step_post_hook(_left))
        for name in _CLIPPERS:
            original = getattr(nn_utils, name, None)
            if original is not None:
                wrapper = self._wrap(original)
                self._wrapped[name] = (original, wrapper)
                setattr(nn_utils, name, wrapper)

    def stop(self) -> None:
        if self in _active:
            _active.remove(self)
        for name, (original, wrapper) in self._wrapped.items():
            if getattr(nn_utils, name) is wrapper:
                setattr(nn_utils, name, original)
        self._wrapped.clear()
        self._session.scope = 0
        self._outer.clear()

    def enter(self) -> None:
        """An optimizer's step begins."""
        if self._session.running:
            self._outer.append(self._session.open_scope("optimizer"))

    def leave(self) -> None:
        """It is over."""
        if self._outer:
            self._session.scope = self._outer.pop()

    def _wrap(self, original: Any) -> Any:
        session = self._session

        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if not session.running:
                return original(*args, **kwargs)
            outer = session.open_scope("clip_grad")
            try:
                return original(*args, **kwargs)
            finally:
                session.scope = outer

        return clip


def _entered(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for tap in tuple(_active):
        tap.enter()


def _left(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for tap in tuple(_active):
        tap.leave()
