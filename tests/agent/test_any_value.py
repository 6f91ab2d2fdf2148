"""Any nest of any values goes through functions and modules: nothing is raised into the script,
what comes out is strict JSON, and figures are those of plain float64 arithmetic.
"""

import collections
import dataclasses
import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rankscope.collector.render import render

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Box:
    content: Any
    note: str = "n"


class Opaque:
    def __bool__(self) -> bool:
        raise RuntimeError("nobody may ask")

    __len__ = __iter__ = __eq__ = __bool__  # type: ignore[assignment]


DTYPES = [
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "bits" not in str(dtype)
]


def plain(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 5
    if str(dtype).startswith(("torch.q", "torch.float4", "torch.int1", "torch.uint1")):
        return values
    try:
        with warnings.catch_warnings():
            # torch says once a process that complex32 is experimental.
            warnings.simplefilter("ignore")
            return values.to(dtype)
    except (RuntimeError, NotImplementedError):
        return values


def layouts(tensor: torch.Tensor) -> list[Any]:
    """Functions that make something unusual of a tensor; what cannot be made is left as it is."""
    return [
        lambda t: t,
        lambda t: t.t() if t.dim() == 2 else t,
        lambda t: t[..., ::2],
        lambda t: t.expand(3, *t.shape),
        lambda t: t.to_sparse(),
        lambda t: t.to_sparse_csr(),
        lambda t: t.float().to_mkldnn(),
        lambda t: torch.nested.nested_tensor([t, t]),
        lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
        lambda t: t.to("meta"),
        lambda t: FakeTensorMode().from_tensor(t),
        lambda t: t.to(torch.complex64).conj(),
        lambda t: t.to(torch.complex64).conj().imag,
        lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
        lambda t: nn.Parameter(t.float()),
        lambda t: t.numpy(),
    ]


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    tensor = plain(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 99)))
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel():
        special = draw(st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e-40]))
        tensor.view(-1)[0] = special
    try:
        return draw(st.sampled_from(layouts(tensor)))(tensor)
    except Exception:
        return tensor


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.complex_numbers(),
    st.sampled_from([slice(1, None, 2), ..., torch.float16, torch.device("cpu"), torch.Size([2])]),
    st.builds(lambda n: {n}, st.integers()),
    st.builds(np.float32, st.floats(width=32)),
    st.just(torch.channels_last),
    st.builds(Opaque),
)
keys = st.one_of(st.text(max_size=3), st.integers(), st.none(), st.just("dtype"), st.just("device"))
values = st.recursive(
    st.one_of(tensors(), scalars),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner),
        st.builds(lambda x: collections.OrderedDict(a=x), inner),
    ),
    max_leaves=6,
)


class Through(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Through()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class library:
    @staticmethod
    def function(*args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not strict JSON")


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(
    args=st.lists(values, max_size=3),
    kwargs=st.dictionaries(st.sampled_from(["a", "dtype", "device"]), values, max_size=2),
    mode=st.sampled_from(["statistics", "md5", "xor"]),
    more=st.booleans(),
)
def test_any_arguments(
    record, args: list[Any], kwargs: dict[str, Any], mode: str, more: bool
) -> None:  # type: ignore[no-untyped-def]
    net = Net()
    extra = {"samples": 3, "std": True, "object_names": True} if more else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its rarer types
        recorded = record("mix", model=net, statistics={"summary_mode": mode}, rankscope=extra)
        custom = recorded._recording.custom
        custom.register(library, "function", "Lib")
        try:
            with recorded:
                output = net(*args, **kwargs)
                returned = library.function(*args, **kwargs)
        finally:
            custom.clear()
    assert len(output[0]) == len(args)
    assert all(given is got for given, got in zip(args, output[0], strict=True))
    if args:
        assert returned is args[0]
    assert recorded.drops == []
    *tables, header = recorded._tables
    for document in render(*tables, header).values():
        json.loads(document, parse_constant=refuse)
    assert set(recorded.data()) == {"Lib.function.0.forward", "Module.inner.Through.forward.0"}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    dtype=st.sampled_from([d for d in DTYPES if d.is_floating_point and d.itemsize > 1]),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    seed=st.integers(0, 999),
    layout=st.integers(0, 3),
)
def test_figures_are_those_of_float64(
    record, dtype: torch.dtype, shape: list[int], seed: int, layout: int
) -> None:  # type: ignore[no-untyped-def]
    tensor = layouts(torch.empty(0))[layout](plain(dtype, shape, seed))
    net = Net()
    with (recorded := record("L0", model=net)):
        net(tensor)
    rows = recorded.end()._tables[1].to_pylist()
    row = next(row for row in rows if row["part"] == "input_args")
    wide = tensor.double().numpy()
    assert (row["max"], row["min"]) == (wide.max(), wide.min())
    assert row["mean"] == pytest.approx(wide.mean(), rel=1e-6, abs=1e-6 * np.abs(wide).max())
    assert row["norm"] == pytest.approx(np.linalg.norm(wide), rel=1e-6)
    assert row["zero_count"] == (wide == 0).sum()
