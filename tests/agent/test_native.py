"""The compiled loops say the same as the Python code they stand for, and keep nothing."""

import gc
import sys
import weakref
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from rankscope.agent import native, outline, stacks
from rankscope.agent.outline import Outlines
from rankscope.agent.statistics import Description, TensorStatistics

walk = native.walk
if walk is None:
    pytest.skip("installed without compiled loops", allow_module_level=True)

Pair = namedtuple("Pair", "left right")


def nested(depth):
    value = [1]
    for _ in range(depth):
        value = [value]
    return value


X = torch.arange(6.0).reshape(2, 3)
PARTS = {
    "plain": (("input_args", (X, 3)), ("input_kwargs", {})),
    "parameter": (("output", [torch.nn.Parameter(torch.ones(2))]),),
    "scalars": (("input_args", (True, False, 0, 1, 2.5, 0.0, -0.0, float("nan"), "x", None)),),
    "containers": (("input_args", ([X, (X, [])], {"a": X, "b": [1]}, {}, (), Pair(X, 2))),),
    "deep": (("input_args", (nested(395), nested(405))),),
    "odd": (("input_args", (X.to_sparse(), torch.float32, slice(1, 2), SimpleNamespace(a=1))),),
    "nothing": (),
}


def scanned(scan, parts, transformed=False):
    outlines, tensors, values = Outlines(), [], []
    keys = []
    for _ in range(2):  # the second time scalars have their ids
        keys.append(
            scan("part", parts, tensors, values, outlines._scalar_ids, transformed, outlines._visit)
        )
    return keys, [id(t) if isinstance(t, torch.Tensor) else t for t in tensors], values


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("transformed", [False, True])
def test_scan_is_the_python_walk(parts, transformed):
    ours = scanned(walk.scan, parts, transformed)
    theirs = scanned(outline.scan_in_python, parts, transformed)
    assert ours[0] == theirs[0]
    assert ours[2] == theirs[2]
    assert len(ours[1]) == len(theirs[1])
    assert [type(t) for t in ours[1]] == [type(t) for t in theirs[1]]


def test_a_value_that_raises_raises():
    def refuse(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        walk.scan("", (("input_args", ([slice(1)],)),), [], [], {}, False, refuse)


@pytest.mark.parametrize(
    "arguments",
    [(), ("", [], [], [], {}, False, None), ("", ("x",), [], [], {}, False, None)],
    ids=["none", "no tuple", "no pair"],
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(TypeError, match="scan: "):
        walk.scan(*arguments)


TENSORS = [
    X,
    X.t(),
    torch.nn.Parameter(torch.randn(5)),
    torch.empty(0),
    torch.tensor(7),
    torch.randn(70_000),
    torch.randn(4, dtype=torch.complex64).conj().imag,
    torch.ones(3, device="meta"),
    X.to_sparse(),
    torch.tensor([2**62, -5]),
    torch.tensor([float("nan"), float("inf"), 0.0]),
    torch.tensor([True, False]),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([1e300, 1e300], dtype=torch.float64),
    torch.ones(2, dtype=torch.float8_e4m3fn),
]


def columns(statistics, entries):
    statistics.add_all(list(entries))
    found = statistics.take().reduce()
    names = ("flags", "max", "min", "sum", "sum_of_squares", "nan_count", "inf_count", "checksum")
    return {name: getattr(found, name).tobytes() for name in names}, found.overrides


@pytest.mark.parametrize("checksum", ["", "xor", "md5"])
def test_measure_is_the_python_loop(checksum):
    entries = [
        *TENSORS,
        Description("torch.Tensor", "torch.float32", (2,), False, None, note="hidden"),
        X,
    ] * 60  # more than the rows there are at first
    compiled, plain = TensorStatistics(checksum), TensorStatistics(checksum)
    plain._loop = None
    assert (compiled._loop is None) == (checksum == "md5")
    assert columns(compiled, entries) == columns(plain, entries)


def test_a_mode_of_the_users_sees_no_measuring():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    statistics = TensorStatistics()
    with Mode():
        statistics.add_all([X])
    assert not seen
    assert statistics.take().reduce().max.tolist() == [5.0]


def test_a_stack_is_known_again_and_others_are_not():
    table = stacks.StackTable()

    def here():
        return table.capture()

    first, second = [here() for _ in range(2)]
    assert first == second
    other = here()
    assert other != first
    assert any("in here" in line for line in table.frames(first))


def test_a_deep_stack_is_whole():
    def deep(depth):
        return walk.positions(sys._getframe()) if not depth else deep(depth - 1)

    assert len(deep(300)) - len(deep(100)) == 200 * 16


def test_code_whose_address_is_a_key_stays_alive():
    table, made = stacks.StackTable(), []
    for _ in range(2):  # equal code twice
        space = {"table": table}
        exec("def f():\n    return table.capture()", space)
        space["f"]()
        made.append(weakref.ref(space["f"].__code__))
        del space
    gc.collect()
    first, second = [known() for known in made]
    assert first == second
    assert first is not second


def test_nothing_is_kept():
    outlines, entries = Outlines(), [X, torch.nn.Parameter(torch.ones(3))]
    parts = (("input_args", ([X, 1, None, {}, {"k": X}], 2.5, "text")), ("input_kwargs", {"n": 7}))
    statistics = TensorStatistics()

    def work():
        for _ in range(200):
            outlines.scan(parts, "", [], [])
            statistics.add_all(list(entries))
            walk.positions(sys._getframe())
        statistics.take()

    work()
    counts = [sys.getrefcount(value) for value in (X, None, torch.float32, outlines._scalar_ids)]
    blocks = sys.getallocatedblocks()
    work()
    again = [sys.getrefcount(value) for value in (X, None, torch.float32, outlines._scalar_ids)]
    assert all(abs(b - a) < 50 for a, b in zip(counts, again, strict=True))
    assert sys.getallocatedblocks() - blocks < 200
