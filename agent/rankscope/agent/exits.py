"""The end of a process, however it comes about."""

import atexit
import multiprocessing
from collections.abc import Callable
from multiprocessing import util


def at_exit(action: Callable[[], object]) -> None:
    """Call `action` when this process ends in order; in some processes it is called twice.

    A child that multiprocessing forked, itself or by its server, ends with os._exit: before Python
    3.14 only multiprocessing's own finalizers run there.
    """
    atexit.register(action)
    if multiprocessing.parent_process() is not None and _method() != "spawn":
        # Among the last: children are waited for before it.
        util.Finalize(None, action, exitpriority=-1000)


def _method() -> str | None:
    """How this process was started. A spawned one ends like any other."""
    own: str | None = getattr(multiprocessing.current_process(), "_start_method", None)
    return own or multiprocessing.get_start_method(allow_none=True)
