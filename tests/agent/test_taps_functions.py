"""Which calls become records, under which names, and what state they leave."""

import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

X = torch.tensor([3.0, 5.0])
N = torch.tensor([3, 5])
B = torch.tensor([True, False])

#: What a script writes, and the records it makes. As msProbe names them.
OPERATORS = {
    "x + 1": ["Tensor.__add__.0"],
    "1 + x": ["Tensor.__radd__.0"],
    "x.add(1)": ["Tensor.add.0"],
    "torch.add(x, 1)": ["Torch.add.0"],
    "x - 1": ["Tensor.__sub__.0"],
    "1 - x": ["Tensor.__rsub__.0"],
    "2 * x": ["Tensor.__rmul__.0"],
    "x * x": ["Tensor.__mul__.0"],
    "x / 2": ["Tensor.__truediv__.0"],
    "2 / x": ["Tensor.reciprocal.0", "Tensor.__mul__.0"],
    "x.__rdiv__(2)": ["Tensor.__rdiv__.0"],
    "x // 2": ["Tensor.__floordiv__.0"],
    "x % 2": ["Tensor.__mod__.0"],
    "x ** 2": ["Tensor.__pow__.0"],
    "2 ** x": ["Tensor.__rpow__.0"],
    "x @ x": ["Tensor.__matmul__.0"],
    "x == 1": ["Tensor.__eq__.0"],
    "x != 1": ["Tensor.__ne__.0"],
    "x < 1": ["Tensor.__lt__.0"],
    "1 < x": ["Tensor.__gt__.0"],
    "x >= 1": ["Tensor.__ge__.0"],
    "n | 1": ["Tensor.__or__.0"],
    "1 | n": ["Tensor.__ror__.0"],
    "n & 1": ["Tensor.__and__.0"],
    "n ^ 1": ["Tensor.__xor__.0"],
    "n << 1": ["Tensor.__lshift__.0"],
    "bool(b.any())": ["Tensor.any.0", "Tensor.__bool__.0"],
    "(x + 1) + (x + 1)": [f"Tensor.__add__.{n}" for n in range(3)],
    # Not in msProbe's list, so not recorded under any name.
    "-x": [],
    "abs(x)": [],
    "1 & n": [],
    "x[0]": [],
    "x.view(2, 1)": [],
    "x.shape, x.dtype, x.size(), x.dim()": [],
    "x.detach(), x.sum": [],
    "torch.tensor([1.0]), torch.ones(1)": [],
}
STATEMENTS = {
    "x += 1": ["Tensor.__iadd__.0"],
    "x -= 1": ["Tensor.__isub__.0"],
    "x *= 2": ["Tensor.__imul__.0"],
    "x[0] = 1": ["Tensor.__setitem__.0"],
    "x.add_(1)": ["Tensor.add_.0"],
    "x /= 2": [],
}


@pytest.mark.parametrize("source", [*OPERATORS, *STATEMENTS])
def test_a_call_is_named_as_it_is_written(record, source):
    scope = {"torch": torch, "x": X.clone(), "n": N.clone(), "b": B.clone()}
    code = compile(source, "", "eval" if source in OPERATORS else "exec")
    with (recorded := record("L1")):
        exec(code, scope)
    assert recorded.forwards() == (OPERATORS | STATEMENTS)[source]


def test_nothing_stays_on_torch(record):
    before = {name: vars(torch.Tensor).get(name) for name in dir(torch.Tensor)}
    relu, scan = F.relu, torch._C._len_torch_function_stack
    with record("mix", model=nn.Sequential(nn.Linear(2, 2))):
        assert F.relu is relu  # also while recording
        assert vars(torch.Tensor).get("__add__") is not before["__add__"]
    assert {name: vars(torch.Tensor).get(name) for name in dir(torch.Tensor)} == before
    assert scan() == 0
    assert threading.getprofile() is None


def test_functions_bound_before_the_start_are_seen(record):
    relu, gelu = F.relu, F.gelu
    with (recorded := record("L1")):
        relu(X), gelu(X)
    assert recorded.forwards() == ["Functional.relu.0", "Functional.gelu.0"]


def test_one_function_has_one_name(record):
    image, line = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 4)
    with (recorded := record("L1")):
        torch.conv1d(line, torch.ones(1, 1, 2))
        F.conv1d(line, torch.ones(1, 1, 2))
        F.max_pool2d(image, 2)
        F.max_pool2d(image, 2, return_indices=True)
        F.adaptive_max_pool1d(line, 2, return_indices=True)
        torch.linalg.norm(X)
        torch.norm(X)
    assert recorded.forwards() == [
        "Functional.conv1d.0",
        "Functional.conv1d.1",
        "Functional.max_pool2d.0",
        "Functional.max_pool2d.1",
        "Functional.adaptive_max_pool1d.0",
        "Torch.norm.0",
        "Torch.norm.1",
    ]


