"""Samples, standard deviations and names of objects: off by default, right where asked for."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import Recorded
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from waiting import no_waiting

from rankscope.agent.statistics import DetailedStatistics, StatisticsColumns, Wanted
from rankscope.agent.statistics.details import _row
from rankscope.agent.statistics.device_figures import DeviceFigures

N = 5


def figures(*tensors: torch.Tensor | None, samples: int = N, std: bool = True) -> StatisticsColumns:
    statistics = DetailedStatistics(Wanted(samples, std))
    for tensor in tensors:
        statistics.add(tensor)
    return statistics.take().reduce()


def expected_samples(values: np.ndarray, samples: int = N) -> list[float]:
    flat = values.reshape(-1).astype(np.float64)
    if len(flat) > samples:
        flat = flat[[i * (len(flat) - 1) // max(samples - 1, 1) for i in range(samples)]]
    return [float(value) for value in flat]


def check(tensor: torch.Tensor, values: np.ndarray) -> None:
    columns = figures(tensor)
    assert columns.std is not None
    assert columns.samples is not None
    assert columns.samples.tolist() == pytest.approx(expected_samples(values), rel=1e-6)
    assert columns.std[0] == pytest.approx(float(values.astype(np.float64).std()), rel=1e-6)
    assert columns.overrides == {}


@pytest.mark.parametrize("size", [1, 2, N - 1, N, N + 1, 1000, 200_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_plain_tensors(dtype: torch.dtype, size: int) -> None:
    tensor = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 50 + 7).to(dtype)
    check(tensor, tensor.double().numpy())


def strided() -> list[torch.Tensor]:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    return [
        base.transpose(0, 2),
        base[:, 1:3, ::2],
        base[1, 2, 3],
        base[:, :1].expand(3, 6, 5),
        torch._neg_view(base),  # type: ignore[attr-defined]
        nn.Parameter(base),
    ]


@pytest.mark.parametrize("tensor", strided())
def test_any_strides(tensor: torch.Tensor) -> None:
    check(tensor, tensor.detach().resolve_neg().numpy())


def dense() -> torch.Tensor:
    values = torch.zeros(6, 4)
    values[1, 2], values[4, 0], values[5, 3] = 3.0, -2.0, 7.0
    return values


def hybrid() -> torch.Tensor:
    stored = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]])
    return torch.sparse_coo_tensor([[0, 3, 3]], stored, (5, 2))


def waves() -> torch.Tensor:
    return torch.polar(torch.arange(1.0, 8.0), torch.ones(7))


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.linspace(-1, 1, 9), 0.1, 3, torch.qint8)


PARTS = [torch.arange(3.0), torch.arange(10.0, 14.0)]

#: A tensor, and its values as numpy has them.
SPECIAL: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], Any]]] = {
    "coo": (lambda: dense().to_sparse(), dense),
    "csr": (lambda: dense().to_sparse_csr(), dense),
    "csc": (lambda: dense().to_sparse_csc(), dense),
    "bsr": (lambda: dense().to_sparse_bsr((2, 2)), dense),
    "hybrid": (hybrid, lambda: hybrid().to_dense()),
    "no entries": (lambda: torch.sparse_coo_tensor(size=(3, 3)), lambda: torch.zeros(3, 3)),
    "complex": (waves, lambda: waves().abs()),
    "conjugate": (lambda: waves().conj(), lambda: waves().abs()),
    "half complex": (
        lambda: waves().to(torch.complex32),
        lambda: waves().to(torch.complex32).cfloat().abs(),
    ),
    "float8": (lambda: torch.arange(9.0).to(torch.float8_e4m3fn), lambda: torch.arange(9.0)),
    "quantised": (quantised, lambda: quantised().dequantize()),
    "nested": (lambda: torch.nested.nested_tensor(PARTS), lambda: torch.cat(PARTS)),
    "mkldnn": (lambda: dense().to_mkldnn(), dense),
    "bool": (lambda: dense() != 0, lambda: dense() != 0),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of its rarer types
@pytest.mark.parametrize("name", SPECIAL)
def test_special_tensors(name: str) -> None:
    tensor, values = SPECIAL[name]
    check(tensor(), values().numpy())


@pytest.mark.parametrize(
    ("values", "std"),
    [
        ([1e300, -1e300], 1e300),
        ([1e-200, 3e-200], 1e-200),
        ([5e-324, 5e-324], 0.0),
        ([1e8 + 1, 1e8 - 1], 1.0),  # the mean is far larger
        ([1.0, math.nan], math.nan),
        ([1.0, math.inf], math.nan),
        ([0.0, 0.0], 0.0),
    ],
)
def test_hard_values(values: list[float], std: float) -> None:
    columns = figures(torch.tensor(values, dtype=torch.float64))
    assert columns.std is not None
    assert columns.samples is not None
    assert columns.std[0] == pytest.approx(std, nan_ok=True)
    np.testing.assert_equal(columns.samples, values)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    st.integers(1, 40),
)
def test_any_values(values: list[float], samples: int) -> None:
    columns = figures(torch.tensor(values), samples=samples)
    wide = np.array(values, np.float32).astype(np.float64)
    assert columns.std is not None
    assert columns.samples is not None
    assert columns.samples.tolist() == expected_samples(wide, samples)
    assert columns.std[0] == pytest.approx(float(wide.std()), rel=1e-9, abs=1e-12 * abs(wide).max())


def test_what_has_no_values_has_none_of_these() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    columns = figures(torch.ones(3, device="meta"), torch.ones(0, 3), fake, freed, None)
    assert columns.sample_count is not None
    assert columns.sample_count.tolist() == [0] * 5


def test_order_over_many_entries() -> None:
    columns = figures(*(torch.full((i % 7 + 1,), float(i)) for i in range(3000)))
    assert columns.sample_count is not None
    assert columns.samples is not None
    assert columns.sample_count.tolist() == [min(i % 7 + 1, N) for i in range(3000)]
    assert columns.samples.tolist() == [
        float(i) for i in range(3000) for _ in range(min(i % 7 + 1, N))
    ]


def test_the_device_path_gives_the_same_and_waits_for_nothing() -> None:
    tensors = [torch.randn(n % 11 + 1, 3, dtype=torch.float32).half() for n in range(1100)]
    tensors[5] = torch.randn(7, 5).t()
    tensors[6] = torch.arange(4)
    direct = figures(*tensors)
    device = DeviceFigures(torch.device("cpu"), N, True)
    with no_waiting() as waits:
        for entry, tensor in enumerate(tensors):
            device.add(entry, tensor)
    assert waits == []
    rows: Any = np.zeros(len(tensors), _row(Wanted(N, True)))
    device.reduce([], rows, {}, "")
    assert direct.samples is not None
    assert direct.sample_count is not None
    np.testing.assert_array_equal(rows["sample_count"], direct.sample_count)
    taken = np.arange(N) < direct.sample_count[:, None]
    np.testing.assert_allclose(rows["samples"][taken], direct.samples, rtol=1e-6)
    np.testing.assert_allclose(rows["std"], direct.std, rtol=1e-6, atol=1e-7)


# ----------------------------------------------------------------------------------- in a recording


def recorded(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Recorded:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    recording = Recorded(monkeypatch, model=net, rankscope=settings)
    for _ in range(2):
        with recording:
            net(torch.randn(3, 4)).sum().backward()
        recording.step()
    recording.end()
    return recording


def test_nothing_of_it_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorded(monkeypatch)
    columns = recording.transport.batches[0].columns
    assert not columns.std + columns.samples + columns.sample_count + columns.event_object
    entry = recording.data()["Module.0.Linear.forward.0"]["input_args"][0]
    assert not {"std", "samples"} & set(entry)


def test_dump_json_shows_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorded(monkeypatch, samples=3)
    entry = recording.data()["Module.0.Linear.forward.0"]["input_args"][0]
    assert list(entry)[-1] == "samples"
    assert len(entry["samples"]) == 3
    assert "std" not in entry
    recording = recorded(monkeypatch, std=True)
    entry = recording.data()["Module.0.Linear.forward.0"]["input_args"][0]
    mean_square = (entry["Norm"] ** 2 / 12) - entry["Mean"] ** 2
    assert entry["std"] == pytest.approx(math.sqrt(mean_square), rel=1e-5)
    assert "samples" not in entry


def test_objects_have_names_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorded(monkeypatch, object_names=True)
    nodes, records, *_ = recording._tables
    seen = {
        (row["step"], row["record"], row["object"], row["object_call"])
        for table in (nodes, records)
        for row in table.to_pylist()
        if row["object"]
    }
    names = {"0.Linear": "Linear-1", "1.ReLU": "ReLU-1", "2.Linear": "Linear-2"}
    assert seen == {
        (step, f"Module.{module}.{direction}.0", name, step + 1)
        for step in (0, 1)
        for module, name in names.items()
        for direction in ("forward", "backward")
    }


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.fc(self.fc(x)))


def test_calls_of_an_object_are_counted_across_steps_and_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Shared()
    recording = Recorded(monkeypatch, model=net, rankscope={"object_names": True})
    for _ in range(2):
        with recording:
            net(torch.ones(1, 3)).sum().backward()
        recording.step()
    recording.end()
    rows = recording._tables[0].to_pylist()
    seen = {r["record"].split(".", 3)[3]: r["object_call"] for r in rows if r["step"] == 1}
    seen = {name: call for name, call in seen.items() if call}
    assert seen == {"forward.0": 3, "forward.1": 4, "backward.1": 3, "backward.0": 4}
