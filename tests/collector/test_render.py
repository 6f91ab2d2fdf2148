import json
import math

import numpy as np
import orjson
import pyarrow as pa
import pytest

from rankscope.collector.render import Header, render, split
from rankscope.collector.render.statistics import json_number

FRAMES = {7: ["File train.py, line 3, in step, \n y = net(x)", "File train.py, line 9, in main"]}


def header(**changes):
    fields = {"task": "statistics", "level": "mix", "summary_mode": "statistics"}
    fields |= {"precision": "low", "extra_info": True, "dump_data_dir": None}
    return Header(**(fields | changes))


def rendered(events, **changes):
    return render(events.nodes(), events.records(), FRAMES, header(**changes))


def data(events, **changes):
    name = "debug.json" if changes.get("level") == "debug" else "dump.json"
    return json.loads(rendered(events, **changes)[name])["data"]


def one_leaf(rows, leaf, **changes):
    events = rows.Events()
    events.data("Torch.f.0.forward", "input", {"input_args": [0]}, leaf)
    return data(events, **changes)["Torch.f.0.forward"]["input_args"][0]


EXPECTED_DUMP = """\
{
  "task": "statistics",
  "level": "mix",
  "framework": "pytorch",
  "dump_data_dir": null,
  "data": {
    "Functional.linear.0.forward": {
      "input_args": [
        {
          "type": "torch.Tensor",
          "dtype": "torch.float32",
          "shape": [
            2,
            3
          ],
          "Max": 1e999,
          "Min": -0.5,
          "Mean": "nan",
          "Norm": 2.5,
          "requires_grad": true
        },
        null,
        {}
      ],
      "input_kwargs": {
        "size": {"type": "torch.Size", "value": [2, 3]}
      },
      "output": [
        [],
        {
          "type": "int",
          "value": 12345678901234567890
        }
      ]
    },
    "Module.fc.Linear.forward.0": {
      "input_args": [],
      "input_kwargs": {},
      "output": [
        {
          "type": "torch.Tensor",
          "dtype": "torch.int64",
          "shape": [],
          "Max": -3,
          "Min": -3,
          "Mean": -3,
          "Norm": -3,
          "requires_grad": false
        }
      ],
      "parameters": {}
    }
  }
}"""


@pytest.fixture
def linear(rows):
    """A module that calls one function."""
    events = rows.Events()
    module, api = "Module.fc.Linear.forward.0", "Functional.linear.0.forward"
    none = {"input_args": [], "input_kwargs": {}}
    events.data(module, "input", none, kind="module")
    first = rows.tensor(shape=[2, 3], requires_grad=True)
    first |= {"max": math.inf, "min": -0.5, "mean": math.nan, "norm": 2.5}
    size = {"form": "verbatim", "value": '{"type": "torch.Size", "value": [2, 3]}'}
    inputs = {"input_args": [0, 1, 2], "input_kwargs": {"size": 3}}
    events.data(api, "input", inputs, first, {"form": "null"}, {"form": "empty"}, size)
    number = rows.scalar("int", "12345678901234567890")
    events.data(api, "output", {"output": [[], 0]}, number, parent=module, stack=7)
    events.node(module, kind="module", stack=7)
    value = rows.tensor("int64", [], max=-3.0, min=-3.0, mean=-3.0, norm=3.0)
    events.data(module, "output", {"output": [0], "parameters": {}}, value, kind="module")
    return events


def test_a_whole_dump(linear):
    assert rendered(linear)["dump.json"].decode() == EXPECTED_DUMP


def test_stack_and_construct(linear):
    api, module = "Functional.linear.0.forward", "Module.fc.Linear.forward.0"
    documents = rendered(linear)
    assert json.loads(documents["stack.json"]) == {"0": [[api, module], FRAMES[7]]}
    assert list(json.loads(documents["construct.json"]).items()) == [(api, module), (module, None)]


def test_construct_is_empty_at_l1(linear):
    documents = rendered(linear, level="L1")
    assert documents["construct.json"] == b"{}"
    assert len(json.loads(documents["stack.json"])) == 1


def test_extra_info_false_leaves_one_document(linear):
    assert list(rendered(linear, extra_info=False)) == ["dump.json"]