@pytest.mark.parametrize(
    ("risk_level", "expected"),
    [
        ("ALL", ["Torch.reshape.0", "Functional.linear.0", "Torch.tanh.0", "Torch.reshape.1"]),
        ("FOCUS", ["Functional.linear.0", "Torch.tanh.0"]),
        ("CORE", ["Functional.linear.0"]),
    ],
)
def test_risk_level_selects(record, risk_level, expected):
    recorded = record("mix", model=nn.Sequential(), risk_level=risk_level)
    with recorded:
        torch.reshape(torch.tanh(F.linear(torch.reshape(X, (1, 2)), torch.ones(2, 2))), (2,))
    assert recorded.forwards() == expected
    # The others take their number and their place in the call tree all the same.
    assert len([name for name in recorded.tree() if "forward" in name]) == 4


def test_what_a_recorded_call_does_inside_is_hidden(record):
    loss, tokens = F.cross_entropy, torch.tensor([1])
    with (recorded := record("L1")):
        loss(torch.ones(1, 3), tokens)
        F.normalize(X, dim=0)  # divides with an operator
        X.div(2)
        F.multi_head_attention_forward(
            *[torch.ones(2, 1, 4)] * 3, 4, 2, torch.ones(12, 4), None, None, None, False, 0.0,
            torch.ones(4, 4), None,
        )  # fmt: skip
    assert recorded.forwards() == [
        "Functional.cross_entropy.0",
        "Functional.normalize.0",
        "Tensor.div.0",
        "Functional.multi_head_attention_forward.0",
    ]


def test_unlisted_python_functions_are_transparent(record):
    weight = nn.Parameter(torch.ones(3))
    with (recorded := record("L1")):
        F.rms_norm(torch.ones(2, 3), (3,), weight)
        nn.init.constant_(torch.empty(2), 1.0)
        optimizer = torch.optim.SGD([weight], 0.1, foreach=False)
        weight.sum().backward()
        optimizer.step()
    assert "Tensor.sum.0" in recorded.forwards()
    assert "Tensor.add_.0" in recorded.forwards()  # the optimizer's own
    assert not any("rms_norm" in name or "constant_" in name for name in recorded.names())


def test_arguments_are_shown_as_written(record):
    with (recorded := record("L1")):
        F.dropout(X, 0.0)
        F.dropout(X, p=0.0, training=True)
        torch.sum(X, dim=0)
    data = recorded.data()
    scalars = [
        (
            [a["value"] for a in data[name]["input_args"][1:]],
            {k: v["value"] for k, v in data[name]["input_kwargs"].items()},
        )
        for name in data
    ]
    assert scalars == [([0.0], {}), ([], {"p": 0.0, "training": True}), ([], {"dim": 0})]


def test_counters_restart_with_each_step_not_with_each_start(record):
    recorded = record("L1")
    for _ in range(2):
        with recorded:
            torch.relu(X)
        with recorded:
            torch.relu(X)
        recorded.step()
    names = ["Torch.relu.0", "Torch.relu.1"]
    assert recorded.forwards(0) == recorded.forwards(1) == names


def test_in_place_calls_show_both_values(record):
    x = X.clone()
    with (recorded := record("L1")):
        x.mul_(2)
    entry = recorded.data()["Tensor.mul_.0.forward"]
    assert (entry["input_args"][0]["Max"], entry["output"][0]["Max"]) == (5.0, 10.0)


def test_an_exception_inside_a_call_leaves_the_rest_alone(record):
    with (recorded := record("L1")):
        with pytest.raises(RuntimeError):
            torch.matmul(torch.ones(2), torch.ones(3))
        torch.tanh(X)
        with pytest.raises(RuntimeError):
            torch.ones(2) @ torch.ones(3)
        X.matmul(X)
    data = recorded.data()
    failed = ["Torch.matmul.0.forward", "Tensor.__matmul__.0.forward"]
    assert list(data) == [failed[0], "Torch.tanh.0.forward", failed[1], "Tensor.matmul.0.forward"]
    assert ["output" in entry for entry in data.values()] == [False, True, False, True]


