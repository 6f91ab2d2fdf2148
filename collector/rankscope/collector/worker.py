"""A thread that does what is posted to it, in order, and what is due in between."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
Call = Callable[[], None]

_LONGEST_WAIT_SECONDS = 1.0


class Worker(threading.Thread):
    """Owns state that only its thread touches; `post`, `ask` and `after` bring calls into it."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._timers: list[tuple[float, Call]] = []
        self._stopping = threading.Event()

    def post(self, call: Call) -> None:
        """Have something done in this thread; from any thread."""
        self._inbox.put(call)

    @property
    def queued(self) -> int:
        """Calls that wait to be done."""
        return self._inbox.qsize()

    def ask(self, question: Callable[[], T]) -> T:
        """What only this thread may look up; from another thread, which waits."""
        answer: Future[T] = Future()
        self.post(lambda: answer.set_result(question()))
        while self.is_alive():
            with suppress(TimeoutError):
                return answer.result(timeout=1.0)
        raise RuntimeError(f"{self.name} has ended")

    def stop(self) -> None:
        """End after what was posted; returns when done."""
        self._inbox.put(None)
        self._stopping.set()
        self.join()

    def after(self, wait_seconds: float, call: Call) -> None:
        """Have something done later; from this thread."""
        self._timers.append((time.monotonic() + wait_seconds, call))

    def _take(self, due: float, enough: Callable[[], bool]) -> int:
        """Do what is posted now, or is the first to be until `due`, unless it is enough.

        Returns how many calls were made, -1 when the thread is to end.
        """
        wait = min(max(due - time.monotonic(), 0.0), _LONGEST_WAIT_SECONDS)
        try:
            call = self._inbox.get(timeout=wait)
        except queue.Empty:
            return 0
        done, here = 0, self._inbox.qsize()
        while call is not None:
            call()
            done += 1
            if done > here or enough():
                return done
            call = self._inbox.get()
        return -1

    def _drain(self) -> None:
        """Do what was posted after the word to end."""
        with suppress(queue.Empty):
            while True:
                if (call := self._inbox.get_nowait()) is not None:
                    call()

    def _next_timer(self) -> float:
        return min((at for at, _ in self._timers), default=float("inf"))

    def _run_timers(self) -> None:
        now = time.monotonic()
        due = [call for at, call in self._timers if at <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for call in due:
            call()