def test_row_order_and_encoding_change_nothing(linear):
    nodes, records = linear.nodes(), linear.records()
    shuffled = records.take(np.random.default_rng(1).permutation(records.num_rows))
    parts = pa.concat_tables([shuffled.slice(0, 2), shuffled.slice(2)])
    plain = [f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in nodes.schema]
    plain_nodes = nodes.cast(pa.schema(list(zip(nodes.schema.names, plain, strict=True))))
    again = render(plain_nodes.take(list(range(nodes.num_rows))[::-1]), parts, FRAMES, header())
    assert again == rendered(linear)


@pytest.mark.parametrize("encoded", [True, False])
def test_one_process_of_many_renders_the_same(rows, linear, encoded):
    """Slices of a bigger table carry its dictionaries and offsets."""
    other = rows.Events("0" * 32)
    for call in range(200):
        leaf = rows.scalar("int", str(call))
        other.data(f"Torch.f.{call}.forward", "input", {"input_args": [0]}, leaf)
    both = [pa.concat_tables([a, b]) for a, b in ((linear.nodes(), other.nodes()),
                                                  (other.records(), linear.records()))]  # fmt: skip
    if not encoded:
        both = [pa.table({n: t[n].cast(pa.string()) if pa.types.is_dictionary(t[n].type) else t[n]
                          for n in t.column_names}) for t in both]  # fmt: skip
    nodes, records = (split(table, "process") for table in both)
    assert sorted(nodes) == sorted(records) == ["0" * 32, "a" * 32]
    documents = render(nodes["a" * 32], records["a" * 32], FRAMES, header())
    assert documents == rendered(linear)


def test_nothing_recorded(rows):
    documents = rendered(rows.Events(), task="structure")
    assert json.loads(documents["dump.json"])["data"] == {}
    assert documents["stack.json"] == documents["construct.json"] == b"{}"


# dtype, shape, columns -> Max, Min, Mean, Norm
NUMBERS = {"max": 4.0, "min": -2.0, "mean": 1.5, "norm": 6.25}
NONE = [None] * 4
DTYPES = [
    ("float32", [2], NUMBERS, [4.0, -2.0, 1.5, 6.25]),
    ("float16", [2], NUMBERS, [4.0, -2.0, 1.5, 6.25]),
    ("bfloat16", [2, 1], NUMBERS, [4.0, -2.0, 1.5, 6.25]),
    ("float64", [2], NUMBERS, [4.0, -2.0, None, None]),
    ("int64", [2], NUMBERS, [4, -2, None, None]),
    ("int8", [2], NUMBERS, [4, -2, None, None]),
    ("uint8", [2], NUMBERS, [4, -2, None, None]),
    ("uint32", [2], NUMBERS, [4, -2, None, None]),
    ("bool", [2], {"max": 1.0, "min": 0.0, "mean": 0.5}, [True, False, None, None]),
    ("bool", [], {"max": 0.0, "min": 0.0}, [False, False, None, None]),
    ("complex64", [2], NUMBERS, [4.0, -2.0, 1.5, None]),
    ("complex128", [], NUMBERS, [4.0, -2.0, 1.5, None]),
    ("float32", [], {"max": -2.5, "min": -2.5, "mean": -2.5, "norm": 2.5}, [-2.5] * 4),
    ("float64", [], {"max": -2.5, "min": -2.5}, [-2.5] * 4),
    ("int32", [], {"max": -7.0, "min": -7.0, "norm": 7.0}, [-7] * 4),
    ("quint8", [2], NUMBERS, [4.0, -2.0, None, None]),
    ("qint32", [], {"max": 1.5, "min": 1.5}, [1.5] * 4),
    ("float8_e4m3fn", [2], NUMBERS, NONE),
    ("float4_e2m1fn_x2", [2], NUMBERS, NONE),
    ("float32", [0, 3], {"mean": math.nan, "norm": 0.0}, NONE),
    ("int64", [3, 0], {"max": 0.0, "min": 0.0}, NONE),
    ("float32", [2], {}, NONE),  # meta and fake tensors have no numbers
    ("float32", [2], {"max": math.nan, "min": -math.inf}, ["nan", -math.inf, None, None]),
    ("float32", [], {"max": math.inf}, [math.inf] * 4),
    ("int64", [2], {"max": 2.0**60, "value": '{"max": 1152921504606846977}'},
     [1152921504606846977, None, None, None]),
    ("int64", [], {"max": 2.0**60, "value": '{"max": 1152921504606846977}'},
     [1152921504606846977] * 4),
    ("uint64", [1], {"value": '{"max": 18446744073709551615, "mean": 1}'},
     [18446744073709551615, None, None, None]),
    ("float16", [2], NUMBERS | {"value": '{"norm": "inf", "mean": "nan"}'},
     [4.0, -2.0, "nan", math.inf]),
]  # fmt: skip


