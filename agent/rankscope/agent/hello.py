"""The first message of a stream: who the process is and what it records."""

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping

from rankscope.agent.config import Config
from rankscope.agent.identity import (
    RankClaim,
    attempt,
    parent_process_uuid,
    process_identity,
    run_key,
)
from rankscope.v1 import collector_pb2 as pb

PROTOCOL_VERSION = 1


def hello(
    config: Config,
    process_uuid: str,
    *,
    rank: pb.Rank | None = None,
    device: str = "",
    spool_path: str | os.PathLike[str] = "",
    environ: Mapping[str, str] = os.environ,
) -> pb.Hello:
    """`process_uuid` is 32 hex digits; `spool_path` the folder of this process's spool."""
    process = process_identity()
    return pb.Hello(
        protocol_version=PROTOCOL_VERSION,
        agent_version=importlib.metadata.version("rankscope"),
        process_uuid=process_uuid,
        run=config.run or "",
        run_key=run_key(environ, process),
        host=process.host,
        boot_id=process.boot_id,
        pid_namespace=process.pid_namespace,
        pid=process.pid,
        process_started=process.started,
        attempt=attempt(environ),
        parent_process_uuid=parent_process_uuid(environ, process.pid),
        parent_pid=process.parent_pid,
        rank=rank,
        device=device,
        recording=recording(config),
        versions=versions(),
        dump_path=str(config.dump_path),
        spool_path=os.fspath(spool_path),
    )


def rank_message(claim: RankClaim, coordinates: Mapping[str, int]) -> pb.Rank:
    return pb.Rank(
        rank=claim.rank,
        world_size=claim.world_size,
        local_rank=claim.local_rank,
        source=claim.source,
        coordinates=coordinates,
        group=claim.group,
        replica=claim.replica,
    )


def recording(config: Config) -> pb.Recording:
    """What the header of dump.json says, and the configuration behind it."""
    return pb.Recording(
        task=config.task,
        level=config.level,
        summary_mode=config.summary_mode,
        precision=config.precision,
        extra_info=config.extra_info,
        config_json=json.dumps(config.raw),
    )


def versions() -> dict[str, str]:
    """Of what decides how values are made and sent; torch only when it is loaded."""
    found = {"python": platform.python_version()}
    for name in ("grpcio", "protobuf", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # vendored without it
            found[name] = importlib.metadata.version(name)
    for name in ("torch", "torch_npu"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", ""))
    return found
