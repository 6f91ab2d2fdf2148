"""Checks of the machine: disks, limits, how processes fork."""

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rankscope.agent.config import Config
from rankscope.agent.doctor.finding import Finding, fault, ok, warning
from rankscope.agent.transport.config import TransportConfig

PROBE_BYTES = 8 << 20
SLOW_BYTES_PER_SECOND = 50e6
_NETWORK_DISKS = ("nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "gpfs", "beegfs", "fuse.sshfs")
_MIB = 1 << 20


def disks(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Space, kind and speed of the disks below the spool and below `dump_path`."""
    transport = TransportConfig.from_mapping(vars(config))
    remedy = "set rankscope.spool_path, or RANKSCOPE_SPOOL, to a folder on a local disk"
    spool = transport.spool_folder(environ)
    yield disk("spool", spool, config.spool_limit_bytes, remedy)
    if (kind := _kind_of(_existing(spool))) in _NETWORK_DISKS:
        yield warning("spool disk", f"{spool} lies on {kind}: each batch waits for it", remedy)
    if not config.collector:  # a daemon ignores dump_path
        remedy = "set dump_path to a folder with space that you may write"
        yield disk("dump_path", config.dump_path, 0, remedy)


def disk(name: str, folder: Path, needed_bytes: int, remedy: str) -> Finding:
    """Write some megabytes below a folder that need not exist yet, and take them away again."""
    place = _existing(folder)
    try:
        bytes_per_second = _speed(place)
        free = shutil.disk_usage(place).free
    except OSError as error:
        return fault(name, f"{folder}: cannot write in {place}: {error.strerror or error}", remedy)
    seen = f"{folder}: {free / _MIB:.0f} MiB free, {bytes_per_second / 1e6:.0f} MB/s"
    if free < needed_bytes:
        return warning(
            name,
            f"{seen}; one process may keep {needed_bytes / _MIB:.0f} MiB",
            f"lower rankscope.spool_limit_bytes, or {remedy}",
        )
    if bytes_per_second < SLOW_BYTES_PER_SECOND:
        return warning(name, f"{seen}; slow", remedy)
    return ok(name, seen)


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


def _speed(folder: Path) -> float:
    """Bytes a second of a write that reaches the disk."""
    content = os.urandom(PROBE_BYTES)
    with tempfile.TemporaryFile(dir=folder, prefix="rankscope-doctor-") as file:
        began = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / max(time.perf_counter() - began, 1e-6)


def _kind_of(place: Path) -> str:
    """Type of the file system that holds a path, as /proc/mounts names it."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    where = os.path.realpath(place)
    for line in mounts:
        _, mounted, found, *_ = line.split(" ")
        below = where == mounted or where.startswith(mounted.rstrip("/") + "/")
        if below and len(mounted) >= len(best):
            best, kind = mounted, found
    return kind


def limits() -> Iterator[Finding]:
    """What `ulimit` allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < 1024:
        yield warning(
            "open files", f"{files}; a collector needs one a process and more", "ulimit -n 65536"
        )
    else:
        yield ok("open files", _shown(files))
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    needed = TransportConfig.segment_bytes
    if size != resource.RLIM_INFINITY and size < needed:
        yield fault(
            "file size",
            f"files may have {size} bytes; a segment of the spool has {needed}",
            "ulimit -f unlimited",
        )
    else:
        yield ok("file size", _shown(size))


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def forks(environ: Mapping[str, str]) -> Finding:
    """Whether gRPC is told to take part in forks, which makes DataLoader workers hang."""
    value = environ.get("GRPC_ENABLE_FORK_SUPPORT", "")
    if value.lower() in ("", "0", "false", "no", "off"):
        return ok("forks", "gRPC takes no part in forks")
    return warning(
        "forks",
        f"GRPC_ENABLE_FORK_SUPPORT={value}: forked workers may be slow or hang",
        "unset GRPC_ENABLE_FORK_SUPPORT, or set it to 0",
    )
