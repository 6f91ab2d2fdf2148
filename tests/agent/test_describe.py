"""What a tensor is said to be, and where its values are looked for."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

from rankscope.agent.statistics import Description, TensorStatistics, describe


class Marked(torch.Tensor):
    """A user's subclass that takes part in every call."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{func} was called")


class Hostile(torch.Tensor):
    """A user's subclass whose operators fail."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{func} was called")


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def values(description: Description) -> list[float]:
    """Max, min and sum of a description's data as the statistics see it."""
    statistics = TensorStatistics()
    statistics.add(description.data)
    columns = statistics.take().reduce()
    assert not columns.overrides
    return [columns.max[0], columns.min[0], columns.sum[0]]


def test_plain_tensor_and_parameter() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    found = describe(tensor)
    assert (found.type, found.dtype, found.shape) == ("torch.Tensor", "torch.float32", (2, 3))
    assert found.data is tensor
    assert not found.requires_grad
    parameter = describe(torch.nn.Parameter(tensor))
    assert (parameter.type, parameter.requires_grad) == ("torch.Tensor", True)
    assert values(parameter) == [5, 0, 15]


@pytest.mark.parametrize("kind", [Marked, Hostile])
def test_users_subclass_is_a_tensor(kind: type[torch.Tensor]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        tensor = torch.arange(4.0, requires_grad=True).as_subclass(kind)
    found = describe(tensor)
    assert (found.type, found.shape, found.requires_grad) == ("torch.Tensor", (4,), True)
    assert type(found.data) is torch.Tensor
    assert values(found) == [3, 0, 6]


def test_subclass_in_parts_has_no_values() -> None:
    found = describe(TwoTensor(torch.ones(3), torch.zeros(3)))
    assert (found.type, found.shape, found.data) == ("torch.Tensor", (3,), None)
    assert found.note == "TwoTensor keeps its values in parts"


def test_meta_and_uninitialized() -> None:
    meta = describe(torch.ones(2, 2, device="meta"))
    assert (meta.type, meta.shape, meta.note) == ("torch.Tensor", (2, 2), "meta tensor")
    assert meta.data is None
    lazy = describe(torch.nn.LazyLinear(3).weight)
    assert (lazy.shape, lazy.data, lazy.note) == ((), None, "uninitialized parameter")


def test_fake_tensor_with_symbolic_shape() -> None:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    fake = mode.from_tensor(torch.ones(7, 3))
    guards = len(environment.guards)
    found = describe(fake)
    assert found.type == "torch._subclasses.fake_tensor.FakeTensor"
    assert found.shape == (7, 3)
    assert (found.data, found.note) == (None, "fake tensor")
    assert len(environment.guards) == guards


def test_functional_tensor_has_no_values() -> None:
    found = describe(torch._to_functional_tensor(torch.ones(3)))
    assert (found.data, found.note) == (None, "functional tensor, being traced")


def test_jagged_nested_tensor_shows_its_values() -> None:
    nested = torch.nested.nested_tensor(
        [torch.ones(2, 4), torch.full((3, 4), 2.0)], layout=torch.jagged
    )
    found = describe(nested)
    assert found.type == "torch.nested._internal.nested_tensor.NestedTensor"
    assert found.shape == (5, 4)
    assert values(found) == [2, 1, 32]


def test_strided_nested_tensor() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.full((3,), 2.0)])
    found = describe(nested)
    assert (found.type, found.shape) == ("torch.Tensor", (5,))
    assert values(found) == [2, 1, 8]


