"""Who a process is and which rank it holds."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from rankscope.agent import identity
from rankscope.agent.config import Config
from rankscope.agent.coordinates import coordinates
from rankscope.agent.errors import ConfigError
from rankscope.agent.hello import hello, rank_message
from rankscope.agent.identity import RankClaim, find_rank, rank_from_environment

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "5",
}

#: (environment, rank, source, world size, local rank)
LAUNCHES = [
    (TORCHRUN, 3, "RANK", 8, 1),
    (SRUN, 2, "SLURM_PROCID", 4, 0),
    (MPIRUN, 5, "OMPI_COMM_WORLD_RANK", 6, 5),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1, "PMI_RANK", 2, -1),
    ({"PMIX_RANK": "7"}, 7, "PMIX_RANK", 0, -1),
    ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, 1, "MV2_COMM_WORLD_RANK", 2, -1),
    ({"RANK": "0"}, 0, "RANK", 0, -1),
    ({"RANK": " 4 "}, 4, "RANK", 0, -1),
    (SRUN | TORCHRUN, 3, "RANK", 8, 1),
    (SRUN | {"RANK": ""}, 2, "SLURM_PROCID", 4, 0),
    (SRUN | {"RANK": "x"}, 2, "SLURM_PROCID", 4, 0),
    (TORCHRUN | {"WORLD_SIZE": "many"}, 3, "RANK", 0, 1),
    # One batch task inside which mpirun started six; and torchrun with one process per task.
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"} | MPIRUN, 5, "OMPI_COMM_WORLD_RANK", 6, 5),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 0, "SLURM_PROCID", 1, -1),
    (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, 0, "RANK", 1, -1),
]


@pytest.mark.parametrize(("environ", "rank", "source", "world_size", "local_rank"), LAUNCHES)
def test_rank_from_launcher(
    environ: dict[str, str], rank: int, source: str, world_size: int, local_rank: int
) -> None:
    assert rank_from_environment(environ) == RankClaim(rank, source, world_size, local_rank)


@pytest.mark.parametrize(
    "environ",
    [{}, {"RANK": ""}, {"RANK": "-1"}, {"RANK": "1.0"}, {"RANK": "٣"}, {"RANK": "9" * 12}],
)
def test_no_rank_from_launcher(environ: dict[str, str]) -> None:
    assert rank_from_environment(environ) is None


def test_bad_variable_is_ignored_aloud_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, str]] = []
    monkeypatch.setattr(identity, "log", lambda level, text: lines.append((level, text)))
    identity._warn_once.cache_clear()
    for _ in range(2):
        rank_from_environment({"RANK": "seven"})
    text = "environment variable RANK: 'seven' is ignored; a whole number from 0"
    assert lines == [("warning", text)]


GROUP = RankClaim(1, "process_group", 2, group="node7:29500")

#: (rank_id, process group, environment, rank, source), strongest first
ORDER = [
    (9, GROUP, TORCHRUN | {"RANKSCOPE_RANK_ID": "6"}, 9, "rank_id"),
    (0, GROUP, TORCHRUN, 0, "rank_id"),
    (None, GROUP, TORCHRUN | {"RANKSCOPE_RANK_ID": "6"}, 6, "RANKSCOPE_RANK_ID"),
    (None, GROUP, TORCHRUN | {"RANKSCOPE_RANK_ID": ""}, 1, "process_group"),
    (None, GROUP, TORCHRUN | {"RANKSCOPE_RANK_ID": "-6"}, 1, "process_group"),
    (None, GROUP, {}, 1, "process_group"),
    (None, None, TORCHRUN, 3, "RANK"),
    (None, None, SRUN, 2, "SLURM_PROCID"),
]


@pytest.mark.parametrize(("rank_id", "group", "environ", "rank", "source"), ORDER)
def test_order_of_sources(
    rank_id: int | None, group: RankClaim | None, environ: dict[str, str], rank: int, source: str
) -> None:
    claim = find_rank(rank_id, group, environ)
    assert claim is not None
    assert (claim.rank, claim.source) == (rank, source)


def parent(environ: dict[str, str], pid: int) -> str:
    """What an agent of process `pid`, launched with `environ`, leaves to those it starts."""
    launched = rank_from_environment(environ)
    return f"{'ab' * 16}@{pid}@{launched.source}={launched.rank}" if launched else f"a@{pid}@"


#: (own environment, environment of the parent, rank): what is inherited is the parent's.
HELPERS = [
    (TORCHRUN, TORCHRUN, None),
    (SRUN, SRUN, None),
    (SRUN | TORCHRUN, SRUN, 3),
    (TORCHRUN | {"RANK": "4"}, TORCHRUN, 4),
    (TORCHRUN, {}, 3),
    ({}, {}, None),
    (TORCHRUN | {"RANKSCOPE_RANK_ID": "9"}, TORCHRUN, 9),
]


@pytest.mark.parametrize(("own", "parents", "rank"), HELPERS)
def test_helpers_do_not_take_the_rank_of_their_parent(
    own: dict[str, str], parents: dict[str, str], rank: int | None
) -> None:
    note = {identity.PARENT_VARIABLE: parent(parents, os.getpid() + 1)}
    claim = find_rank(None, None, own | note)
    assert (claim and claim.rank) == rank
    group = find_rank(None, GROUP, own | note)
    assert group is not None
    assert group.rank == (1 if "RANKSCOPE_RANK_ID" not in own else 9)


def test_a_note_of_this_process_takes_nothing_away() -> None:
    note = {identity.PARENT_VARIABLE: identity.parent_value("ab" * 16, TORCHRUN)}
    claim = find_rank(None, None, TORCHRUN | note)
    assert claim is not None
    assert claim.rank == 3
    assert note[identity.PARENT_VARIABLE] == parent(TORCHRUN, os.getpid())


#: (environment, number of the replica)
REPLICAS = [
    ({}, None),
    ({"SGLANG_DP_RANK": "2"}, 2),
    ({"VLLM_DP_RANK": "0"}, 0),
    ({"SGLANG_DP_RANK": ""}, None),
]


@pytest.mark.parametrize(("environ", "replica"), REPLICAS)
def test_number_of_a_replica(environ: dict[str, str], replica: int | None) -> None:
    claim = find_rank(None, GROUP, environ)
    assert claim is not None
    assert (claim.rank, claim.replica) == (1, replica)
    message = rank_message(claim, {})
    assert message.HasField("replica") == (replica is not None)
    assert find_rank(None, None, environ) is None


def test_nothing_tells_the_rank() -> None:
    assert find_rank(None, None, {}) is None


def test_process_group_gets_its_local_rank_from_the_launcher() -> None:
    claim = find_rank(None, GROUP, TORCHRUN)
    assert claim == RankClaim(1, "process_group", 2, 1, "node7:29500")


@pytest.mark.parametrize("rank_id", [-1, True, "0", 1.0])
def test_bad_rank_id_is_named(rank_id: int) -> None:
    with pytest.raises(ConfigError, match=f"rank_id: {rank_id!r} is not allowed"):
        find_rank(rank_id, None, {})


PROCESS = identity.ProcessIdentity(17, 4, "node7", "boot", 0, 0.0)

#: (environment, key), strongest first
KEYS = [
    ({"TORCHELASTIC_RUN_ID": "exp1", "SLURM_JOB_ID": "5"}, "torchrun:exp1"),
    ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "5"}, "slurm:5"),
    ({"SLURM_JOB_ID": "5", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "slurm:5"),
    ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "master:a:1"),
    ({"MASTER_ADDR": "a"}, "parent:node7:boot:4"),
    ({}, "parent:node7:boot:4"),
]


@pytest.mark.parametrize(("environ", "key"), KEYS)
def test_run_key(environ: dict[str, str], key: str) -> None:
    assert identity.run_key(environ, PROCESS) == key


@pytest.mark.parametrize("loopback", ["127.0.0.1", "localhost", "::1"])
def test_loopback_address_names_its_host(loopback: str) -> None:
    """Two hosts with a job each on 127.0.0.1:29500 are two jobs."""
    environ = {"MASTER_ADDR": loopback, "MASTER_PORT": "29500"}
    host = identity.process_identity().host
    assert identity.master_address(environ) == f"{host}/{loopback}:29500"


def test_process_identity_holds_for_a_child_and_starts_are_told_apart() -> None:
    code = "from rankscope.agent.identity import *; print(process_identity())"
    before = time.time()
    here = identity.process_identity()
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    child = eval(printed.stdout, {"ProcessIdentity": identity.ProcessIdentity})
    assert here == identity.process_identity()
    assert here.pid == os.getpid()
    assert child.parent_pid == here.pid
    assert (child.host, child.boot_id) == (here.host, here.boot_id)
    assert here.started < before - 0.01 <= child.started + 2
    assert child.started <= time.time() + 2


def test_attempt() -> None:
    assert identity.attempt({}) == 0
    assert identity.attempt({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2


def test_child_is_tied_to_its_parent() -> None:
    environ = {identity.PARENT_VARIABLE: identity.parent_value("ab" * 16, {})}
    assert identity.parent_process_uuid(environ, os.getpid()) == ""
    assert identity.parent_process_uuid(environ, os.getpid() + 1) == "ab" * 16
    assert identity.parent_process_uuid({}, 1) == ""


GROUP_SCRIPT = """
import os, sys
from rankscope.agent.identity import group_rank
assert group_rank() is None
import torch.distributed as dist
assert group_rank() is None
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
claim = group_rank()
print(claim.rank, claim.source, claim.world_size, claim.group)
from rankscope.agent.coordinates import coordinates
assert coordinates() == {}
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
print(coordinates())
dist.destroy_process_group()
assert group_rank() is None
"""


def test_rank_and_coordinates_of_a_real_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GROUP_SCRIPT, f"file://{tmp_path}/store"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        f"0 process_group 1 {tmp_path}/store",
        "{'dp': 0, 'tp': 0}",
    ]


def test_coordinates_of_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is loaded is asked; what a framework has not set up is left out."""
    megatron = ModuleType("megatron.core.parallel_state")
    megatron.get_tensor_model_parallel_rank = lambda: 3  # type: ignore[attr-defined]
    megatron.get_pipeline_model_parallel_rank = lambda: 1 // 0  # type: ignore[attr-defined]

    class Group:
        rank_in_group = 2

    vllm = ModuleType("vllm.distributed.parallel_state")
    vllm.get_dp_group = Group  # type: ignore[attr-defined]
    for module in (megatron, vllm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert coordinates() == {"tp": 3, "dp": 2}


#: What a framework's module has, and the coordinates read from it.
FRAMEWORKS = [
    (
        "megatron.core.parallel_state",
        {
            "get_tensor_model_parallel_rank": 1,
            "get_pipeline_model_parallel_rank": 2,
            "get_data_parallel_rank": 3,
            "get_context_parallel_rank": 4,
            "get_expert_model_parallel_rank": 5,
        },
        {"tp": 1, "pp": 2, "dp": 3, "cp": 4, "ep": 5},
    ),
    (
        "sglang.srt.distributed.parallel_state",
        {"get_tp_group": 1, "get_pp_group": 0, "get_moe_ep_group": 3},
        {"tp": 1, "pp": 0, "ep": 3},
    ),
    ("sglang.srt.layers.dp_attention", {"get_attention_dp_rank": 1}, {"dp": 1}),
    (
        "vllm.distributed.parallel_state",
        {"get_tp_group": 1, "get_pp_group": 0, "get_dp_group": 2, "get_ep_group": 3},
        {"tp": 1, "pp": 0, "dp": 2, "ep": 3},
    ),
]


@pytest.mark.parametrize(("name", "functions", "expected"), FRAMEWORKS)
def test_coordinates_of_each_framework(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    functions: dict[str, int],
    expected: dict[str, int],
) -> None:
    module = ModuleType(name)
    for function, number in functions.items():
        # Megatron answers with a rank, the others with a group that has one.
        group = type("Group", (), {"rank_in_group": number})()
        answer = number if function.endswith("_rank") else group
        setattr(module, function, lambda answer=answer: answer)
    monkeypatch.setitem(sys.modules, name, module)
    assert coordinates(meshes=False) == expected


def test_hello_says_who_and_what() -> None:
    config = Config.load(task="structure", dump_path="/data/x", environ={"RANKSCOPE_RUN": "night"})
    rank = rank_message(RankClaim(3, "RANK", 8, 1, "a:1"), {"tp": 1})
    message = hello(config, "ab" * 16, rank=rank, device="cpu", spool_path="/s", environ=TORCHRUN)
    assert (message.protocol_version, message.pid, message.run) == (1, os.getpid(), "night")
    assert (message.process_uuid, message.dump_path) == ("ab" * 16, "/data/x")
    assert (message.rank.rank, message.rank.local_rank, message.rank.coordinates["tp"]) == (3, 1, 1)
    assert (message.recording.task, message.recording.level) == ("structure", "mix")
    assert '"risk_level": "FOCUS"' in message.recording.config_json
    assert {"python", "grpcio", "protobuf", "numpy"} <= set(message.versions)
