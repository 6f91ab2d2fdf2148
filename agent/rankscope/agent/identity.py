"""Which process this is, which rank it holds, and how we know: all without a collective call.

A rank comes from the first of: `rank_id=` of start(), RANKSCOPE_RANK_ID, torch's process group,
the launcher's variables. Nothing here imports torch; it is looked at only when the script has
loaded it.
"""

import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rankscope.agent.errors import ConfigError
from rankscope.agent.log import log

PARENT_VARIABLE = "RANKSCOPE_PARENT"


@dataclass(frozen=True)
class RankClaim:
    """A rank and where it was read. `world_size` 0 and `local_rank` -1 mean unknown."""

    rank: int
    source: str
    world_size: int = 0
    local_rank: int = -1
    group: str = ""  # tells apart groups that use the same ranks: address of the group's store
    replica: int | None = None  # number of a data-parallel replica, where a variable tells it


#: Launchers in the order they are believed: variables of rank, world size, local rank.
LAUNCHERS = (
    (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",)),
    (("SLURM_PROCID",), ("SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",)),
    (("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    (("PMIX_RANK",), (), ()),
    (("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")),
    (("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_RANK",)),
)

#: Variables by which serving engines number workers that are each a group of their own.
REPLICAS = ("SGLANG_DP_RANK", "VLLM_DP_RANK")


def find_rank(
    rank_id: int | None, process_group: RankClaim | None, environ: Mapping[str, str]
) -> RankClaim | None:
    """The rank that counts, or None while nothing tells. An explicit rank leaves the world size
    unknown, since it need not be a rank of the process group."""
    claim = _strongest_claim(rank_id, process_group, environ)
    replica = _first_number(environ, REPLICAS)
    return replace(claim, replica=replica[1]) if claim and replica else claim


def _strongest_claim(
    rank_id: int | None, process_group: RankClaim | None, environ: Mapping[str, str]
) -> RankClaim | None:
    local_rank = _first_number(environ, [name for _, _, names in LAUNCHERS for name in names])
    local = -1 if local_rank is None else local_rank[1]
    if rank_id is not None:
        if isinstance(rank_id, bool) or not isinstance(rank_id, int) or rank_id < 0:
            raise ConfigError(
                f"argument rank_id: {rank_id!r} is not allowed; allowed: a whole number from 0"
            )
        return RankClaim(rank_id, "rank_id", local_rank=local)
    if explicit := _first_number(environ, ["RANKSCOPE_RANK_ID"]):
        return RankClaim(explicit[1], explicit[0], local_rank=local)
    if process_group is not None:
        return replace(process_group, local_rank=local)
    claim = rank_from_environment(environ)
    return None if _is_inherited(claim, environ) else claim


def _is_inherited(claim: RankClaim | None, environ: Mapping[str, str]) -> bool:
    """Whether the launcher meant the process that started this one: helpers inherit variables."""
    _, announced_by, parents = _parent(environ)
    return announced_by not in ("", str(os.getpid())) and parents == _launched_as(claim)


def _launched_as(claim: RankClaim | None) -> str:
    return f"{claim.source}={claim.rank}" if claim else ""


def rank_from_environment(environ: Mapping[str, str]) -> RankClaim | None:
    """The rank a launcher gave. A batch system that started a single task says nothing about the
    processes inside that task, so a launcher with several ranks is believed before it."""
    claims = [claim for names in LAUNCHERS if (claim := _launcher_claim(environ, *names))]
    if claims and claims[0].source != "RANK":
        claims.sort(key=lambda claim: claim.world_size == 1)
    return claims[0] if claims else None


def _launcher_claim(
    environ: Mapping[str, str],
    rank_names: tuple[str, ...],
    world_names: tuple[str, ...],
    local_names: tuple[str, ...],
) -> RankClaim | None:
    rank = _first_number(environ, rank_names)
    if rank is None:
        return None
    world = _first_number(environ, world_names)
    local = _first_number(environ, local_names)
    return RankClaim(
        rank=rank[1],
        source=rank[0],
        world_size=world[1] if world else 0,
        local_rank=local[1] if local else -1,
        group=master_address(environ),
    )


def _first_number(
    environ: Mapping[str, str], names: list[str] | tuple[str, ...]
) -> tuple[str, int] | None:
    """Name and value of the first variable that holds a number; empty ones count as unset."""
    for name in names:
        value = environ.get(name, "").strip()
        if value.isascii() and value.isdigit() and int(value) < 1 << 31:
            return name, int(value)
        if value:
            _warn_once(f"environment variable {name}: {value!r} is ignored; a whole number from 0")
    return None


@cache
def _warn_once(text: str) -> None:
    log("warning", text)


def group_rank() -> RankClaim | None:
    """Rank in torch's default process group; None while there is none."""
    dist = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        return RankClaim(
            dist.get_rank(), "process_group", dist.get_world_size(), group=_store_address(dist)
        )
    except Exception as error:  # a half-made group of somebody else must not stop the script
        _warn_once(f"torch.distributed does not tell the rank: {error}")
        return None


def _store_address(dist: Any) -> str:
    """Where the group's ranks met; attributes only, no traffic."""
    try:
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if hasattr(store, "host"):
            return _address(store.host, str(store.port))
        if hasattr(store, "path"):
            return str(store.path)
    except Exception:  # private to torch: an address is worth having, not worth failing for
        pass
    return master_address(os.environ)


def master_address(environ: Mapping[str, str]) -> str:
    """MASTER_ADDR:MASTER_PORT, with the host's name before a loopback address, or ""."""
    host, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    return _address(host, port) if host and port else ""


def _address(host: str, port: str) -> str:
    if host == "localhost" or host == "::1" or host.startswith("127."):
        return f"{socket.gethostname()}/{host}:{port}"
    return f"{host}:{port}"


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one host, told apart from a later one with the same pid by `started`."""

    pid: int
    parent_pid: int
    host: str
    boot_id: str
    pid_namespace: int
    started: float  # seconds since the Unix epoch


def process_identity() -> ProcessIdentity:
    """Of the calling process; ask again after a fork."""
    return ProcessIdentity(
        pid=os.getpid(),
        parent_pid=os.getppid(),
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        started=_started(),
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"node-{uuid.getnode():012x}"


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _started() -> float:
    try:
        # The command name in field 2 may hold spaces and brackets; the fields behind it do not.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime ")
        )
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return time.time()


def run_key(environ: Mapping[str, str], process: ProcessIdentity) -> str:
    """Equal for the processes of one job, different for jobs that run at the same time."""
    run_id = environ.get("TORCHELASTIC_RUN_ID", "").strip()
    if run_id and run_id != "none":  # what torchrun gives with a static rendezvous
        return f"torchrun:{run_id}"
    if job := environ.get("SLURM_JOB_ID", "").strip():
        return f"slurm:{job}"
    if master := master_address(environ):
        return f"master:{master}"
    return f"parent:{process.host}:{process.boot_id}:{process.parent_pid}"


def attempt(environ: Mapping[str, str]) -> int:
    """How often an elastic launcher has restarted the job; 0 for the first launch."""
    count = _first_number(environ, ["TORCHELASTIC_RESTART_COUNT"])
    return count[1] if count else 0


def parent_value(process_uuid: str, environ: Mapping[str, str]) -> str:
    """What PARENT_VARIABLE tells the agents of processes that this one starts: who it is, and what
    rank its launcher gave it, which is not theirs."""
    return f"{process_uuid}@{os.getpid()}@{_launched_as(rank_from_environment(environ))}"


def parent_process_uuid(environ: Mapping[str, str], pid: int) -> str:
    """Of the agent whose process started this one, or ""; a note of this process is not one."""
    process_uuid, announced_by, _ = _parent(environ)
    return process_uuid if announced_by != str(pid) else ""


def _parent(environ: Mapping[str, str]) -> tuple[str, str, str]:
    words = (environ.get(PARENT_VARIABLE, "") + "@@").split("@")
    return words[0], words[1], words[2]
