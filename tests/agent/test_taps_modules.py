"""Module calls, their gradients and their place in the call tree."""

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def gradients(entry, side):
    """Each gradient of a backward record as (shape, largest), null as None."""
    return [g and (g["shape"], g["Max"]) for g in entry[side]]


class Holder(nn.Module):
    """A root around one module: roots have no record."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def lambda_module(function, parameters=0):
    """A module `Inner` that computes `function(self, ...)`, with a weight of ones if wanted."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            for index in range(parameters):
                setattr(self, f"w{index}", nn.Parameter(torch.ones(2)))

        def forward(self, *args, **kwargs):
            return function(self, *args, **kwargs)

    return Holder(Inner())


NAME = "Module.inner.Inner.backward.0"


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def test_a_module_that_returns_its_input(record):
    net = lambda_module(lambda self, x: x)
    with (recorded := record("L0", model=net)):
        (net(leaf(1.0, 2.0) * 1) * 3).sum().backward()
    entry = recorded.data()[NAME]
    assert gradients(entry, "input") == gradients(entry, "output") == [([2], 3.0)]


def test_one_of_two_outputs_is_used(record):
    net = lambda_module(lambda self, x: (x * 2, x * 5))
    with (recorded := record("L0", model=net)):
        used, _ = net(leaf(1.0, 2.0) * 1)
        used.sum().backward()
    entry = recorded.data()[NAME]
    assert gradients(entry, "input") == [([2], 1.0), None]
    assert gradients(entry, "output") == [([2], 2.0)]


def test_an_input_that_is_not_used(record):
    net = lambda_module(lambda self, x, y: x * 2)
    with (recorded := record("L0", model=net)):
        net(leaf(1.0, 2.0) * 1, leaf(3.0) * 1).sum().backward()
    assert gradients(recorded.data()[NAME], "output") == [([2], 2.0), None]


def test_an_output_that_the_module_uses_again(record):
    """Its gradient is what comes from outside, without what the module's own nodes send."""

    def forward(self, x):
        y = x * 2
        return y, y * 10

    net = lambda_module(forward)
    with (recorded := record("L0", model=net)):
        first, second = net(leaf(1.0, 2.0) * 1)
        (first + second).sum().backward()
    entry = recorded.data()[NAME]
    assert gradients(entry, "input") == [([2], 1.0), ([2], 1.0)]
    assert gradients(entry, "output") == [([2], 22.0)]


@pytest.mark.parametrize("uses", [lambda y: (y * 10).sum(), lambda y: (y * 10 + y.exp()).sum()])
def test_an_output_that_only_the_module_uses(record, uses):
    """Nothing comes from outside, however often the module's own nodes send something."""

    def forward(self, x):
        y = x * 2
        return uses(y), y

    net = lambda_module(forward)
    with (recorded := record("L0", model=net)):
        net(leaf(1.0, 2.0) * 1)[0].backward()
    assert gradients(recorded.data()[NAME], "input") == [([], 1.0), None]


def test_an_input_handed_on_beside_another_output(record):
    """As T5 hands its position bias from layer to layer. What of its gradient came through the
    call cannot be told: null, and what the module itself sends to it.
    """
    net = nn.Sequential(*(lambda_module(lambda self, x, b: (x * 2 + b, b)).inner for _ in "ab"))
    net.forward = lambda x, b: net[1](*net[0](x, b))
    with (recorded := record("L0", model=net)):
        output, bias = net(leaf(1.0, 2.0) * 1, leaf(1.0, 1.0) * 1)
        (output + bias * 100).sum().backward()
    first, second = (recorded.data()[f"Module.{i}.Inner.backward.0"] for i in (0, 1))
    assert gradients(second, "input") == [([2], 1.0), None]
    assert gradients(second, "output") == [([2], 2.0), ([2], 1.0)]
    assert gradients(first, "input") == [([2], 2.0), None]
    assert gradients(first, "output") == [([2], 4.0), ([2], 2.0)]


