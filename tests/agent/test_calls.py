"""The calls that choose what is recorded: custom functions, module_dump, save, set_init_step."""

import gc
import sys
import types
import weakref

import pytest
import torch
from calls import debugger_of
from torch import nn

from rankscope.agent.checks import EXTRAS
from rankscope.agent.errors import ConfigError, UsageError


def own_module(**functions):
    module = types.ModuleType("own")
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def double(x):
    return torch.add(x, x)


# -------------------------------------------------------------------------- functions of one's own


def test_a_registered_function_is_one_record(record):
    own = own_module(double=double)
    recorded = record("L1")
    debugger = debugger_of(recorded)
    debugger.register_custom_api(own, "double")
    bound = own.double  # a name taken after the registration counts
    own.double(torch.ones(2))
    with recorded:
        torch.relu(bound(torch.ones(2)))
    assert recorded.forwards() == ["own.double.0", "Torch.relu.0"]
    (entry,) = recorded.data()["own.double.0.forward"]["output"]
    assert entry["Max"] == 2.0


def test_restoring_puts_the_function_back(record):
    own = own_module(double=double)
    recorded = record("L1")
    debugger = debugger_of(recorded)
    debugger.register_custom_api(own, "double")
    debugger.register_custom_api(own, "double", "Again")  # watched already: nothing changes
    assert own.double is not double
    debugger.restore_custom_api(own, "double")
    debugger.restore_custom_api(own, "double")
    debugger.restore_custom_api(own, "never")
    assert own.double is double
    with recorded:
        own.double(torch.ones(2))
    assert recorded.forwards() == ["Torch.add.0"]


def test_the_end_puts_functions_back_unless_somebody_else_replaced_them(record):
    own = own_module(double=double, other=double)
    recorded = record("L1")
    debugger = debugger_of(recorded)
    debugger.register_custom_api(own, "double")
    debugger.register_custom_api(own, "other")
    theirs = own.other = lambda x: x
    with recorded:
        pass
    recorded.end()
    assert own.double is double
    assert own.other is theirs


def test_methods_of_a_class(record):
    class Own:
        @staticmethod
        def plain(x):
            return x * 2

        def method(self, x):
            return x * 3

    recorded = record("L1")
    debugger = debugger_of(recorded)
    debugger.register_custom_api(Own, "plain")
    debugger.register_custom_api(Own, "method", "Mine")
    with recorded:
        assert Own.plain(torch.ones(1)).item() == 2.0
        assert Own().plain(torch.ones(1)).item() == 2.0
        assert Own().method(torch.ones(1)).item() == 3.0
    assert recorded.forwards() == ["Own.plain.0", "Own.plain.1", "Mine.method.0"]


def test_a_registered_function_that_raises(record):
    def fails(x):
        raise ValueError("theirs")

    own = own_module(fails=fails)
    recorded = record("L1")
    debugger_of(recorded).register_custom_api(own, "fails")
    with recorded:
        with pytest.raises(ValueError, match="theirs"):
            own.fails(torch.ones(1))
        torch.relu(torch.ones(1))
    assert recorded.forwards() == ["own.fails.0", "Torch.relu.0"]
    assert list(recorded.data()["own.fails.0.forward"]) == ["input_args", "input_kwargs"]


@pytest.mark.parametrize(
    ("owner", "name", "prefix", "message"),
    [
        (own_module(), "absent", None, "own, 'absent'.*cannot be watched"),
        (own_module(value=3), "value", None, "own, 'value'.*is a int"),
        (torch.Tensor, 3, None, "the name must be a string"),
        (own_module(double=double), "double", 3, "the prefix a string or None"),
        (int, "bit_length", None, "int, 'bit_length'.*cannot be watched"),
    ],
)
def test_what_cannot_be_registered(record, owner, name, prefix, message):
    with pytest.raises(UsageError, match=message):
        debugger_of(record("L1")).register_custom_api(owner, name, prefix)


def test_functions_listed_in_a_file(record, tmp_path, monkeypatch, capsys):
    own = own_module(double=double)
    monkeypatch.setitem(sys.modules, "own_listed", own)
    listed = tmp_path / "custom_wrap_ops.yaml"
    listed.write_text("own_listed: [double, later]\nno_such_module_of_ours: [f]\n")
    recorded = record("L1", rankscope={"custom_wrap_ops": str(listed)})
    assert own.double is not double
    own.later = double
    for _ in range(2):
        with recorded:
            own.double(torch.ones(1))
            own.later(torch.ones(1))
    names = ["double.0", "later.0", "double.1", "later.1"]
    assert recorded.forwards() == [f"own_listed.{name}" for name in names]
    assert capsys.readouterr().err.count("no_such_module_of_ours cannot be imported") == 1