class Doubling(TorchFunctionMode):
    """A mode of the user's that calls what it sees and one function more."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return torch.mul(result, 2) if func is torch.tanh else result


def test_start_inside_a_mode_that_ends_first(record):
    recorded = record("L1")
    with Doubling():
        recorded.start()
        doubled = torch.tanh(X)
        inside = torch._C._len_torch_function_stack()
    torch.exp(X)
    recorded.stop()
    assert torch.equal(doubled, 2 * torch.tanh(X))
    assert (inside, torch._C._len_torch_function_stack()) == (2, 0)
    # The user's mode comes first: ours sees what it calls.
    assert recorded.forwards() == ["Torch.tanh.0", "Torch.mul.0", "Torch.exp.0"]


def test_stop_inside_a_mode_started_later(record):
    recorded = record("L1")
    recorded.start()
    with Doubling():
        torch.exp(X)
        recorded.stop()
        torch.exp(X)
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0
    assert recorded.forwards() == ["Torch.exp.0"]


def test_stop_inside_a_backward_hook(record):
    recorded = record("mix", model=nn.Sequential(nn.Linear(2, 2)))
    x = X.clone().requires_grad_()
    recorded.start()
    y = x * 2
    y.register_hook(lambda gradient: recorded.stop())
    torch.relu(y).sum().backward()
    torch.exp(X)
    # torch puts our mode back when backward() returns; it idles until the next call of ours.
    recorded.step()
    assert torch._C._len_torch_function_stack() == 0
    recorded.start()
    torch.tanh(X)
    recorded.stop()
    assert torch._C._len_torch_function_stack() == 0
    assert recorded.forwards(0) == ["Tensor.__mul__.0", "Torch.relu.0", "Tensor.sum.0"]
    assert recorded.forwards(1) == ["Torch.tanh.0"]


def test_stop_and_start_inside_a_recorded_call(record):
    recorded = record("L1")

    class Restarting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            recorded.stop()
            recorded.start()
            return super().__torch_function__(func, types, args, kwargs or {})

    with recorded:
        torch.exp(X.as_subclass(Restarting))
        torch.tanh(X)
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0
    assert recorded.forwards()[-1] == "Torch.tanh.0"
    assert recorded.forwards().count("Torch.tanh.0") == 1


def test_a_forked_child_records_nothing(record):
    recorded = record("L1")
    recorded.start()
    torch.exp(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        before = len(recorded.session.recorder._events)
        torch.exp(X)
        clean = not recorded.session.running and not torch._C._len_torch_function_stack()
        os._exit(0 if clean and len(recorded.session.recorder._events) == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.exp(X)
    recorded.stop()
    assert recorded.forwards() == ["Torch.exp.0", "Torch.exp.1"]


def test_threads_started_while_recording_are_seen(record):
    def work():
        X + 1

    recorded = record("L1")
    with recorded:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert recorded.forwards() == ["Tensor.__add__.0", "Tensor.__add__.1"]


def test_a_thread_from_before_the_start_is_seen_in_module_calls(record):
    net = nn.Sequential(nn.Linear(2, 2))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the thread is there now
        with (recorded := record("mix", model=net)):
            pool.submit(net, torch.ones(1, 2)).result()
        left = pool.submit(torch._C._len_torch_function_stack).result()
    assert recorded.forwards() == ["Functional.linear.0", "Module.0.Linear.0"]
    assert left == 0


def test_the_call_tree_is_per_thread(record):
    net = nn.Sequential(nn.Linear(2, 2))
    inside, go = threading.Event(), threading.Event()

    def wait(module, args):
        inside.set()
        go.wait(10)

    net[0].register_forward_pre_hook(wait)
    with (recorded := record("mix", model=net)):
        thread = threading.Thread(target=net, args=(torch.ones(1, 2),))
        thread.start()
        assert inside.wait(10)
        torch.exp(X)
        go.set()
        thread.join()
    tree = recorded.tree()
    assert tree["Torch.exp.0.forward"] is None
    assert tree["Functional.linear.0.forward"] == "Module.0.Linear.forward.0"


def test_function_transforms_work_while_recording(record):
    def square(x):
        return (x * x).sum()

    with record("L1"):
        gradient = torch.func.grad(square)(X)
        mapped = torch.vmap(torch.sin)(X)
    assert torch.equal(gradient, 2 * X)
    assert torch.equal(mapped, X.sin())


def test_a_tensor_class_of_the_users_is_asked_no_more_than_without_us(record):
    asked = []

    class Asking(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = X.as_subclass(Asking).requires_grad_()
    asked.clear()
    with record("L1"):
        torch.exp(x).sum().backward()
    while_recording = list(asked)
    asked.clear()
    torch.exp(x).sum().backward()
    assert [f.__name__ for f in while_recording] == [f.__name__ for f in asked]


def test_a_thread_ends_without_our_mode(record):
    """What is left on the stack, torch drops after the thread has left Python; that can abort the
    process at its end."""
    left = []

    class Watched(threading.Thread):
        def _delete(self):
            left.append(torch._C._len_torch_function_stack())
            super()._delete()

    with record("L1") as watch:
        thread = Watched(target=lambda: torch.cos(X))
        thread.start()
        thread.join()
    assert left == [0]
    assert watch.forwards() == ["Torch.cos.0"]