def test_an_input_handed_on_that_alone_is_used(record):
    net = lambda_module(lambda self, x, b: (x * 2, b))
    with (recorded := record("L0", model=net)):
        (net(leaf(1.0, 2.0) * 1, leaf(1.0, 1.0) * 1)[1] * 3).sum().backward()
    assert gradients(recorded.data()[NAME], "input") == [None, ([2], 3.0)]
    assert gradients(recorded.data()[NAME], "output") == [None, ([2], 3.0)]


@dataclass
class Output(OrderedDict):
    """As model libraries make them: as a mapping it lacks the fields that are None."""

    loss: torch.Tensor
    states: torch.Tensor | None = None

    def __post_init__(self):
        self.update(loss=self.loss)


def test_an_output_that_is_a_dataclass_and_a_mapping(record):
    net = lambda_module(lambda self, x: Output(x * 2))
    with (recorded := record("L0", model=net)):
        net(leaf(1.0, 2.0) * 1).loss.sum().backward()
    data = recorded.data()
    (output,) = data["Module.inner.Inner.forward.0"]["output"]
    assert (list(output), output["loss"]["Max"]) == (["loss", "states"], 4.0)
    assert output["states"] is None
    assert gradients(data[NAME], "input") == [([2], 1.0)]


def test_an_input_used_inside_and_outside(record):
    """Only what the module sends back counts, not the tensor's whole gradient."""
    net = lambda_module(lambda self, x: x * 2 + x * 3)
    with (recorded := record("L0", model=net)):
        x = leaf(1.0, 2.0) * 1
        (net(x) + 100 * x).sum().backward()
    assert gradients(recorded.data()[NAME], "output") == [([2], 5.0)]


def test_a_tensor_given_twice_has_one_gradient(record):
    net = lambda_module(lambda self, x, y: x * 2 + y * 3)
    with (recorded := record("L0", model=net)):
        x = leaf(1.0, 2.0) * 1
        net(x, x).sum().backward()
    assert gradients(recorded.data()[NAME], "output") == [([2], 5.0), None]


def test_keyword_tensors_follow_positional_ones(record):
    net = lambda_module(lambda self, x, *, y: x * 2 + y * 3)
    with (recorded := record("L0", model=net)):
        net(leaf(1.0, 2.0) * 1, y=leaf(1.0, 1.0) * 1).sum().backward()
        net(x=leaf(1.0, 2.0) * 1, y=leaf(1.0, 1.0) * 1).sum().backward()
    for number in (0, 1):
        entry = recorded.data()[f"Module.inner.Inner.backward.{number}"]
        assert gradients(entry, "output") == [([2], 2.0), ([2], 3.0)]


def test_an_output_changed_in_place_by_the_caller(record):
    net = lambda_module(lambda self, x: x * self.w0, parameters=1)
    with (recorded := record("L0", model=net)):
        y = net(leaf(1.0, -2.0) * 1)
        torch.relu_(y).sum().backward()
    entry = recorded.data()[NAME]
    assert gradients(entry, "output") == [([2], 1.0)]
    assert [p.tolist() for p in (net.inner.w0.grad,)] == [[1.0, 0.0]]


def test_a_view_of_an_output_changed_in_place(record):
    net = lambda_module(lambda self, x: (x * self.w0).view(1, 2), parameters=1)
    x = leaf(1.0, -2.0)
    with (recorded := record("L0", model=net)):
        y = net(x * 1)
        y.mul_(2)
        y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    # The node that made the output is gone from the graph, so no gradient reaches it.
    assert gradients(recorded.data()[NAME], "input") == [None]
    assert gradients(recorded.data()[NAME], "output") == [([2], 2.0)]