def test_operators_of_a_namespace(record):
    library = torch.library.Library("rankscope_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    with (recorded := record("L1", custom_op_namespaces=["rankscope_test"])):
        torch.ops.rankscope_test.twice(torch.ones(1))
        torch.ops.rankscope_test.twice.default(torch.ones(1))
        torch.ops.aten.relu(torch.ones(1))
    assert recorded.forwards() == ["rankscope_test.twice.0", "rankscope_test.twice.1"]


# --------------------------------------------------------------------- tables of one's own, extras


def test_functions_of_a_library_are_wrapped_between_start_and_stop(record, monkeypatch):
    def npu_fusion_attention(q, head_num):
        return tuple(q + n for n in range(6))

    npu = own_module(npu_fusion_attention=npu_fusion_attention)
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    with (recorded := record("L1")):
        npu.npu_fusion_attention(torch.ones(1), head_num=2)
    assert npu.npu_fusion_attention is npu_fusion_attention
    assert recorded.forwards() == ["NPU.npu_fusion_attention.0"]
    output = recorded.data()["NPU.npu_fusion_attention.0.forward"]["output"]
    assert [entry and entry["Max"] for entry in output] == [1.0, 2.0, 3.0, 4.0, None, None]


def test_own_rules_for_what_is_ignored(record, tmp_path):
    rules = tmp_path / "ignore.yaml"
    rules.write_text(
        "Torch:\n  add: {input: [0, alpha]}\n  topk: {output: [1]}\n  mul: {input: all}\n"
        "Functional:\n  relu: {output: all}\n"
    )
    with (recorded := record("L1", rankscope={"ignore": str(rules)})):
        x = torch.ones(3, requires_grad=True)
        torch.add(x, x, alpha=2)
        torch.topk(x, 1)
        torch.mul(x, other=x)
        nn.functional.relu(x).sum().backward()
    data = recorded.data()
    first, second = data["Torch.add.0.forward"]["input_args"]
    assert (first, second["Max"]) == (None, 1.0)
    assert data["Torch.add.0.forward"]["input_kwargs"] == {"alpha": None}
    values, indices = data["Torch.topk.0.forward"]["output"]
    assert (values["Max"], indices) == (1.0, None)
    assert data["Torch.mul.0.forward"]["input_args"] == [None]
    assert data["Torch.mul.0.forward"]["input_kwargs"] == {"other": None}
    assert data["Functional.relu.0.forward"]["output"] == [None]
    assert data["Functional.relu.0.backward"]["input"][0]["Max"] == 1.0  # forward records only


@pytest.mark.parametrize("text", ["Torch: {add: [0]}", "Torch: {add: {input: 0}}", "- 1", "a: {"])
def test_rules_in_another_form(record, tmp_path, text):
    rules = tmp_path / "ignore.yaml"
    rules.write_text(text)
    with pytest.raises(ConfigError, match=r"rankscope\.ignore: cannot read .*ignore\.yaml"):
        record("L1", rankscope={"ignore": str(rules)})


def test_an_own_table_of_functions(record, tmp_path):
    table = tmp_path / "apis.yaml"
    table.write_text("Torch: {of: torch, names: [relu]}\nTensor: {of: torch.Tensor, names: []}\n")
    with (recorded := record("L1", rankscope={"apis": str(table)})):
        torch.relu(torch.ones(1))
        torch.exp(torch.ones(1)) + 1
    assert recorded.forwards() == ["Torch.relu.0"]
    table.write_text("Torch: [relu]")
    with pytest.raises(ConfigError, match=r"rankscope\.apis: cannot read .*apis\.yaml"):
        record("L1", rankscope={"apis": str(table)})


#: An extra, what a script writes, and the records it makes then and without it.
EXTRA_CALLS = [
    ("operators", "x[0]", ["Tensor.__getitem__.0"], []),
    ("operators", "-x", ["Tensor.__neg__.0"], []),
    ("operators", "abs(x)", ["Tensor.__abs__.0"], []),
    ("operators", "~(x > 0)", ["Tensor.__gt__.0", "Tensor.__invert__.0"], ["Tensor.__gt__.0"]),
    ("views", "x.view(2, 2)", ["Tensor.view.0"], []),
    ("writes", "x.copy_(x)", ["Tensor.copy_.0"], []),
    ("rms_norm", "F.rms_norm(x, (2,))", ["Functional.rms_norm.0"], None),
    ("rnn", "lstm(x)", ["Torch.lstm.0"], None),
    ("grouped_mm", "F.grouped_mm(b, b)", ["Torch._grouped_mm.0"], []),
    ("fft", "torch.fft.fft(x)", ["Torch.fft.0"], []),
    ("special", "torch.special.expit(x)", ["Torch.expit.0"], []),
    ("aten", "torch.ops.aten.relu(x)", ["Aten.relu.0"], []),
    ("aten", "torch.ops.aten.add.Tensor(x, x)", ["Aten.add.0"], []),
]


@pytest.mark.parametrize(("extra", "source", "watched", "plain"), EXTRA_CALLS)
def test_extras(record, extra, source, watched, plain):
    lstm = nn.LSTM(2, 2)
    for p in lstm.parameters():
        p.requires_grad_(False)
    scope = {"torch": torch, "F": nn.functional, "lstm": lstm, "x": torch.ones(2, 2)}
    scope["b"] = torch.ones(1, 16, 16, dtype=torch.bfloat16)
    if plain is not None:
        with (without := record("L1")):
            eval(source, scope)
        assert without.forwards() == plain
    with (recorded := record("L1", rankscope={"extras": [extra]})):
        eval(source, scope)
    names = [name for name in recorded.forwards() if name.split(".")[1] in str(watched)]
    assert names == watched


def test_every_extra_is_in_the_table():
    from rankscope.agent.apis import ApiTable

    for extra in EXTRAS:
        plain, more = ApiTable.load(), ApiTable.load(extras=[extra])
        assert (plain.prefixes, plain.namespaces) != (more.prefixes, more.namespaces)


# ------------------------------------------------------------------------------------- module_dump


def test_module_dump(record):
    net, inner = nn.Linear(2, 2), nn.ReLU()
    x = torch.ones(1, 2, requires_grad=True)
    recorded = record("L1")
    debugger = debugger_of(recorded)
    with recorded:
        y = torch.exp(x)
        debugger.module_dump(net, "Mine")
        y = inner(net(y))
        debugger.module_dump_end()
        debugger.module_dump(net, "Other name")
        y = net(y)
        debugger.module_dump_end()
        debugger.module_dump_end()
        torch.sin(net(y)).sum().backward()
    recorded.step()
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    assert recorded.forwards() == [
        "Torch.exp.0",
        "Module.Mine.Linear.0",
        "Module.Mine.Linear.1",
        "Functional.linear.0",
        "Torch.sin.0",
        "Tensor.sum.0",
    ]
    gradients = {name for name in recorded.names() if "Linear.backward" in name or "_grad" in name}
    assert gradients == {
        "Module.Mine.Linear.backward.1",
        "Module.Mine.Linear.backward.0",
        "Module.Mine.Linear.parameters_grad.0",
    }


def test_module_dump_of_a_part_of_the_model_changes_nothing(record, capsys):
    net = nn.Sequential(nn.Linear(2, 2))
    recorded = record("mix", model=net)
    debugger = debugger_of(recorded)
    with recorded:
        for _ in range(2):
            debugger.module_dump(net[0], "Mine")
            net(torch.ones(1, 2))
            debugger.module_dump_end()
    names = [f"{stem}.{n}" for n in (0, 1) for stem in ("Functional.linear", "Module.0.Linear")]
    assert recorded.forwards() == names
    assert capsys.readouterr().err.count("module_dump('Mine') changes nothing") == 1


def test_module_dump_mutes_the_other_modules(record):
    net, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    recorded = record("mix", model=net)
    debugger = debugger_of(recorded)
    with recorded:
        debugger.module_dump(other, "Mine")
        net(other(torch.ones(1, 2)))
        debugger.module_dump_end()
        net(torch.ones(1, 2))
    assert recorded.forwards() == [
        "Module.Mine.Linear.0",
        "Functional.linear.0",
        "Module.0.Linear.0",
    ]


@pytest.mark.parametrize(("module", "name"), [(torch.relu, "x"), (nn.ReLU(), ""), (nn.ReLU(), 3)])
def test_module_dump_needs_a_module_and_a_name(record, module, name):
    with pytest.raises(UsageError, match=r"needs a torch\.nn\.Module and a name"):
        debugger_of(record("L1")).module_dump(module, name)


# -------------------------------------------------------------------------------------------- save


def saved(recorded, step=0):
    return recorded.document("debug.json", step)["data"]


def test_gradients_arrive_one_by_one_and_the_last_one_stays(record):
    recorded = record("debug")
    debugger = debugger_of(recorded)
    x = torch.tensor([2.0], requires_grad=True)
    value = {"a": x * 2, "b": [x * 3, 1]}
    debugger.save(value, "v")
    value["a"].sum().backward()
    (value["b"][0] * 5).sum().backward(retain_graph=True)
    (value["b"][0] * 7).sum().backward()
    debugger.step()
    gradient = saved(recorded)["v_grad.0.debug"]
    assert gradient["a"]["Max"] == 1.0
    assert (gradient["b"][0]["Max"], gradient["b"][1]) == (7.0, None)
    assert x.grad.tolist() == [2.0 + 15.0 + 21.0]


def test_a_gradient_after_the_step_is_not_recorded(record):
    recorded = record("debug")
    debugger = debugger_of(recorded)
    y = torch.ones(1, requires_grad=True) * 2
    debugger.save(y, "y")
    debugger.step()
    debugger.save(torch.ones(1), "other")
    y.sum().backward()
    debugger.step()
    assert saved(recorded)["y_grad.0.debug"] is None
    assert list(saved(recorded, 1)) == ["other.0.debug", "other_grad.0.debug"]


def test_save_keeps_no_tensor(record):
    recorded = record("debug")
    debugger = debugger_of(recorded)
    y = torch.ones(1000, 1000, requires_grad=True) * 2
    dead = weakref.ref(y)
    debugger.save({"y": [y]}, "y")
    recorded._recording._recorder.take()
    del y
    gc.collect()
    assert dead() is None
    debugger.step()


def test_what_cannot_be_saved_is_said(record, capsys):
    recorded = record("debug")
    debugger = debugger_of(recorded)
    for value in (None, {"a": None}, {1: 2}, [object()], b"x"):
        debugger.save(value, "odd")
    debugger.save(1, "fine")
    debugger.step()
    assert list(saved(recorded)) == ["fine.0.debug", "fine_grad.0.debug"]
    assert capsys.readouterr().err.count("save(..., 'odd'): nothing is saved") == 1
    with pytest.raises(UsageError, match="the name must be a string"):
        debugger.save(1, None)


def test_save_at_another_level_is_said(record, capsys):
    recorded = record("L1")
    with recorded:
        debugger_of(recorded).save(torch.ones(1), "x")
        torch.relu(torch.ones(1))
    assert recorded.forwards() == ["Torch.relu.0"]
    assert "save() records at level debug only" in capsys.readouterr().err


def test_nothing_else_is_recorded_at_level_debug(record):
    recorded = record("debug", model=nn.Sequential(nn.ReLU()))
    debugger = debugger_of(recorded)
    with recorded:
        debugger.save(torch.relu(torch.ones(1)), "x", save_backward=False)
    recorded.step()
    assert list(saved(recorded)) == ["x.0.debug"]


# ------------------------------------------------------------------------------------------- steps


def test_steps_count_from_where_the_script_says(record):
    recorded = record("L1", step=[6])
    debugger = debugger_of(recorded)
    debugger.set_init_step(5)
    for _ in range(3):
        with recorded:
            torch.relu(torch.ones(1))
        recorded.step()
    assert recorded.forwards(6) == ["Torch.relu.0"]
    assert recorded.names(5) == recorded.names(7) == []


@pytest.mark.parametrize("step", [-1, 1.0, True, "3"])
def test_bad_first_steps(record, step):
    with pytest.raises(UsageError, match=r"must be a whole number from 0"):
        debugger_of(record("L1")).set_init_step(step)


def test_a_first_step_inside_a_step(record):
    with (recorded := record("L1")), pytest.raises(UsageError, match="inside step 0"):
        debugger_of(recorded).set_init_step(3)
