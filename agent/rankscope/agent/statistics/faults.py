"""An accelerator that fails or falls silent: records of it go without values, and go."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

#: Longest wait for a device's results. What the loop has queued is done within a second or two;
#: a device that hangs keeps its rank's last records in memory as long as it is waited for.
PATIENCE_SECONDS = 10.0

#: The same for a device that has just been waited for in vain.
SILENT_SECONDS = 0.1


class Patience:
    """Waits for events of devices; another thread may cut a wait short."""

    def __init__(self, seconds: float = PATIENCE_SECONDS) -> None:
        self._seconds = seconds
        self._silent = False

    def shorten(self, seconds: float) -> None:
        """From now on wait no longer than that, also where somebody waits already."""
        self._seconds = min(self._seconds, seconds)

    def wait_for(self, events: Iterable[Any]) -> None:
        """Until all have happened. Raises what the device raises, and TimeoutError in the end."""
        began, silent = time.monotonic(), self._silent
        for event in events:
            if not hasattr(event, "query"):
                event.synchronize()
                continue
            pause_seconds = 1e-4
            while not event.query():
                limit = min(self._seconds, SILENT_SECONDS) if silent else self._seconds
                if time.monotonic() - began > limit:
                    self._silent = True
                    raise TimeoutError(f"the device did not answer for {limit:g} s")
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, 0.01)
        self._silent = False


#: This process's.
PATIENCE = Patience()


class Failed:
    """In the place of an event that the device could not record any more."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def synchronize(self) -> None:
        raise self._error


def reason_of(error: Exception) -> str:
    """One line; errors of devices come with paragraphs of advice."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"