def test_no_input_wants_a_gradient(record):
    """The record comes as soon as the output's gradient is there, before the module's own APIs."""
    net = Holder(nn.Linear(2, 1))
    with (recorded := record("mix", model=net)):
        net(torch.ones(1, 2)).sum().backward()
    assert [n for n in recorded.names() if "backward" in n or "grad" in n] == [
        "Tensor.sum.0.backward",
        "Module.inner.Linear.backward.0",
        "Functional.linear.0.backward",
        "Module.inner.Linear.parameters_grad.0",
    ]
    assert recorded.data()["Module.inner.Linear.backward.0"]["output"] == []
    # It stands under the module of its forward record, whatever is open.
    tree = recorded.tree()
    assert tree["Functional.linear.0.backward"] == "Module.inner.Linear.backward.0"


def test_no_grad_has_no_backward(record):
    net = Holder(nn.Linear(2, 1))
    with (recorded := record("mix", model=net)), torch.no_grad():
        net(torch.ones(1, 2))
    assert recorded.names() == ["Functional.linear.0.forward", "Module.inner.Linear.forward.0"]


def test_two_passes_through_one_graph(record):
    net = lambda_module(lambda self, x: x * x)
    x = leaf(3.0)
    with (recorded := record("L0", model=net)):
        y = net(x * 1)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    # The same name twice: the later pass stands.
    assert gradients(recorded.data()[NAME], "output") == [([1], 6.0)]
    assert x.grad.tolist() == [12.0]


def test_double_backward(record):
    net = lambda_module(lambda self, x: x * x * x)
    x = leaf(2.0)
    with (recorded := record("mix", model=net)):
        (first,) = torch.autograd.grad(net(x * 1).sum(), x, create_graph=True)
        first.sum().backward()
    assert (first.tolist(), x.grad.tolist()) == ([12.0], [12.0])
    assert NAME in recorded.data()


def test_grad_with_inputs_inside_the_graph(record):
    """Nodes beyond the wanted inputs do not run; the record is written when the pass ends."""
    net = lambda_module(lambda self, x: x * 2)
    with (recorded := record("L0", model=net)):
        middle = leaf(1.0, 2.0) * 1
        (gradient,) = torch.autograd.grad(net(middle).sum(), middle)
    assert gradient.tolist() == [2.0, 2.0]
    assert gradients(recorded.data()[NAME], "input") == [([2], 1.0)]


def test_parameters_grad_accumulates(record):
    net = Holder(nn.Linear(2, 1))
    with (recorded := record("L0", model=net)):
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
    data = recorded.data()
    seen = [data[f"Module.inner.Linear.parameters_grad.{k}"] for k in (0, 1)]
    assert [list(entry) for entry in seen] == [["bias", "weight"]] * 2
    assert [entry["weight"][0]["Max"] for entry in seen] == [1.0, 2.0]