def statistics_of(entry):
    return [entry[key] for key in ("Max", "Min", "Mean", "Norm")]


@pytest.mark.parametrize(("dtype", "shape", "columns", "expected"), DTYPES)
def test_what_each_dtype_shows(rows, dtype, shape, columns, expected):
    entry = one_leaf(rows, rows.tensor(dtype, shape, **columns))
    assert statistics_of(entry) == expected
    assert list(map(type, statistics_of(entry))) == list(map(type, expected))


@pytest.mark.parametrize(
    ("dtype", "shape", "mean", "norm"),
    [("float32", [2], None, None), ("float32", [], 4.0, 4.0), ("complex64", [2], 1.5, None)],
)
def test_high_precision_shows_less(rows, dtype, shape, mean, norm):
    entry = one_leaf(rows, rows.tensor(dtype, shape, **NUMBERS), precision="high")
    assert statistics_of(entry)[:2] == [4.0, 4.0 if not shape else -2.0]
    assert statistics_of(entry)[2:] == [mean, norm]


EXTRA = {"extra": '{"device_mesh": [0, 1], "placements": [{"Replicate": {}}]}', "data_name": "t.pt"}
HEAD = ["type", "dtype", "shape"]
MORE = ["device_mesh", "placements", "data_name"]


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("statistics", [*HEAD, "Max", "Min", "Mean", "Norm", "requires_grad", *MORE]),
        ("md5", [*HEAD, "Max", "Min", "Mean", "Norm", "requires_grad", *MORE, "md5"]),
        ("xor", [*HEAD, "md5", "requires_grad", *MORE]),
    ],
)
def test_order_of_a_tensors_fields(rows, mode, keys):
    leaf = rows.tensor(checksum="0a1b2c3d", **NUMBERS, **EXTRA)
    entry = one_leaf(rows, leaf, summary_mode=mode)
    assert list(entry) == keys
    assert entry.get("md5") == (None if mode == "statistics" else "0a1b2c3d")
    assert entry["placements"] == [{"Replicate": {}}]


def test_missing_checksum_is_null(rows):
    assert one_leaf(rows, rows.tensor(), summary_mode="md5")["md5"] is None
    assert one_leaf(rows, rows.tensor(), summary_mode="xor")["md5"] is None


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        ({"form": "null", "value": '"set"'}, None),
        ({"form": "empty", "value": '"torch.float16"'}, {}),
        ({"form": "verbatim", "value": "[1, null]"}, [1, None]),
        (
            {"form": "scalar", "type": "float", "value": "1e999"},
            {"type": "float", "value": math.inf},
        ),
        ({"form": "scalar", "type": "str", "value": '"ä\\n"'}, {"type": "str", "value": "ä\n"}),
        ({"form": "scalar", "type": "str"}, {"type": "str", "value": None}),
        ({"form": "verbatim", "value": "NaN"}, "NaN"),
        ({"form": "verbatim", "value": '{"cut off'}, '{"cut off'),
    ],
)
def test_forms(rows, leaf, expected):
    assert one_leaf(rows, leaf) == expected


def test_modules_move_to_their_output_and_others_stay(rows):
    events = rows.Events()
    empty = {"input_args": []}
    events.data("Module.a.A.forward.0", "input", empty, kind="module")
    events.data("Torch.f.0.forward", "input", empty)
    events.data("Torch.g.0.forward", "input", empty)
    events.data("Torch.f.0.forward", "output", {"output": []})
    events.data("Module.raises.A.forward.0", "input", empty, kind="module")
    events.data("Module.a.A.forward.0", "output", {"output": []}, kind="module")
    records = data(events)
    names = ["Torch.f.0", "Torch.g.0", "Module.raises.A", "Module.a.A"]
    assert [name.split(".forward")[0] for name in records] == names
    assert list(records["Module.a.A.forward.0"]) == ["input_args", "output"]


def test_parameter_gradients_join_by_key(rows):
    events = rows.Events()
    name = "Module.fc.Linear.parameters_grad.0"
    grad = {"kind": "parameters_grad", "direction": None}
    events.data(name, "output", {"bias": [0]}, rows.tensor(max=1.0), **grad)
    events.data("Torch.f.0.backward", "output", {"output": []}, direction="backward")
    events.data(name, "output", {"weight": [0]}, rows.tensor(max=2.0), **grad)
    events.data(name, "output", {"bias": [0]}, rows.tensor(max=3.0), **grad)
    records = data(events)
    assert list(records) == ["Torch.f.0.backward", name]  # where its last gradient arrived
    assert {k: v[0]["Max"] for k, v in records[name].items()} == {"bias": 3.0, "weight": 2.0}


