"""scope, list, data_mode, slice, risk_level, rank and step: what is recorded and what is said."""

import importlib.util
import json
import logging
from pathlib import Path

import pytest
import torch
from calls import debugger_of
from dumpdiff import differences
from recorded import Recorded
from torch import nn

TESTS = Path(__file__).parent.parent
GOLDEN = TESTS / "golden" / "filters"


def load_cases():
    spec = importlib.util.spec_from_file_location("filters", TESTS / "cases" / "filters.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILTERS = load_cases()


@pytest.fixture
def said(caplog):
    """The lines told to the user so far."""
    logger = logging.getLogger("rankscope")
    logger.addHandler(caplog.handler)
    before, logger.propagate = logger.propagate, False
    logger.setLevel(logging.INFO)
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)
    logger.propagate = before


@pytest.mark.parametrize("name", FILTERS.CASES)
def test_equals_msprobe(record, tmp_path, name):
    run, config = FILTERS.CASES[name]
    recorded = record(**{"risk_level": "FOCUS"} | config)
    run(debugger_of(recorded))
    for reference in (GOLDEN / name).glob("step*/proc1/*.json"):
        step = int(reference.parent.parent.name.removeprefix("step"))
        target = tmp_path / f"step{step}" / "proc1" / reference.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(recorded.document(reference.name, step)))
    assert differences(GOLDEN / name, tmp_path) == []


def train(recorded, steps=1):
    net = FILTERS.net()
    for _ in range(steps):
        recorded.start(net)
        net(torch.ones(2, 4, requires_grad=True)).sum().backward()
        recorded.stop()
        recorded.step()
    return recorded


def kept(recorded, step=0):
    return [name for name in recorded.data(step) if ".forward" in name]


def test_the_last_record_of_a_scope_is_whole(record):
    ends = ["Module.block0.fc.Linear.forward.0", "Module.block0.act.ReLU.forward.0"]
    recorded = train(record(statistics={"scope": ends}), steps=2)
    for step in (0, 1):
        assert kept(recorded, step) == [
            "Functional.linear.0.forward",
            ends[0],
            "Functional.relu.0.forward",
            ends[1],
        ]
        assert list(recorded.data(step)[ends[1]]) == [
            "input_args",
            "input_kwargs",
            "output",
            "parameters",
        ]


def test_a_scope_that_stays_open_ends_with_the_step(record):
    ends = ["Torch.sigmoid.0.forward", "Torch.no_such.0.forward"]
    recorded = train(record("L1", statistics={"scope": ends}), steps=2)
    for step in (0, 1):
        assert kept(recorded, step)[0] == ends[0]


def test_scope_and_list_must_both_hold(record):
    ends = ["Torch.tanh.0.forward", "Functional.gelu.0.forward"]
    recorded = train(record("L1", statistics={"scope": ends, "list": ["linear", "relu"]}))
    assert kept(recorded) == ["Functional.linear.0.forward", "Functional.relu.0.forward"]


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("name-regex(linear\\.[02]\\.f)", ["linear.0", "linear.2"]),
        ("name-regex(^Functional\\.g)", ["gelu.0"]),
        ("linear.1", ["linear.1"]),
        ("Functional.", ["linear.0", "relu.0", "gelu.0", "linear.1", "relu.1", "linear.2"]),
    ],
)
def test_list_entries(record, entry, found):
    recorded = train(record("L1", statistics={"list": [entry]}))
    assert kept(recorded) == [f"Functional.{name}.forward" for name in found]


def test_gradients_of_parameters_by_name(record):
    recorded = train(record("L0", statistics={"list": ["head.Linear.parameters_grad"]}))
    assert list(recorded.data()) == ["Module.head.Linear.parameters_grad.0"]


def test_what_a_list_leaves_out_keeps_its_place_in_the_tree(record):
    recorded = train(record(statistics={"list": ["gelu"]}))
    everything = train(record())
    assert recorded.tree() == everything.tree()
    stacks = recorded.document("stack.json").values()
    assert [name for names, _ in stacks for name in names] == ["Functional.gelu.0.forward"]


def test_unused_filters_are_said_once(record, said):
    train(record(statistics={"list": ["gelu", "no_such", "nor_this"]}), steps=2).end()
    section = {"list": ["gelu"], "scope": ["Torch.tan.0.forward", "Torch.exp.0.forward"]}
    train(record(statistics=section), steps=2).end()
    assert [line for line in said() if "no record" in line] == [
        "list entry 'no_such' is the name of no record of step 0",
        "list entry 'nor_this' is the name of no record of step 0",
        "scope 'Torch.tan.0.forward' is the name of no record of step 0",
    ]


def test_an_unused_tensor_list_entry_is_said_once(record, said):
    train(record(statistics={"tensor_list": ["relu", "no_such"]}), steps=2).end()
    assert [line for line in said() if "no record" in line] == [
        "tensor_list entry 'no_such' is the name of no record of step 0"
    ]


@pytest.mark.parametrize(("steps", "told"), [([1], []), ([7, "9-10"], ["[7, 9, 10]"])])
def test_a_step_that_is_never_reached_is_said(record, said, steps, told):
    train(record(step=steps), steps=2).end()
    lines = [line for line in said() if "selects steps" in line]
    assert lines == [
        f"nothing is recorded: config.json selects steps {shown} and the script ends in step 2"
        for shown in told
    ]


