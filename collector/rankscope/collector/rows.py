"""Between protobuf messages, table rows and what the state machines know."""

import json
import time
from collections.abc import Mapping
from typing import Any

from rankscope.collector.identity import Member, Process, State
from rankscope.collector.schema import PROCESSES, STEPS
from rankscope.collector.steps import Seal
from rankscope.v1 import collector_pb2 as pb

Row = dict[str, Any]

RECORDING = ("task", "level", "summary_mode", "precision", "extra_info")
EMPTY_PROCESSES_ROW: Row = dict.fromkeys(PROCESSES.names)
EMPTY_STEPS_ROW: Row = dict.fromkeys(STEPS.names)
AXES = ("tp", "pp", "dp", "ep", "cp")
#: Sources of a rank that the user gave by hand: no split of replicas changes it.
PINNED = ("rank_id", "RANKSCOPE_RANK_ID")


def seal_of(row: Mapping[str, Any]) -> Seal:
    return Seal(row["step"], frozenset(json.loads(row["expected"])), json.loads(row["missing"]))


def sealed_row(seal: Seal, events: int) -> Row:
    """The row of `steps` that says a step was sealed with so many events."""
    return EMPTY_STEPS_ROW | {
        "step": seal.step,
        "event": "sealed",
        "events": events,
        "expected": json.dumps(sorted(seal.expected)),
        "missing": json.dumps(dict(seal.missing)),
        "time": time.time(),
    }


def member_of(row: Row, left: Mapping[str, str]) -> Member:
    state = State(row["state"])
    if state is State.LIVE and row["process"] in left:
        state = State.LEFT
    info = Process(
        process=row["process"],
        host=row["host"],
        boot_id=row["boot_id"],
        pid=row["pid"],
        parent_pid=row["parent_pid"] or 0,
        started=row["process_started"] or 0.0,
        attempt=row["attempt"] or 0,
        parent=row["parent_process"] or "",
        run_key=row["run_key"],
        rank=row["claimed_rank"],
        pid_namespace=row["pid_namespace"] or 0,
        pinned=row["rank_source"] in PINNED,
        group=row["group"] or "",
        world_size=row["world_size"] or 0,
        replica=row["replica"],
    )
    return Member(
        info,
        row["instance"],
        row["joined"],
        row["folder"],
        state,
        row["clash"] or "",
        row["rank"],
        row["replica"],
    )


def process_of(hello: pb.Hello) -> Process:
    return Process(
        process=hello.process_uuid,
        host=hello.host,
        boot_id=hello.boot_id,
        pid=hello.pid,
        parent_pid=hello.parent_pid,
        started=hello.process_started,
        attempt=hello.attempt,
        parent=hello.parent_process_uuid,
        run_key=hello.run_key,
        pid_namespace=hello.pid_namespace,
        **(claim_of(hello.rank) if hello.HasField("rank") else {}),
        delivered_later=hello.delivered_later,
    )


def hello_columns(hello: pb.Hello) -> Row:
    return {
        "host": hello.host,
        "boot_id": hello.boot_id,
        "pid": hello.pid,
        "pid_namespace": hello.pid_namespace or None,
        "process_started": hello.process_started,
        "attempt": min(hello.attempt, 2**31 - 1),
        "parent_process": hello.parent_process_uuid or None,
        "parent_pid": hello.parent_pid or None,
        "device": hello.device or None,
        "run_key": hello.run_key,
        "versions": json.dumps(dict(sorted(hello.versions.items()))),
        **recording_columns(hello.recording),
    }


def recording_columns(recording: pb.Recording) -> Row:
    return {
        **{name: getattr(recording, name) for name in RECORDING},
        "config": recording.config_json or None,
    }


def rank_of(rank: pb.Rank) -> int | None:
    """The rank; None for one that cannot be."""
    return rank.rank if rank.rank >= 0 else None


def claim_of(rank: pb.Rank) -> Row:
    """The fields of Process that a rank tells."""
    return {
        "rank": rank_of(rank),
        "pinned": rank.source in PINNED,
        "group": rank.group,
        "world_size": max(rank.world_size, 0),
        "replica": rank.replica if rank.HasField("replica") else None,
    }


def rank_columns(rank: pb.Rank) -> Row:
    coordinates = dict(sorted(rank.coordinates.items()))
    return {
        "rank_source": rank.source or None,
        "claimed_rank": rank_of(rank),
        "world_size": rank.world_size or None,
        "local_rank": rank.local_rank if rank.local_rank >= 0 else None,
        "coordinates": json.dumps(coordinates),
        "group": rank.group or None,
        **{axis: coordinates.get(axis) for axis in AXES},
    }


def hello_of(row: Mapping[str, Any]) -> pb.Hello:
    """As much of a Hello as its row keeps."""
    return pb.Hello(
        process_uuid=row["process"],
        host=row["host"],
        boot_id=row["boot_id"],
        pid=row["pid"],
        pid_namespace=row["pid_namespace"] or 0,
        process_started=row["process_started"],
        attempt=row["attempt"],
        run_key=row["run_key"],
    )