def test_a_parameter_of_two_modules_is_in_the_records_of_both(record):
    """As with tied embeddings; each of them counts its arrivals, one for the whole pass."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[2].weight = net[0].weight
    with (recorded := record("L0", model=net)):
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
    data = recorded.data()
    for number in (0, 1):
        first, *others = (data[f"Module.{i}.Linear.parameters_grad.{number}"] for i in range(3))
        assert sorted(first) == ["bias", "weight"]
        assert [entry["weight"] for entry in others] == [first["weight"]] * 2
    assert data["Module.0.Linear.parameters_grad.0"] != data["Module.0.Linear.parameters_grad.1"]


def test_gradients_of_parameters_stand_where_the_last_of_them_arrived(record):
    net = lambda_module(lambda self, x: torch.sin(x * self.w0) + self.w1, parameters=2)
    with (recorded := record("mix", model=net)):
        net(torch.ones(2)).sum().backward()
    *before, last = (n for n in recorded.data() if "backward" in n or "_grad" in n)
    assert "Torch.sin.0.backward" in before
    assert last == "Module.inner.Inner.parameters_grad.0"
    assert list(recorded.data()[last]) == ["w1", "w0"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return checkpoint(self.linear, torch.tanh(x), use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoint_inside_another(record):
    """Each recomputation runs its own backward pass inside the outer one."""
    net = Holder(Layer())
    x = leaf(1.0, 2.0)
    with (recorded := record("mix", model=net)):
        checkpoint(net, x, use_reentrant=True).sum().backward()
    names = recorded.names()
    # The first run has no graph; the recomputation of the layer runs its linear without one, too.
    backward = [n for n in names if n.startswith("Module") and "backward" in n]
    assert backward == [
        "Module.inner.linear.Linear.backward.2",
        "Module.inner.Layer.backward.1",
    ]
    expected = torch.autograd.grad(net.inner.linear(torch.tanh(x)).sum(), x)
    assert torch.equal(x.grad, expected[0])
    entry = recorded.data()["Module.inner.Layer.backward.1"]
    assert entry["output"][0]["Max"] == pytest.approx(x.grad.max().item())


def failing(self, x):
    torch.exp(x)
    raise ValueError("not today")


def test_an_exception_inside_a_module(record):
    net = lambda_module(failing)
    after = nn.Linear(2, 2)
    net.after = after
    x = torch.ones(1, 2)
    with (recorded := record("mix", model=net)):
        with pytest.raises(ValueError, match="not today"):
            net(x)
        after(x)
        torch.tanh(x)
    data, tree = recorded.data(), recorded.tree()
    assert "output" not in data["Module.inner.Inner.forward.0"]
    assert list(data) == [
        "Module.inner.Inner.forward.0",
        "Torch.exp.0.forward",
        "Functional.linear.0.forward",
        "Module.after.Linear.forward.0",
        "Torch.tanh.0.forward",
    ]
    assert tree["Torch.exp.0.forward"] == "Module.inner.Inner.forward.0"
    assert tree["Module.after.Linear.forward.0"] is None
    assert tree["Torch.tanh.0.forward"] is None


def test_a_module_called_while_an_exception_is_handled(record):
    """Its output is no less an output; None is a value like others."""
    net = lambda_module(lambda self, x: None)
    with (recorded := record("L0", model=net)):
        try:
            raise KeyError
        except KeyError:
            net(torch.ones(1))
    assert recorded.data()["Module.inner.Inner.forward.0"]["output"] == [None]


def test_stop_inside_a_forward(record):
    recorded = record("mix")

    def forward(self, x):
        recorded.stop()
        return x

    net = lambda_module(forward)
    recorded.start(net)
    net(torch.ones(1))
    recorded.step()
    recorded.start(net)
    torch.tanh(torch.ones(1))
    recorded.stop()
    assert recorded.tree(step=1) == {"Torch.tanh.0.forward": None}


@pytest.mark.parametrize("level", ["mix", "L0"])
def test_backward_after_stop_belongs_to_the_step(record, level):
    """Records of functions have their data, those of modules their place alone, as with msProbe."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Softmax(-1)))
    recorded = record(level, model=net, statistics={"list": ["Module.1", "linear"]})
    for _ in range(2):
        with recorded:
            loss = net(leaf([1.0, 2.0])).pow(2).sum()
        loss.backward()
    recorded.step()
    backward = {name: parent for name, parent in recorded.tree().items() if "backward" in name}
    modules = {
        "Module.1.Sequential.backward.0": None,
        "Module.1.0.Softmax.backward.0": "Module.1.Sequential.backward.0",
        "Module.0.Linear.backward.0": None,
    }
    assert backward.items() >= modules.items()
    found = [name for name in recorded.data() if "backward" in name]
    if level == "L0":
        assert (found, backward) == ([], modules)
        return
    functions = [
        f"Functional.{n}.backward" for n in ("softmax.0", "linear.0", "softmax.1", "linear.1")
    ]
    assert found == functions
    assert backward["Functional.softmax.1.backward"] == "Module.1.0.Softmax.backward.1"