def test_a_regular_expression_that_finds_nothing_is_said(record, said):
    train(record(statistics={"list": ["name-regex(^Torch\\.no_such)"]})).end()
    assert len([line for line in said() if "name-regex(" in line and "no record" in line]) == 1


def test_what_risk_level_leaves_out_is_said_once(record, said):
    recorded = record("L1", risk_level="FOCUS")
    for _ in range(2):
        with recorded:
            torch.relu(torch.ones(2).reshape(2, 1).repeat(1, 2))
        recorded.step()
    assert recorded.forwards() == ["Torch.relu.0"]
    lines = [line for line in said() if "leaves out" in line]
    assert lines == [
        'risk_level FOCUS leaves out calls of repeat, reshape; "risk_level": "ALL" records '
        "everything"
    ]


def test_core_keeps_linear(record):
    recorded = train(record("L1", risk_level="CORE"))
    assert recorded.forwards() == [f"Functional.linear.{n}" for n in range(3)]


def test_data_mode_and_structure(record):
    recorded = train(record(task="structure", structure={"data_mode": ["forward"]}))
    assert recorded.data() == {}
    assert "Functional.linear.0.backward" in recorded.tree()


def test_no_call_tree_without_extra_info(record):
    recorded = train(record(extra_info=False))
    with pytest.raises(KeyError):
        recorded.document("stack.json")
    assert "Functional.gelu.0.forward" in recorded.data()


def test_slices_leave_the_real_tensors_alone(record):
    cut = [{"dim": -1, "begin": 1, "end": 100}, {"dim": 5, "begin": 0, "end": 1}]
    x = torch.tensor([5.0, 1.0, 3.0], requires_grad=True)
    with (recorded := record("L1", statistics={"slice": cut})):
        y = torch.mul(x, 2)
        y.sum().backward()
    entry = recorded.data()["Torch.mul.0.forward"]
    assert entry["input_args"][0]["shape"] == entry["output"][0]["shape"] == [2]
    assert entry["input_args"][0]["Max"] == 3.0
    assert entry["input_args"][0]["requires_grad"] is True
    assert y.tolist() == [10.0, 2.0, 6.0]
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_nan_check(record):
    with (recorded := record("L1", task="nan_check")):
        torch.log(torch.tensor([1.0, -1.0]))
        torch.div(torch.ones(2), 0)
        torch.add(torch.arange(3), 1)
    data = recorded.data()
    for name, flags in (("log", [0, 1]), ("div", [0, 1]), ("add", [0, 0])):
        entry = data[f"Torch.{name}.0.forward"]
        assert [entry[side][0]["is_nan"] for side in ("input_args", "output")] == flags
    assert list(data["Torch.log.0.forward"]["output"][0]) == [
        "type",
        "dtype",
        "shape",
        "is_nan",
        "requires_grad",
    ]


def test_overflow_check_shows_calls_with_overflow(record):
    with (recorded := record("L1", task="overflow_check")):
        x = torch.exp(torch.tensor([1.0, 100.0]))
        torch.neg(torch.ones(2))
        torch.relu(x)
        torch.abs(torch.ones(2))
    assert recorded.forwards() == ["Torch.exp.0", "Torch.relu.0"]
    assert recorded.data()["Torch.exp.0.forward"]["output"][0]["Max"] == float("inf")


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ([7], "nothing is recorded: config.json selects ranks [7] and the job has ranks 0 to 3"),
        ([1], None),
        ([2], ""),
    ],
)
def test_ranks_outside_the_job(said, monkeypatch, ranks, line):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    recorded = Recorded(monkeypatch, "L1", rank=ranks)
    for _ in range(2):
        with recorded:
            torch.relu(torch.ones(2))
        recorded.step()
    assert [text for text in said() if text.startswith("nothing")] == ([line] if line else [])
    if ranks == [1]:
        assert recorded.forwards() == ["Torch.relu.0"]
    else:
        assert recorded.transport is None


class Called(nn.Module):
    def forward(self, x):
        return torch.relu(x)


def test_token_range_ends_with_its_stop(record):
    net = Called()
    recorded = record(model=net)
    for tokens in ([1, 2], None):
        recorded.start(net, tokens)
        recorded.start(net, tokens)  # a second start counts anew and leaves no counter behind
        for _ in range(4):
            net(torch.ones(2))
        recorded.stop()
        recorded.step()
    assert recorded.forwards(0) == ["Torch.relu.0", "Torch.relu.1"]
    assert recorded.forwards(1) == [f"Torch.relu.{n}" for n in range(4)]


@pytest.mark.parametrize(
    ("data_mode", "backward", "told"),
    [
        (["backward"], False, True),
        (["backward"], True, False),
        (["output"], False, False),
        (["all"], False, False),
    ],
)
def test_a_step_that_data_mode_leaves_empty_is_told(said, monkeypatch, data_mode, backward, told):
    recorded = Recorded(monkeypatch, "L1", statistics={"data_mode": data_mode})
    for _ in range(2):
        with recorded:
            loss = torch.relu(torch.ones(2, requires_grad=True)).sum()
            if backward:
                loss.backward()
        recorded.step()
    lines = [text for text in said() if "holds no values" in text]
    line = "step 0 holds no values: nothing happened between start() and stop() "
    assert lines == (
        [line + "that level L1, data_mode ['backward', 'input', 'output'] keeps"] if told else []
    )


def test_a_step_without_a_call_is_told(said, monkeypatch):
    recorded = Recorded(monkeypatch, "L1")
    with recorded:
        pass
    recorded.step()
    assert [text for text in said() if "step 0 holds no values" in text]
