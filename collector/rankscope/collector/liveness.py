"""Whether a process of this host is provably gone."""

import os
import socket
from pathlib import Path

from rankscope.collector import spool_reader
from rankscope.v1 import collector_pb2 as pb

_TOLERANCE_SECONDS = 2.0


def boot_id() -> str:
    """Of this host's kernel; empty where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def on_this_host(host: str, its_boot_id: str) -> bool:
    """Whether a process that says so runs beside this one."""
    return bool(its_boot_id) and its_boot_id == boot_id() and host == socket.gethostname()


def start_time(pid: int) -> float | None:
    """Seconds since the epoch, None when there is no such process here."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    boot = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def pid_namespace() -> int:
    """Of this process; 0 where it cannot be told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def is_gone(hello: pb.Hello) -> bool:
    """True only when the process cannot come back: its spool's lock is free, or its pid is not its
    own any more. A process of another host is never provably gone, nor one of another container
    whose spool is not seen here."""
    if not on_this_host(hello.host, hello.boot_id):
        return False
    spool = Path(hello.spool_path) if hello.spool_path else None
    owned = spool_reader.is_owned(spool, hello.process_uuid) if spool else None
    if owned is not None:
        return not owned
    if hello.pid_namespace not in (0, pid_namespace()):
        return False
    started = start_time(hello.pid)
    return started is None or abs(started - hello.process_started) > _TOLERANCE_SECONDS
