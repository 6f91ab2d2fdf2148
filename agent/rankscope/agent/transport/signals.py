"""A last flush when the scheduler ends the job with SIGTERM."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

FLUSH_SECONDS = 1.0

Restore = Callable[[], None]


def install(
    flush: Callable[[float], object],
    defer: Callable[[Callable[[], None]], bool] = lambda action: False,
) -> Restore:
    """On SIGTERM call `flush(1.0)`, then die of the signal as before: the exit status stays.

    `defer(action)` returns True when the interrupted code holds what the flush needs; it then runs
    `action`, which raises the signal again, as soon as it is done. Only in the main thread and only
    where nobody handles the signal; else nothing is done. Returns what takes the handler off again,
    unless somebody replaced it.
    """
    if threading.current_thread() is not threading.main_thread():
        return _nothing
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return _nothing
    if os.getpid() == 1:  # of a container: without a handler the signal does not end it
        return _nothing

    def handle(number: int, frame: FrameType | None) -> None:
        if defer(lambda: os.kill(os.getpid(), number)):
            return
        signal.signal(number, signal.SIG_DFL)
        try:
            flush(FLUSH_SECONDS)
        finally:
            os.kill(os.getpid(), number)

    def restore() -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)
    return restore


def _nothing() -> None:
    pass
