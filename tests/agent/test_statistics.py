"""Statistics of tensors: every way of computing them against plain float64 arithmetic."""

import json
import math
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from waiting import no_waiting

from rankscope.agent.statistics import StatisticsColumns, TensorStatistics
from rankscope.agent.statistics import device as device_module
from rankscope.agent.statistics import kernel as kernel_module
from rankscope.agent.statistics.device import DeviceResults
from rankscope.v1.collector_pb2 import HAS_CHECKSUM, HAS_COUNTS, HAS_RANGE, HAS_SUMS

MEASURED = HAS_RANGE | HAS_SUMS | HAS_COUNTS
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
WAYS = ["kernel", "numpy"]
SIZES = [1, 2, 7, 63, 511, 512, 513, 1025, 8192, 8193, 16384, 40_000, 140_001]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "kernel" and kernel_module.load_kernel() is None:
        pytest.skip(kernel_module.kernel_status())
    return str(request.param)


def measure(
    *tensors: torch.Tensor | None, way: str = "kernel", **options: str
) -> StatisticsColumns:
    statistics = TensorStatistics(use_kernel=way == "kernel", **options)  # type: ignore[arg-type]
    for tensor in tensors:
        statistics.add(tensor)
    return statistics.take().reduce()


def values_of(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype.is_floating_point:
        return tensor.double().numpy().reshape(-1)
    return tensor.numpy().reshape(-1)


def check_against_truth(columns: StatisticsColumns, entry: int, tensor: torch.Tensor) -> None:
    values = values_of(tensor)
    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        squares, total = math.fsum(np.square(wide)), math.fsum(wide)
    assert columns.flags[entry] == MEASURED
    assert columns.max[entry] == float(values.max())
    assert columns.min[entry] == float(values.min())
    assert columns.sum[entry] == pytest.approx(total, abs=1e-6 * np.abs(wide).sum())
    assert math.sqrt(columns.sum_of_squares[entry]) == pytest.approx(math.sqrt(squares), rel=2e-7)
    assert columns.zero_count[entry] == int((values == 0).sum())
    assert columns.nan_count[entry] == columns.inf_count[entry] == 0


def sample(dtype: torch.dtype, size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    if dtype.is_floating_point:
        values = torch.randn(size, generator=generator, dtype=torch.float64) * 3
        values[torch.rand(size, generator=generator) < 0.1] = 0
        return values.to(dtype)
    bounds = torch.iinfo(dtype)
    low, high = max(bounds.min, -(2**40)), min(bounds.max, 2**40)
    return torch.randint(low, high, (size,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_every_dtype_and_size(dtype: torch.dtype, way: str) -> None:
    tensors = [sample(dtype, size) for size in SIZES]
    columns = measure(*tensors, way=way)
    for entry, tensor in enumerate(tensors):
        check_against_truth(columns, entry, tensor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 40, 600, 9000, 70_000])
def test_nan_and_inf(dtype: torch.dtype, size: int, way: str) -> None:
    nan, inf, both = (sample(dtype, size, seed) for seed in range(3))
    nan[size // 2] = math.nan
    inf[-1] = -math.inf
    both[0], both[-1] = math.nan, math.inf
    columns = measure(nan, inf, both, way=way)
    assert math.isnan(columns.max[0])
    assert math.isnan(columns.min[0])
    assert math.isnan(columns.sum[0])
    assert (columns.nan_count[0], columns.inf_count[0]) == (1, 0)
    assert columns.min[1] == columns.sum[1] == -math.inf
    assert columns.max[1] == values_of(inf).max()
    assert columns.sum_of_squares[1] == math.inf
    assert (columns.nan_count[1], columns.inf_count[1]) == (0, 1)
    assert (columns.nan_count[2], columns.inf_count[2]) == ((1, 1) if size > 1 else (0, 1))
    assert list(columns.zero_count) == [int((values_of(t) == 0).sum()) for t in (nan, inf, both)]


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-17, 1e-10, 1e12, 1e15, 1e18, 1e37])
@pytest.mark.parametrize("size", [3, 5000, 70_000])
def test_magnitudes_of_float32(scale: float, size: int, way: str) -> None:
    tensor = (sample(torch.float64, size) * scale).float()
    check_against_truth(measure(tensor, way=way), 0, tensor)


def test_low_precision_sums_stay_finite(way: str) -> None:
    half = torch.full((300,), 6e4, dtype=torch.float16)
    single = torch.full((300,), -3e38)
    columns = measure(half, single, way=way)
    check_against_truth(columns, 0, half)
    check_against_truth(columns, 1, single)


def test_large_sum_keeps_its_digits(way: str) -> None:
    tensor = torch.full((3_000_000,), 0.1)
    columns = measure(tensor, way=way)
    assert columns.sum[0] == pytest.approx(3e6 * float(tensor[0]), rel=1e-6)
    assert columns.sum_of_squares[0] == pytest.approx(3e6 * float(tensor[0]) ** 2, rel=1e-6)


@pytest.mark.parametrize("size", [4, 10_000])
def test_float64_beyond_its_squares(size: int, way: str) -> None:
    large = torch.full((size,), 1e300, dtype=torch.float64)
    small = torch.full((size,), 1e-200, dtype=torch.float64)
    largest = torch.full((size,), 1.7e308, dtype=torch.float64)
    columns = measure(large, small, largest, way=way)
    assert columns.overrides[0] == {"norm": pytest.approx(1e300 * math.sqrt(size))}
    assert columns.overrides[1] == {"norm": pytest.approx(1e-200 * math.sqrt(size))}
    assert columns.overrides[2]["mean"] == pytest.approx(1.7e308)
    json.dumps(columns.overrides, allow_nan=False)


@pytest.mark.parametrize("repeat", [1, 10_000])
def test_integers_beyond_float64_are_exact(repeat: int, way: str) -> None:
    signed = torch.tensor([2**63 - 1, 5, -(2**62) - 1] * repeat)
    unsigned = torch.tensor([2**64 - 1, 2**53 + 1] * repeat, dtype=torch.uint64)
    columns = measure(signed, unsigned, way=way)
    assert columns.overrides[0] == {
        "max": 2**63 - 1,
        "min": -(2**62) - 1,
        "sum": (2**63 - 1 + 5 - 2**62 - 1) * repeat,
    }
    total = (2**64 + 2**53) * repeat
    assert columns.overrides[1] == {"max": 2**64 - 1, "min": 2**53 + 1, "sum": total}
    assert columns.sum[1] == float(total)


def test_empty_and_absent(way: str) -> None:
    columns = measure(torch.empty(0, 3), None, torch.tensor(-2.0), way=way)
    assert list(columns.flags) == [HAS_COUNTS, 0, MEASURED]
    assert columns.zero_count[0] == 0
    assert (columns.max[2], columns.min[2], columns.sum_of_squares[2]) == (-2, -2, 4)
    assert not columns.overrides


def test_value_is_that_of_the_moment(way: str) -> None:
    statistics = TensorStatistics("md5", use_kernel=way == "kernel")
    tensors = [torch.ones(5), torch.ones(100_000), torch.ones(50, 40)[:, ::2]]
    expected = [zlib.crc32(t.contiguous().numpy().tobytes()) for t in tensors]
    for tensor in tensors:
        statistics.add(tensor)
        tensor.mul_(7)
    columns = statistics.take().reduce()
    assert list(columns.max) == [1, 1, 1]
    assert list(columns.checksum) == expected


def strided_tensors() -> list[torch.Tensor]:
    base = sample(torch.float32, 60_000).reshape(100, 600)
    return [
        base.t(),
        base[:, 3:200],
        base[::3, ::5],
        base.reshape(10, 10, 600).permute(2, 0, 1),
        base[:, :1].expand(100, 50),
        base[0].expand(40, 600),
        base.unfold(1, 7, 3),
        torch._neg_view(base),
        base.reshape(4, 15, 10, 100).contiguous(memory_format=torch.channels_last),
        base[2:3, 5:6],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_strided(dtype: torch.dtype, way: str) -> None:
    for view in strided_tensors():
        view = view if dtype is torch.float32 else view.to(dtype)
        columns = measure(view, way=way)
        check_against_truth(columns, 0, view.resolve_neg().contiguous())


def test_million_strided_elements(way: str) -> None:
    tensor = sample(torch.float32, 3_000_000)[::2]
    check_against_truth(measure(tensor, way=way), 0, tensor)


# Special tensors: (tensor, values that it stands for)
def special_tensors() -> list[tuple[torch.Tensor, torch.Tensor]]:
    dense = torch.tensor([[0.0, 2.0, 0.0], [-3.0, 0.0, 1.0]])
    duplicate = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,))
    pairs = torch.tensor([3 + 4j, 0j, 1 - 1j], dtype=torch.complex64)
    quantized = torch.quantize_per_tensor(dense, 0.5, 2, torch.qint8)
    return [
        (dense.to_sparse(), dense),
        (dense.to_sparse_csr(), dense),
        (dense.to_sparse_csc(), dense),
        (duplicate, torch.tensor([0.0, 5.0, 0.0, 0.0])),
        (torch.sparse_coo_tensor(size=(2, 2)), torch.zeros(2, 2)),
        (dense.to_mkldnn(), dense),
        (quantized, quantized.dequantize()),
        (pairs, pairs.abs()),
        (pairs.conj(), pairs.abs()),
        (pairs.conj().imag, torch.tensor([-4.0, 0.0, 1.0])),
        (pairs.to(torch.complex32), pairs.abs()),
        (torch.full((2,), 3e38 + 3e38j), torch.full((2,), 3e38, dtype=torch.float64) * 2**0.5),
        (dense.to(torch.float8_e4m3fn), dense),
        (dense.to(torch.float8_e5m2fnuz), dense),
        (torch.nested.nested_tensor([dense[0], dense[1, :2]]), dense.reshape(-1)[:5]),
        (torch.nn.Parameter(dense), dense),
    ]


@pytest.mark.parametrize("index", range(16))
def test_special_tensors(index: int, way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor, stands_for = special_tensors()[index]
    columns = measure(tensor, way=way, checksum="md5")
    assert columns.flags[0] == MEASURED | HAS_CHECKSUM
    assert columns.max[0] == pytest.approx(float(stands_for.max()), rel=1e-6)
    assert columns.min[0] == pytest.approx(float(stands_for.min()), rel=1e-6)
    assert columns.sum[0] == pytest.approx(float(stands_for.double().sum()), rel=1e-6)
    norm = float(stands_for.double().norm())
    assert math.sqrt(columns.sum_of_squares[0]) == pytest.approx(norm, rel=1e-6)
    assert columns.zero_count[0] == int((stands_for == 0).sum())


def test_no_values_has_a_reason(way: str) -> None:
    freed = torch.ones(100)
    part = freed[50:]
    freed.untyped_storage().resize_(0)
    columns = measure(torch.ones(3, device="meta"), freed, part, way=way)
    assert list(columns.flags) == [0, 0, 0]
    assert [columns.overrides[i]["note"] for i in range(3)] == [
        "meta tensor",
        "memory is not allocated",
        "memory is not allocated",
    ]


def test_internal_error_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = TensorStatistics()
    statistics.add(torch.ones(2))
    monkeypatch.setattr(statistics, "_codes", None)
    statistics.add(torch.ones(2), note="seen late")
    columns = statistics.take().reduce()
    assert list(columns.flags) == [MEASURED, 0]
    assert columns.overrides[1]["note"].startswith("seen late; statistics failed: AttributeError")


def test_unknown_checksum_is_refused() -> None:
    with pytest.raises(ValueError, match="'crc' is not one of '', md5, xor"):
        TensorStatistics("crc")


# ------------------------------------------------------------------------------ checksums


def xor_of(data: bytes) -> int:
    words = np.frombuffer(data + bytes(-len(data) % 8), "<u8")
    return int(np.bitwise_xor.reduce(words)) if len(words) else 0


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_checksums(dtype: torch.dtype, way: str) -> None:
    flat = [sample(dtype, size) for size in SIZES]
    tensors = [*flat, flat[-2].reshape(200, 200).t(), flat[-1][::3], flat[-1].as_strided((), ())]
    data = [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    columns = measure(*tensors, way=way, checksum="md5")
    assert list(columns.checksum) == [zlib.crc32(d) for d in data]
    columns = measure(*tensors, way=way, checksum="xor")
    assert list(columns.checksum) == [xor_of(d) for d in data]
    assert set(columns.flags) == {MEASURED | HAS_CHECKSUM}


def test_checksum_of_empty(way: str) -> None:
    assert measure(torch.empty(0), way=way, checksum="md5").flags[0] == HAS_COUNTS | HAS_CHECKSUM
    assert measure(torch.empty(0), way=way, checksum="xor").flags[0] == HAS_COUNTS


# --------------------------------------------------------------------- the arena and take


def test_entries_keep_their_order(way: str) -> None:
    tensors = [torch.full((1 + i % 9000,), float(i)) for i in range(0, 30_000, 17)]
    statistics = TensorStatistics(arena_limit_bytes=200_000, use_kernel=way == "kernel")
    for tensor in tensors:
        statistics.add(tensor)
        assert statistics._arena.used_bytes <= 200_000
    pending = statistics.take()
    statistics.add(torch.tensor(5.0))
    assert pending.count == len(tensors)
    assert list(pending.reduce().max) == [float(t[0]) for t in tensors]
    assert list(statistics.take().reduce().max) == [5.0]
    assert statistics.take().reduce().max.size == 0


# ----------------------------------------------------------------------- a guest, unseen


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class CountingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_surroundings() -> Iterator[None]:
    yield


SURROUNDINGS = {
    "nothing": no_surroundings,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "fake": FakeTensorMode,
    "dispatch mode": Counting,
    "function mode": CountingFunctions,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.filterwarnings("ignore")
def test_unseen_in_every_mode(name: str, way: str) -> None:
    tensors = [
        torch.randn(6, requires_grad=True),
        torch.randn(20_000, requires_grad=True),
        torch.randn(4, 5).t(),
        torch.randn(3, dtype=torch.complex64, requires_grad=True).conj(),
        torch.eye(3).to_sparse(),
        torch.randn(3).to(torch.float8_e4m3fn),
    ]
    before = measure(*tensors, way=way)
    versions = [t._version for t in tensors]
    state = torch.random.get_rng_state()
    with SURROUNDINGS[name]() as mode:  # type: ignore[operator]
        inside = measure(*tensors, way=way)
    assert inside.overrides == before.overrides == {}
    assert np.array_equal(inside.sum, before.sum)
    assert [t._version for t in tensors] == versions
    assert torch.equal(torch.random.get_rng_state(), state)
    if isinstance(mode, Counting | CountingFunctions):
        assert mode.seen == []


def test_inside_function_transforms(way: str) -> None:
    statistics = TensorStatistics(use_kernel=way == "kernel")
    outside = torch.tensor([10.0, 20.0])

    def loss(x: torch.Tensor) -> torch.Tensor:
        statistics.add(x)
        statistics.add(outside)
        return (x * outside).sum()

    torch.func.grad(loss)(torch.tensor([1.0, 2.0]))
    torch.func.vmap(loss)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    torch.func.vmap(torch.func.grad(loss))(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    columns = statistics.take().reduce()
    assert list(columns.max) == [2, 20, 4, 20, 5, 20]


# -------------------------------------------------------------------- accelerators, here on CPU


def test_device_results_equal_the_direct_ones() -> None:
    tensors = [
        sample(dtype, size) for dtype in (*FLOATS, torch.int32, torch.bool) for size in (1, 900)
    ]
    tensors[0][0] = math.nan
    tensors[1][5] = math.inf
    tensors.append(torch.tensor([3 + 4j, -1j]).conj())
    statistics, results = TensorStatistics(), DeviceResults(torch.device("cpu"))
    for entry, tensor in enumerate(tensors):
        statistics.add(tensor)
        results.add(entry, tensor)
        results.add_bytes(entry, tensor, "md5")
    direct = statistics.take()
    expected = direct.reduce()
    rows, overrides = np.zeros_like(direct._rows), {}
    results.reduce(results.finish(), rows, overrides, "md5")
    for name in ("max", "min", "sum", "sum_of_squares", "nan_count", "inf_count", "zero_count"):
        np.testing.assert_allclose(rows[name][: len(tensors)], getattr(expected, name), rtol=1e-6)
    assert list(rows["checksum"][: len(tensors)]) == list(
        measure(*tensors, checksum="md5").checksum
    )
    assert set(rows["flags"][: len(tensors)]) == {MEASURED | HAS_CHECKSUM}


def test_waiting_copies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "COPIED_BYTES", 1000)
    results = DeviceResults(torch.device("cpu"))
    tensors = [torch.randn(40) for _ in range(30)]
    for entry, tensor in enumerate(tensors):
        results.add_bytes(entry, tensor, "md5")
        assert results._copied_bytes <= 1000
    rows = np.zeros(30, TensorStatistics()._rows.dtype)
    results.reduce([], rows, {}, "md5")
    assert list(rows["checksum"]) == [zlib.crc32(t.numpy().tobytes()) for t in tensors]


def test_device_path_never_waits_while_adding() -> None:
    results = DeviceResults(torch.device("cpu"))
    with no_waiting() as waits:
        for entry in range(1100):  # more than one group
            results.add(entry, torch.ones(3))
    assert waits == []
    rows = np.zeros(1100, TensorStatistics()._rows.dtype)
    results.reduce([], rows, {}, "")
    assert set(rows["sum"]) == {3.0}


# ------------------------------------------------------------------- the kernel against numpy


special_floats = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-44, 3e38, 6e4, 1.0])


@given(
    values=st.lists(special_floats | st.floats(-1e3, 1e3, width=16), min_size=1, max_size=40),
    times=st.sampled_from([1, 13, 40, 700]),
    dtype=st.sampled_from(FLOATS),
)
def test_kernel_equals_numpy_on_floats(values: list[float], times: int, dtype: torch.dtype) -> None:
    tensor = torch.tensor(values * times, dtype=torch.float64).to(dtype)
    compare_ways(tensor)


@given(data=st.data(), dtype=st.sampled_from(INTEGERS), times=st.sampled_from([1, 17, 1000]))
def test_kernel_equals_numpy_on_integers(
    data: st.DataObject, dtype: torch.dtype, times: int
) -> None:
    bounds = torch.iinfo(dtype)
    values = data.draw(st.lists(st.integers(bounds.min, bounds.max), min_size=1, max_size=40))
    compare_ways(torch.tensor(values * times, dtype=dtype))


def compare_ways(tensor: torch.Tensor) -> None:
    if kernel_module.load_kernel() is None:
        pytest.skip(kernel_module.kernel_status())
    compiled, plain = (measure(tensor, way=way, checksum="xor") for way in WAYS)
    for name in ("flags", "max", "min", "nan_count", "inf_count", "zero_count", "checksum"):
        np.testing.assert_array_equal(getattr(compiled, name), getattr(plain, name), name)
    for name in ("sum", "sum_of_squares"):
        scale = float(tensor.double().abs().nan_to_num(0, 0, 0).sum())
        np.testing.assert_allclose(
            getattr(compiled, name), getattr(plain, name), rtol=4e-7, atol=1e-6 * scale
        )
    assert compiled.overrides.keys() == plain.overrides.keys()
    for entry, override in compiled.overrides.items():
        assert override == pytest.approx(plain.overrides[entry])


@pytest.mark.parametrize("number", range(3))
def test_every_instruction_set(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel_module.load_kernel() is None:
        pytest.skip(kernel_module.kernel_status())
    try:
        chosen = kernel_module.open_kernel(kernel_module.LIBRARY, (number,))
    except OSError:
        pytest.skip("this processor lacks it")
    tensors = [sample(dtype, 3000) for dtype in (*FLOATS, *INTEGERS, torch.bool)]
    tensors.append(tensors[0].reshape(50, 60)[:, ::2])
    statistics = TensorStatistics("xor")
    try:
        statistics._kernel = chosen
        for tensor in tensors:
            statistics.add(tensor)
    finally:
        kernel_module.open_kernel(kernel_module.LIBRARY)
    columns, expected = statistics.take().reduce(), measure(*tensors, way="numpy", checksum="xor")
    for name in ("flags", "max", "min", "zero_count", "checksum"):
        np.testing.assert_array_equal(getattr(columns, name), getattr(expected, name))
    np.testing.assert_allclose(columns.sum_of_squares, expected.sum_of_squares, rtol=4e-7)


def test_status_says_which_way(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    kernel_module._load.cache_clear()
    monkeypatch.setattr(kernel_module, "LIBRARY", tmp_path / "missing.so")
    assert (
        kernel_module.kernel_status()
        == "numpy, slower (the package was built without a C compiler)"
    )
    kernel_module._load.cache_clear()
    (tmp_path / "missing.so").write_bytes(b"no library")
    assert "cannot be used" in kernel_module.kernel_status()
    kernel_module._load.cache_clear()


def test_magnitudes_of_complex_numbers_are_numpys() -> None:
    """Torch's differ in the last digit, and dump.json shows the largest one."""
    tensor = torch.randn(1000, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    columns = measure(tensor.clone().requires_grad_(), tensor.conj()[2:3])
    assert columns.max[0] == np.abs(tensor.numpy()).max()
    assert columns.max[1] == np.abs(tensor.numpy())[2]