def test_saved_values_stand_alone_in_debug_json(rows):
    events = rows.Events()
    saved = {"kind": "save", "direction": None}
    events.data("x.0.debug", "output", 0, rows.tensor(max=1.0), **saved)
    events.data("x_grad.0.debug", "output", {"a": 0}, {"form": "null"}, **saved)
    events.data("n.0.debug", "output", 0, rows.scalar("int", "3"), **saved)
    events.data("x_grad.0.debug", "output", {"a": 0}, rows.scalar("int", "5"), **saved)
    documents = rendered(events, level="debug")
    records = json.loads(documents["debug.json"])["data"]
    assert list(documents) == ["debug.json"]
    assert list(records) == ["x.0.debug", "x_grad.0.debug", "n.0.debug"]
    assert records["x_grad.0.debug"] == {"a": {"type": "int", "value": 5}}


def test_only_forward_calls_have_stacks(rows):
    events = rows.Events()
    events.node("optimizer", kind="scope", direction=None)
    events.node("Torch.f.0.forward", stack=8, parent="optimizer")
    events.node("Torch.f.0.backward", direction="backward", stack=8)
    events.node("Torch.g.0.forward", stack=7)
    events.node("Torch.h.0.forward", stack=0)
    events.node("Torch.f.1.forward", stack=8)
    stacks = json.loads(rendered(events)["stack.json"])
    assert list(stacks) == ["0", "1"]
    assert stacks["0"][0] == ["Torch.f.0.forward", "Torch.f.1.forward"]
    assert stacks["0"][1] == ["stack text was not received"]
    assert stacks["1"] == [["Torch.g.0.forward"], FRAMES[7]]


def test_a_function_that_raised_has_a_stack(rows):
    """Its record has the input and no place in the call tree."""
    events = rows.Events()
    events.data("Torch.f.0.forward", "input", {"input_args": []}, stack=7)
    events.data("Torch.f.1.forward", "input", {"input_args": []}, stack=7)
    events.data("Torch.f.1.forward", "output", {"output": []}, stack=7)
    documents = rendered(events)
    (group,) = json.loads(documents["stack.json"]).values()
    assert group == [["Torch.f.0.forward", "Torch.f.1.forward"], FRAMES[7]]
    assert list(json.loads(documents["construct.json"])) == ["Torch.f.1.forward"]


def test_a_backward_stands_below_one_that_is_there(rows):
    """Of modules that ran again for a checkpoint, some never get a gradient."""
    events = rows.Events()
    module, back = {"kind": "module"}, {"direction": "backward"}
    events.node("Module.a.A.forward.1", **module)
    events.node("Module.a.b.B.forward.1", parent="Module.a.A.forward.1", **module)
    events.node("Torch.f.0.backward", parent="Module.a.b.B.backward.1", **back)
    events.node("Module.a.A.backward.1", **module, **back)
    events.node("Torch.g.0.backward", parent="Module.none.N.backward.0", **back)
    tree = json.loads(rendered(events)["construct.json"])
    assert tree["Torch.f.0.backward"] == "Module.a.A.backward.1"
    assert tree["Torch.g.0.backward"] is None


def test_deep_nesting(rows):
    structure = 0
    for _ in range(400):
        structure = {"down": [structure]}
    events = rows.Events()
    events.data("Torch.f.0.forward", "input", {"input_args": [structure]}, rows.scalar("int", "1"))
    found = data(events)["Torch.f.0.forward"]["input_args"][0]
    for _ in range(400):
        found = found["down"][0]
    assert found == {"type": "int", "value": 1}


def test_missing_rows_are_named(rows):
    events = rows.Events()
    events.data("Torch.f.0.forward", "input", {"input_args": [0, 1]}, rows.tensor())
    with pytest.raises(ValueError, match=r"Torch\.f\.0\.forward: its input event has 1 leaves"):
        rendered(events)


@pytest.mark.parametrize(
    ("value", "text"),
    [("NaN", b'"nan"'), (math.nan, b'"nan"'), ("inf", b"1e999"), (-math.inf, b"-1e999"), (2, b"2")],
)
def test_strict_json_for_special_numbers(value, text):
    assert orjson.dumps(json_number(value)) == text
