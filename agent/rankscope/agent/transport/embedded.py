"""The collector of a dump path on this host: found by its port file, started when there is none.

Any number of ranks may look at once: one of them starts it under a lock, the others wait for the
port file. Should two still start one, the collector's own lock lets one live.
"""

import fcntl
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rankscope.agent.transport.config import sidecar_of
from rankscope.agent.transport.stream import LogFunction

COLLECTOR_MODULE = "rankscope.collector.embedded"
START_PATIENCE_SECONDS = 20.0
MAX_STARTS = 3
_BACKOFF_SECONDS = (0.2, 1.0, 5.0)
LONG_LIFE_SECONDS = 60.0
"""A collector that lived this long does not count towards `MAX_STARTS`."""
# They concern the training script's interpreter and would change or break the collector's.
DROPPED_VARIABLES = (
    "PYTHONSTARTUP",
    "PYTHONINSPECT",
    "PYTHONWARNINGS",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONTRACEMALLOC",
)


class EmbeddedCollector:
    """Locator of the one collector per host and RUN."""

    def __init__(self, run_path: Path, log: LogFunction) -> None:
        self.retry_seconds = 0.05
        self._run_path = run_path
        self._sidecar = sidecar_of(run_path)
        self._log = log
        self._starts = 0
        self._awaited = False  # started by us, and its port file not seen yet
        self._process: _Collector | None = None
        self._started_at = self._start_again_at = 0.0
        self._lock_fd = -1
        self._given_up = False

    @property
    def exit_patience_seconds(self) -> float:
        """It is there or on its way, unless it was said that it cannot be."""
        return 0.0 if self._given_up else math.inf

    def locate(self, needed: bool) -> str | None:
        """Never blocks; starts a collector when `needed` and none lives."""
        if self._process is not None:
            self._process.poll()  # lets go of a dead child
        port = read_port_file(self._sidecar / "port")
        if port is not None:
            self._awaited = False
            self._release_start()
            return str(port["address"])
        idle = self._given_up or not needed
        self.retry_seconds = 0.5 if idle else 0.05
        if not (idle or self._is_being_started() or time.monotonic() < self._start_again_at):
            self._start()
        return None

    def failed(self) -> None:
        """The port file is read again each time: nothing to remember."""

    def _is_being_started(self) -> bool:
        """The one we started may still come; status 0: it detached, or another one was first."""
        if not self._awaited or self._process is None:
            return False
        now, status = time.monotonic(), self._process.returncode
        if now - self._started_at < START_PATIENCE_SECONDS:
            if status is None or (status == 0 and not self._is_free()):
                return True
        self._awaited = False
        self._start_again_at = now + _BACKOFF_SECONDS[min(self._starts, MAX_STARTS) - 1]
        self._release_start()
        return False

    def _is_free(self) -> bool:
        """Whether nobody holds the collector's lock, which is taken before it detaches: it died
        while it loaded its libraries. Asked only by the one who may start another.
        """
        try:
            fd = os.open(self._sidecar / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except OSError:  # held, or a file system without locks
            return False
        finally:
            os.close(fd)

    def _start(self) -> None:
        if reason := self._why_impossible():
            self._give_up(reason)
            return
        if time.monotonic() - self._started_at > LONG_LIFE_SECONDS:
            self._starts = 0
        if self._starts >= MAX_STARTS:
            log_file = self._sidecar / "collector.log"
            self._give_up(f"the collector for {self._run_path} does not start: see {log_file}")
        elif self._claim_start():
            self._starts += 1
            self._started_at = time.monotonic()
            self._awaited = True
            try:
                self._process = spawn_collector(self._run_path)
            except (OSError, RuntimeError) as error:
                self._give_up(f"the collector for {self._run_path} cannot be started: {error}")

    def _why_impossible(self) -> str:
        missing = missing_libraries()
        if missing:
            return (
                f"no collector is set and none can be started here ({', '.join(missing)} is "
                "missing): pip install 'rankscope[collector]', or set RANKSCOPE_COLLECTOR=host:port"
            )
        if not sys.executable:
            return "no collector is set and sys.executable, which would run one, is not known"
        return ""

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._release_start()
        self._log("warning", f"{reason}; records are only kept in the spool")

    def _claim_start(self) -> bool:
        """One process of all that look starts the collector; held until it can be reached."""
        if self._lock_fd >= 0:
            return True
        try:
            self._sidecar.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._sidecar / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._give_up(f"{self._sidecar} cannot be used: {error}")
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:  # a file system without locks: the collector's own election decides
            pass
        self._lock_fd = fd
        return True

    def _release_start(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


class _Collector(subprocess.Popen[bytes]):
    """A child that outlives this process on purpose, so without the warning about it."""

    def __del__(self, *_: Any) -> None:
        pass


def spawn_collector(run_path: Path) -> _Collector:
    """Start a collector in a session of its own; it gets only this process's environment."""
    environment = {name: os.environ[name] for name in os.environ if name not in DROPPED_VARIABLES}
    with open(sidecar_of(run_path) / "collector.log", "ab") as log_file:
        return _Collector(
            [sys.executable, "-m", COLLECTOR_MODULE, "--run", os.fspath(run_path)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            close_fds=True,
            start_new_session=True,
            cwd="/",  # `-m` puts the folder first on sys.path: not the script's
            env=environment,
        )


def read_port_file(path: Path) -> dict[str, Any] | None:
    """What a living collector of this boot wrote there (address, pid, boot_id, collector_id)."""
    try:
        port = json.loads(path.read_text())
        if port["boot_id"] != boot_id() or not port["address"]:
            return None
        return dict(port) if _is_alive(int(port["pid"])) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, under another user
        return True
    try:  # a dead child of a rank that has not asked for it yet
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return True


def missing_libraries() -> list[str]:
    """What an embedded collector needs and this environment lacks; imports none of it."""
    missing = []
    for module in ("pyarrow", "deltalake", COLLECTOR_MODULE):
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is None:
            missing.append(module)
    return missing


def boot_id() -> str:
    """Of the running kernel; empty where there is none to read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
