"""Where a process stands in the parallel layout of its job: {"tp": 1, "pp": 0, "dp": 3}.

Read from what the script has already loaded and set up: nothing is imported, no collective runs.
Call it while nothing is recorded, since a device mesh may use torch operations to answer.
"""

import gc
import logging
import sys
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("rankscope.agent")

#: Module, then for each coordinate the function that tells it: a rank, or a group with one.
PARALLEL_STATES = (
    (
        "megatron.core.parallel_state",
        {
            "tp": "get_tensor_model_parallel_rank",
            "pp": "get_pipeline_model_parallel_rank",
            "dp": "get_data_parallel_rank",
            "cp": "get_context_parallel_rank",
            "ep": "get_expert_model_parallel_rank",
        },
    ),
    (
        "sglang.srt.distributed.parallel_state",
        {
            "tp": "get_tp_group",
            "pp": "get_pp_group",
            "ep": "get_moe_ep_group",
        },
    ),
    (
        "sglang.srt.layers.dp_attention",
        {
            "dp": "get_attention_dp_rank",
            "cp": "get_attention_cp_rank",
        },
    ),
    (
        "vllm.distributed.parallel_state",
        {
            "tp": "get_tp_group",
            "pp": "get_pp_group",
            "dp": "get_dp_group",
            "ep": "get_ep_group",
            "cp": "get_dcp_group",
        },
    ),
)


def coordinates(*, meshes: bool = True) -> dict[str, int]:
    """What can be told now; empty when nothing is set up. A framework wins over a device mesh.

    Looking for `meshes` costs a pass over all objects of the process.
    """
    found: dict[str, int] = {}
    for name, value in (*(_from_meshes() if meshes else ()), *_from_frameworks()):
        found[name] = value
    return found


def _from_frameworks() -> Iterator[tuple[str, int]]:
    for module_name, functions in PARALLEL_STATES:
        module = sys.modules.get(module_name)
        if module is None:
            continue
        for name, function in functions.items():
            value = _ask(module, function)
            if value is not None:
                yield name, value


def _ask(module: Any, function: str) -> int | None:
    """None when the framework has no such group, or has not set it up yet (it raises then)."""
    try:
        answer = getattr(module, function)()
        value = getattr(answer, "rank_in_group", answer)
    except Exception:
        return None
    return value if isinstance(value, int) and value >= 0 else None


def _from_meshes() -> Iterator[tuple[str, int]]:
    """Of every named device mesh that is alive; the one with the most dimensions comes last."""
    mesh_module = sys.modules.get("torch.distributed.device_mesh")
    mesh_class = getattr(mesh_module, "DeviceMesh", None)
    if mesh_class is None:
        return
    # torch keeps no list of meshes; an instance refers to its class, which is found in one pass.
    meshes = [item for item in gc.get_referrers(mesh_class) if type(item) is mesh_class]
    for mesh in sorted(meshes, key=lambda mesh: len(mesh.mesh_dim_names or ())):
        yield from _of_mesh(mesh)


def _of_mesh(mesh: Any) -> Iterator[tuple[str, int]]:
    try:
        here = mesh.get_coordinate()
    except Exception as error:
        log.debug("a device mesh does not tell its coordinate: %s", error)
        return
    if here is not None and mesh.mesh_dim_names:
        yield from zip(mesh.mesh_dim_names, map(int, here), strict=True)
