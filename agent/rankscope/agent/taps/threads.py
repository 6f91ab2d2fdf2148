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
        if self._on and not threading.current_thread().name.startswith("rankscope-"):
            self._functions.enter_thread()
        if self._previous is not None:
            self._previous(frame, event, argument)
