"""What a collector must find again when it was killed: the runs it had open, and the spool folders
of this host that its agents named.

One small file of its own, written aside and renamed. It is a hint: a run or folder that is gone is
passed over, and what it lacks is found by the ways of old (an agent that comes back, `deliver`).
"""

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from rankscope.collector import liveness
from rankscope.v1 import collector_pb2 as pb

log = logging.getLogger(__name__)


class Memory:
    """Open runs and spool folders; any thread may call. Nothing here fails for want of a disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        known = _read(path)
        self._spools: set[str] = {name for name in known["spools"] if os.path.isdir(name)}
        self._runs: set[str] = set(known["runs"])

    def spools(self) -> list[Path]:
        """Folders of this host in which processes of this collector had their spools."""
        with self._lock:
            return sorted(map(Path, self._spools))

    def runs(self) -> list[Path]:
        """Runs that were not closed in order, or in which steps are left to be sealed."""
        with self._lock:
            return sorted(map(Path, self._runs))

    def heard_of(self, hello: pb.Hello) -> None:
        """A process said hello: its spool is looked for when it is killed while nobody listens."""
        if os.path.isabs(hello.spool_path) and liveness.on_this_host(hello.host, hello.boot_id):
            self._change(self._spools, hello.spool_path, True)

    def opened(self, run_path: Path) -> None:
        """The run is open."""
        self._change(self._runs, str(run_path), True)

    def closed(self, run_path: Path) -> None:
        """The run was closed and nothing is left to be done in it."""
        self._change(self._runs, str(run_path), False)

    def _change(self, names: set[str], name: str, present: bool) -> None:
        with self._lock:
            if (name in names) is present:
                return
            (names.add if present else names.discard)(name)
            content = {"spools": sorted(self._spools), "runs": sorted(self._runs)}
            aside = self._path.with_name(f"{self._path.name}.tmp")
            try:
                aside.write_text(json.dumps(content) + "\n")
                os.replace(aside, self._path)
            except OSError as error:
                log.warning("%s cannot be written: %s", self._path, error)


def _read(path: Path) -> dict[str, list[Any]]:
    try:
        content = json.loads(path.read_text())
        return {name: list(map(str, content[name])) for name in ("spools", "runs")}
    except (OSError, ValueError, KeyError, TypeError):
        return {"spools": [], "runs": []}
