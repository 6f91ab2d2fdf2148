"""dump_enable: recording follows config.json while the job runs.

The file is looked at when the script calls start(), stop() or step(), at most every half second
while recording is on and every three seconds while it is off.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from rankscope.agent.config import Config
from rankscope.agent.errors import ConfigError
from rankscope.agent.log import log

ON_SECONDS, OFF_SECONDS = 0.5, 3.0

#: What a running job cannot change: where records go, and how values are measured.
_FIXED = (
    "task",
    "dump_path",
    "summary_mode",
    "precision",
    "tensor_list",
    "samples",
    "std",
    "object_names",
    "collector",
    "run",
    "spool_path",
    "spool_limit_bytes",
    "on_full",
    "block_seconds",
    "flush_seconds",
    "exit_seconds",
    "tensor_memory_bytes",
    "tensor_quota_bytes",
)


class ConfigWatch:
    """Looks at one file. `is_on` is what dump_enable said last; a broken file means off."""

    def __init__(
        self,
        path: Path,
        is_on: bool,
        load: Callable[[], Config],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_on = is_on
        self._path, self._load, self._clock = path, load, clock
        self._seen = self._stamp()
        self._looked = clock()

    def look(self, current: Config) -> Config:
        """The configuration that holds from now on: `current` itself when nothing has changed."""
        now = self._clock()
        if now - self._looked < (ON_SECONDS if self.is_on else OFF_SECONDS):
            return current
        self._looked = now
        stamp = self._stamp()
        if stamp == self._seen:
            return current
        self._seen = stamp
        try:
            new = self._load()
        except ConfigError as error:
            self.is_on = False
            log("warning", f"recording is off until the configuration is right again: {error}")
            return current
        if new.dump_enable is not None and new.dump_enable != self.is_on:
            self.is_on = new.dump_enable
            log("info", f"{self._path} switched recording {'on' if self.is_on else 'off'}")
        return _merged(current, new)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size)


def _merged(current: Config, new: Config) -> Config:
    """`new` with what cannot change from `current`, which is said."""
    kept = {name: getattr(current, name) for name in _FIXED}
    changed = [name for name, value in kept.items() if getattr(new, name) != value]
    if changed:
        log("warning", f"a running job keeps its {', '.join(changed)}; the rest of the file holds")
    merged = dataclasses.replace(new, **kept)
    same = dataclasses.replace(merged, dump_enable=current.dump_enable, raw=current.raw) == current
    return current if same else merged
