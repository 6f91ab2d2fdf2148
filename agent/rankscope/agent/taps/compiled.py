"""Compiled regions: the function mode is off in them; their border is a record.

Dynamo guards on the mode stack. With our mode on it, turning recording on or off would compile
every graph a second time, and the eager backend, which runs its graph in Python, would record from
the inside. So the mode is taken off when a compiled region is entered and put back when the
outermost one is left. Code between graph breaks inside a compiled function is not recorded either.

Both entry and exit are module-level functions of torch._dynamo.eval_frame: `_callback_from_stance`
is asked right before an entry, `_maybe_set_eval_frame` is called at entry and at exit. All entries
are balanced, also those that switch Dynamo off, which the compiler itself makes in the middle of a
compilation. The names are private: where one is missing, the mode stays on and graphs are compiled
once more. Dynamo is never imported for this: where it is not loaded yet, the call of torch.compile
that loads it is waited for.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import torch

from rankscope.agent.taps.border import Border, OpenRegion
from rankscope.agent.taps.functions import FunctionTap

_MODULE = "torch._dynamo.eval_frame"
_NAMES = ("_callback_from_stance", "_maybe_set_eval_frame")


class _Entries(threading.local):
    def __init__(self) -> None:
        self.open: list[bool] = []  # of the open regions: whether they are compiled
        self.is_next = False  # the next call of _maybe_set_eval_frame is an entry
        self.took_mode = False
        self.region: OpenRegion | None = None  # the record of the outermost compiled region


class CompiledTap:
    """Follows Dynamo's entries and exits between `start` and `stop`."""

    def __init__(self, functions: FunctionTap, border: Border) -> None:
        self._functions = functions
        self._border = border
        self._entries = _Entries()
        self._originals: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}
        self._compile: tuple[Any, Any] | None = None  # torch's, and ours in its place

    def start(self) -> None:
        module = sys.modules.get(_MODULE)
        if module is None:
            return self._await_dynamo()
        self._await_no_longer()
        if self._originals:
            return
        originals = {name: getattr(module, name, None) for name in _NAMES}
        if not all(originals.values()):
            return
        self._originals = originals
        self._ours = {_NAMES[0]: self._before_entry, _NAMES[1]: self._entry_or_exit}
        for name, function in self._ours.items():
            setattr(module, name, function)

    def _await_dynamo(self) -> None:
        if self._compile is not None:
            return
        original = torch.compile

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._compile is not None:  # not stopped meanwhile
                self.start()
            return result

        self._compile = original, compile
        torch.compile = compile

    def _await_no_longer(self) -> None:
        if self._compile is not None:
            (original, ours), self._compile = self._compile, None
            if torch.compile is ours:
                torch.compile = original

    def stop(self) -> None:
        self._await_no_longer()
        module = sys.modules.get(_MODULE)
        for name, original in self._originals.items():
            if getattr(module, name) == self._ours[name]:
                setattr(module, name, original)
        self._originals = {}

    def _before_entry(self, callback: Any) -> Any:
        entries = self._entries
        entries.is_next = True
        chosen = self._original(0)(callback)
        if callable(chosen) and not entries.open:
            entries.region = self._border.enter(sys._getframe(1))
        return chosen

    def _entry_or_exit(self, callback: Any) -> Any:
        entries = self._entries
        if entries.is_next:
            entries.is_next = False
            entries.open.append(callable(callback))
            if callable(callback) and self._functions.leave_thread():
                entries.took_mode = True
        elif entries.open:
            entries.open.pop()
            if not entries.open and entries.took_mode:
                entries.took_mode = False
                self._functions.enter_thread()
            if not entries.open and entries.region is not None:
                region, entries.region = entries.region, None
                self._border.leave(region, sys._getframe(1))
        return self._original(1)(callback)

    def _original(self, index: int) -> Any:
        """Also after `stop`, when a region that is still open comes to its exit."""
        known = self._originals.get(_NAMES[index])
        return known or getattr(sys.modules[_MODULE], _NAMES[index])