def test_a_scope_that_ends_after_stop(record):
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    scope = ["Module.0.Linear.forward.0", "Module.1.Tanh.backward.0"]
    recorded = record("mix", model=net, statistics={"scope": scope})
    for _ in range(2):
        with recorded:
            y = net(leaf([1.0, 2.0]))
        y.sum().backward()
    recorded.step()
    last = "Functional.linear.0.backward"  # runs when the scope is over
    assert "Torch.tanh.0.backward" in recorded.data()
    assert not {last, "Functional.linear.1.forward"} & set(recorded.data())


def test_names_of_shared_listed_and_second_models(record):
    shared = nn.Linear(2, 2)
    first = nn.Sequential(shared, nn.Sequential(shared))
    second = nn.Sequential(nn.ReLU())
    recorded = record("L0", model=[first, second])
    with recorded:
        second(first(torch.ones(1, 2)))
    assert recorded.forwards() == [
        "Module.0.0.Linear.0",
        "Module.0.0.Linear.1",
        "Module.0.1.Sequential.0",
        "Module.1.0.ReLU.0",
    ]


def test_a_module_record_stands_after_what_ran_inside(record):
    net = Holder(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with (recorded := record("L0", model=net)):
        net(torch.ones(1, 2))
    assert recorded.forwards() == [
        "Module.inner.0.Linear.0",
        "Module.inner.1.ReLU.0",
        "Module.inner.Sequential.0",
    ]
    assert recorded.tree() == {
        "Module.inner.Sequential.forward.0": None,
        "Module.inner.0.Linear.forward.0": "Module.inner.Sequential.forward.0",
        "Module.inner.1.ReLU.forward.0": "Module.inner.Sequential.forward.0",
    }


def test_the_users_hooks_run_first_and_are_seen(record):
    net = Holder(nn.Linear(2, 2))
    net.inner.register_forward_hook(lambda module, args, output: output * 0 + 7)
    with (recorded := record("L0", model=net)):
        net(torch.ones(1, 2))
    assert recorded.data()["Module.inner.Linear.forward.0"]["output"][0]["Max"] == 7.0


def test_optimizer_and_clipping_are_parents(record):
    net = Holder(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=False)
    with (recorded := record("mix", model=net)):
        net(torch.ones(1, 2)).sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        torch.tanh(torch.ones(1))
    tree = recorded.tree()
    assert tree["clip_grad"] is None
    assert tree["optimizer"] is None
    assert {"clip_grad", "optimizer"} <= set(tree.values())
    assert tree["Torch.tanh.0.forward"] is None


@pytest.mark.parametrize("records_inside", [True, False])
def test_a_scope_without_records_has_no_place(record, records_inside):
    """Clipping in one fused call shows nothing, and msProbe names no `clip_grad` then."""
    net = nn.Sequential(nn.Linear(2, 2))
    clip = nn.utils.clip_grad_norm_ if records_inside else nn.utils.clip_grad_value_
    with (recorded := record("mix", model=net)):
        net(leaf([1.0, 2.0])).sum().backward()
        getattr(nn.utils, clip.__name__)(net.parameters(), 0.5)
    assert ("clip_grad" in recorded.tree()) == records_inside


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_hook_of_ours_that_fails_costs_one_record(record, monkeypatch, capfd, level):
    """The job goes on with the same numbers; it is said once, and counted."""
    net = Holder(nn.Linear(2, 1))
    x = torch.ones(1, 2)
    expected = net(x)
    recorded = record(level, model=net)
    with recorded:
        with monkeypatch.context() as broken:
            broken.setattr(type(recorded.session), "event", lambda *_: 1 / 0)
            assert torch.equal(net(x), expected)
            net(x)
        net(x)
    dropped = sum(events for reason, events in recorded.drops if reason == "error")
    assert dropped >= 2
    assert len(recorded.forwards()) == {"L0": 1, "L1": 1, "mix": 2}[level]
    lines = [line for line in capfd.readouterr().err.splitlines() if "recording failed" in line]
    assert len(lines) == len(set(lines)) > 0
    recorded.faults_expected = True