def test_inside_transforms() -> None:
    seen: list[Description] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(describe(x))
        return (x * x).sum()

    torch.func.vmap(look)(torch.ones(3, 2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(torch.func.grad(look))(torch.ones(3, 2))
    torch.func.functionalize(look)(torch.ones(2))
    batched, tracked, both, functional = seen
    assert (batched.type, batched.shape, values(batched)) == ("BatchedTensor", (3, 2), [1, 1, 6])
    assert (tracked.type, tracked.shape) == ("GradTrackingTensor", (2,))
    assert (both.type, both.shape, values(both)) == ("GradTrackingTensor", (3, 2), [1, 1, 6])
    assert functional.note == "functional tensor, being traced" or functional.data is not None


def test_distributed_tensor(process_group: None) -> None:
    from torch.distributed.tensor import (
        Partial,
        Replicate,
        Shard,
        distribute_tensor,
        init_device_mesh,
    )

    mesh = init_device_mesh("cpu", (1, 1, 1))
    tensor = distribute_tensor(
        torch.arange(6.0).reshape(2, 3), mesh, [Shard(0), Replicate(), Replicate()]
    )
    found = describe(tensor.requires_grad_())
    assert found.type == "torch.distributed.tensor.DTensor"
    assert (found.shape, found.requires_grad) == ((2, 3), True)
    assert values(found) == [5, 0, 15]
    assert json.loads(found.extra_json) == {
        "device_mesh": [[[0]]],
        "placements": [{"Shard": {"dim": 0}}, {"Replicate": {}}, {"Replicate": {}}],
    }
    partial = type(tensor).from_local(torch.ones(2), mesh, [Partial(), Replicate(), Replicate()])
    placements = json.loads(describe(partial).extra_json)["placements"]
    assert placements[0] == {"Partial": {"reduce_op": "sum"}}
    norm = describe(torch.linalg.vector_norm(tensor.detach()))
    assert json.loads(norm.extra_json)["placements"][0] == {"Partial": {"reduce_op": "sum"}}


def test_collective_under_way(process_group: None) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = torch.ones(3)
    waiting = AsyncCollectiveTensor(local)
    found = describe(waiting)
    assert found.type == "torch.distributed._functional_collectives.AsyncCollectiveTensor"
    assert (found.shape, found.dtype, found.data) == ((3,), "torch.float32", None)
    assert found.note == "collective has not been waited for"
    assert not waiting.completed
    waiting.trigger_wait()
    assert values(describe(waiting)) == [1, 1, 3]


def test_what_cannot_be_described_says_so() -> None:
    found = describe(object())  # type: ignore[arg-type]
    assert found.data is None
    assert found.note.startswith("cannot be described: ")


# --------------------------------------------------------------------------- anything at all

DTYPES = [
    value
    for name, value in sorted(vars(torch).items())
    if isinstance(value, torch.dtype) and not name.startswith(("q", "bits"))
]


def made(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Memory of any dtype, also those torch cannot fill."""
    count = 1
    for size in shape:
        count *= size
    raw = torch.arange(max(count, 1) * max(dtype.itemsize, 1), dtype=torch.uint8)
    return raw.view(dtype)[:count].reshape(shape)


LAYOUTS: dict[str, Any] = {
    "as is": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1) if t.dim() else t,
    "every second": lambda t: t[..., ::2] if t.dim() else t,
    "expanded": lambda t: t.expand(3, *t.shape),
    "conjugated": lambda t: t.conj(),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "subclass": lambda t: t.as_subclass(Hostile),
}


@settings(suppress_health_check=[HealthCheck.differing_executors], deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=3),
    layout=st.sampled_from(sorted(LAYOUTS)),
    checksum=st.sampled_from(["", "md5", "xor"]),
)
def test_any_tensor_gives_a_valid_entry(
    dtype: torch.dtype, shape: list[int], layout: str, checksum: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tensor = LAYOUTS[layout](made(dtype, shape))
        except (RuntimeError, NotImplementedError, IndexError):
            return  # torch has no such tensor
    found = describe(tensor)
    assert found.dtype == str(dtype)
    statistics = TensorStatistics(checksum)
    statistics.add(found.data, note=found.note)
    columns = statistics.take().reduce()
    note = columns.overrides.get(0, {}).get("note", "")
    assert "failed" not in str(note)
    assert columns.flags[0] or note
    json.dumps(columns.overrides, allow_nan=False)
