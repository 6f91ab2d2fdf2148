"""Threads that start while recording: the function mode is thread-local, so each gets it at its
first event.

`threading.setprofile` is the one way to run code at the start of every kind of thread. The hook
hands on to a profiler that was there and takes itself off the thread at once. Threads that were
alive before get the mode at their outermost module call.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from rankscope.agent.taps.functions import FunctionTap


class ThreadTap:
    """Pushes the function tap on new threads between `start` and `stop`."""

    def __init__(self, functions: FunctionTap) -> None:
        self._functions = functions
        self._previous: Any = None
        self._on = False

    def start(self) -> None:
        if self._on:
            return
        self._on = True
        self._previous = threading.getprofile()
        threading.setprofile(self._first_event)

    def stop(self) -> None:
        if self._on:
            self._on = False
            if threading.getprofile() == self._first_event:
                threading.setprofile(self._previous)

    def _first_event(self, frame: FrameType, event: str, argument: Any) -> None:
        sys.setprofile(self._previous)
        thread = threading.current_thread()
        if self._on and not _is_transport(thread):
            self._functions.enter_thread()
            self._leave_at_end(thread)
        if self._previous is not None:
            self._previous(frame, event, argument)

    def _leave_at_end(self, thread: threading.Thread) -> None:
        """Take the mode off as the thread's last act in Python. Torch would drop what is left on
        the stack when the thread is already gone, and needs the interpreter for it: a process that
        ends in that moment would be aborted.
        """
        last_act = getattr(thread, "_delete", None)
        if last_act is None:
            return

        def leave_and_end() -> None:
            self._functions.leave_thread()
            last_act()

        thread._delete = leave_and_end  # type: ignore[attr-defined]


def _is_transport(thread: threading.Thread) -> bool:
    """Ours, and those gRPC starts for us: no torch function runs there."""
    target = getattr(thread, "_target", None)
    module = str(getattr(target, "__module__", ""))
    return thread.name.startswith("rankscope-") or module.startswith("grpc")
