"""From bytes to tables: every form and derived column, and else nothing but MalformedBatch."""

import math

import numpy as np
import pytest
from batches import EVERY_FLAG, Event, Leaf, batch, linear_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.collector import schema
from rankscope.collector.decode import MalformedBatch, decode, refused_batch
from rankscope.v1 import collector_pb2 as pb

PROCESS = "a" * 32


def decoded(message, summary_mode="statistics", sequence=1):
    return decode(
        message.SerializeToString(),
        process=PROCESS,
        sequence=sequence,
        summary_mode=summary_mode,
    )


def record_rows(*leaves, summary_mode="statistics", name="Functional.f.0.forward", **event):
    numbers = list(range(len(leaves)))
    made = Event(name, structure={"input_args": numbers}, leaves=leaves, **event)
    return decoded(batch([made]), summary_mode).records.to_pylist()


def test_every_column_of_a_tensor_leaf():
    numbers = {"max": 3.0, "min": -1.0, "sum": 6.0, "sum_of_squares": 16.0}
    numbers |= {"nan_count": 1, "inf_count": 2, "zero_count": 3}
    leaf = Leaf("input_args", "0", numbers=numbers, extra_json='{"device_mesh": [0, 1]}')
    event = Event(
        "Functional.linear.0.forward",
        structure={"input_args": [0]},
        leaves=(leaf,),
        step=5,
        parent="Module.fc.Linear.forward.0",
        stack=-9,
    )
    batch_ = decoded(batch([event], first_event=40), sequence=3)
    assert batch_.records.schema == schema.RECORDS
    assert batch_.records.to_pylist() == [
        {
            "step": 5,
            "rank": None,
            "process": PROCESS,
            "batch": 3,
            "seq": 40,
            "leaf": 0,
            "record": "Functional.linear.0.forward",
            "kind": "api",
            "direction": "forward",
            "part": "input_args",
            "path": "0",
            "form": "tensor",
            "type": "torch.Tensor",
            "dtype": "torch.float32",
            "shape": [2, 3],
            "requires_grad": True,
            "max": 3.0,
            "min": -1.0,
            "mean": 1.0,
            "norm": 4.0,
            "sum": 6.0,
            "sum_of_squares": 16.0,
            "elements": 6,
            "nan_count": 1,
            "inf_count": 2,
            "zero_count": 3,
            "std": None,
            "samples": None,
            "checksum": None,
            "digest": None,
            "data_name": None,
            "value": None,
            "extra": '{"device_mesh": [0, 1]}',
            "stack": -9,
            "parent": "Module.fc.Linear.forward.0",
            "object": None,
            "object_call": None,
            "time": 1.5,
        }
    ]


def test_forms_without_a_tensor_have_only_their_value():
    rows = record_rows(
        Leaf("input_args", "0", form=pb.SCALAR, type="int", value="3"),
        Leaf("input_args", "1", form=pb.VERBATIM, type="torch.Size", value='{"type": "x"}'),
        Leaf("input_args", "2", form=pb.NULL, type="NoneType"),
        Leaf("input_args", "3", form=pb.EMPTY, type="torch.dtype", value='"torch.int8"'),
        Leaf("input_args", "4"),
    )
    said = [(row["form"], row["type"], row["value"], row["leaf"]) for row in rows]
    assert said == [
        ("scalar", "int", "3", 0),
        ("verbatim", "torch.Size", '{"type": "x"}', 1),
        ("null", "NoneType", None, 2),
        ("empty", "torch.dtype", '"torch.int8"', 3),
        ("tensor", "torch.Tensor", None, 4),
    ]
    for row in rows[:4]:
        for column in ("dtype", "shape", "requires_grad", "max", "elements", "nan_count", "extra"):
            assert row[column] is None
    assert rows[4]["max"] == 0.0


def test_nodes_have_every_event_and_leaf_rows_follow_their_events():
    leaf = Leaf("output", "0")
    events = [
        Event("Module.fc.Linear.forward.0", pb.NODE, kind=pb.MODULE),
        Event("Module.fc.Linear.forward.0", pb.INPUT, {"input_args": [0, [1]]}, (leaf, leaf)),
        Event("optimizer", pb.NODE, kind=pb.SCOPE, direction=pb.DIRECTION_NONE, step=1),
        Event("Module.fc.Linear.backward.0", pb.OUTPUT, {"output": [0]}, (leaf,), step=1),
    ]
    made = decoded(batch(events, first_event=10))
    assert made.nodes.schema == schema.NODES
    assert made.event_count == 4
    assert made.steps_seen == (0, 1)
    columns = ("seq", "what", "kind", "direction", "structure", "leaves", "step")
    assert [tuple(row[c] for c in columns) for row in made.nodes.to_pylist()] == [
        (10, "node", "module", "forward", None, 0, 0),
        (11, "input", "api", "forward", '{"input_args": [0, [1]]}', 2, 0),
        (12, "node", "scope", None, None, 0, 1),
        (13, "output", "api", "forward", '{"output": [0]}', 1, 1),
    ]
    rows = made.records.select(["seq", "leaf", "step"]).to_pydict()
    assert rows == {"seq": [11, 11, 13], "leaf": [0, 1, 0], "step": [0, 0, 1]}


def test_flags_decide_which_statistics_are_known():
    numbers = dict.fromkeys(("max", "min", "sum", "sum_of_squares", "nan_count"), 9)
    rows = record_rows(
        *(
            Leaf("input_args", str(flags), flags=flags, numbers=numbers)
            for flags in (0, pb.HAS_RANGE, pb.HAS_SUMS, pb.HAS_COUNTS)
        )
    )
    known = [{c for c in ("max", "sum", "mean", "norm", "nan_count") if row[c]} for row in rows]
    assert known == [set(), {"max"}, {"sum", "mean", "norm"}, {"nan_count"}]


def test_nan_and_infinity_are_values_and_not_nulls():
    numbers = {"max": math.nan, "min": -math.inf, "sum": math.nan, "sum_of_squares": math.inf}
    (row,) = record_rows(Leaf("input_args", "0", numbers=numbers))
    assert math.isnan(row["max"])
    assert math.isnan(row["mean"])
    assert (row["min"], row["norm"]) == (-math.inf, math.inf)


def test_a_tensor_without_elements_has_no_mean():
    (row,) = record_rows(Leaf("input_args", "0", shape=(0, 4)))
    assert (row["elements"], row["mean"], row["sum"]) == (0, None, 0.0)
    (row,) = record_rows(Leaf("input_args", "0", shape=()))
    assert (row["elements"], row["shape"], row["mean"]) == (1, [], 0.0)


def test_checksums_are_written_as_the_summary_mode_says():
    leaves = (
        Leaf("input_args", "0", flags=pb.HAS_CHECKSUM, numbers={"checksum": 0xABC}),
        Leaf("input_args", "1", flags=0),
    )
    md5 = record_rows(*leaves, summary_mode="md5")
    assert [row["checksum"] for row in md5] == ["00000abc", None]
    xor = record_rows(*leaves, summary_mode="xor")
    assert [row["checksum"] for row in xor] == ["0x0000000000000abc", None]


def test_a_recording_in_the_batch_decides_how_checksums_are_written():
    leaf = Leaf("input_args", "0", flags=pb.HAS_CHECKSUM, numbers={"checksum": 5})
    event = Event("Torch.f.0.forward", structure=[0], leaves=(leaf,))
    made = decoded(batch([event], recording=pb.Recording(summary_mode="md5")), "xor")
    assert made.records["checksum"].to_pylist() == ["00000005"]


def test_figures_that_were_asked_for():
    tensors = [
        Leaf(
            "input_args", "0", numbers={"std": 0.5, "sample_count": 3}, samples=(1.0, math.nan, 2.0)
        ),
        Leaf("input_args", "1", form=pb.NULL),
        Leaf("input_args", "2", numbers={"std": math.nan}),
        Leaf("input_args", "3", flags=0, numbers={"std": 7.0}),
        Leaf("input_args", "4", numbers={"std": 1.5, "sample_count": 1}, samples=(-3.0,)),
    ]
    rows = record_rows(*tensors)
    np.testing.assert_equal(
        [row["samples"] for row in rows], [[1.0, math.nan, 2.0], None, None, None, [-3.0]]
    )
    np.testing.assert_equal([row["std"] for row in rows], [0.5, None, math.nan, None, 1.5])


def test_objects_of_events():
    names = [f"Module.{name}.Linear.forward.0" for name in "ab"]
    message = batch([Event(name, pb.NODE, kind=pb.MODULE) for name in names])
    message.columns.objects.append("Linear-2")
    message.columns.event_object = ids(0, 1)
    message.columns.event_object_call = ids(0, 9, dtype="<i8")
    nodes = decoded(message).nodes.to_pylist()
    assert [(n["object"], n["object_call"]) for n in nodes] == [(None, None), ("Linear-2", 9)]


@pytest.mark.parametrize(
    ("name", "part", "path", "expected"),
    [
        ("Functional.f.0.forward", "input_args", "1", "Functional.f.0.forward.input.1.pt"),
        ("Functional.f.0.forward", "input_kwargs", "a.b", "Functional.f.0.forward.kwargs.a.b.pt"),
        ("Functional.f.0.forward", "output", "0.x", "Functional.f.0.forward.output.0.x.pt"),
        ("Functional.f.0.backward", "input", "0", "Functional.f.0.backward.input.0.pt"),
        ("Module.m.M.forward.0", "parameters", "w", "Module.m.M.forward.0.parameters.w.pt"),
        ("Module.m.parameters_grad.0", "parameters_grad", "w", "Module.m.parameters_grad.0.w.pt"),
    ],
)  # fmt: skip
def test_captured_tensors_are_named_as_their_files(name, part, path, expected):
    captured = Leaf(part, path, flags=EVERY_FLAG | pb.IS_CAPTURED)
    rows = record_rows(Leaf(part, "other"), captured, name=name)
    assert [row["data_name"] for row in rows] == [None, expected]


def test_digests_are_hex():
    leaves = (Leaf("output", "0", numbers={"digest": 1}), Leaf("output", "1"))
    event = Event("Torch.f.0.forward", structure=[0, 1], leaves=leaves)
    made = decoded(batch([event], digests=[bytes(range(32))]))
    assert made.records["digest"].to_pylist() == [bytes(range(32)).hex(), None]


def test_a_tensors_own_value_overrides_its_columns():
    rows = record_rows(
        Leaf("input_args", "0", flags=0, value='{"max": true, "min": "nan", "norm": "-inf"}'),
        Leaf("input_args", "1", numbers={"max": 5.0, "sum": 6.0}, value='{"mean": null}'),
        Leaf("input_args", "2", numbers={"max": 5.0, "sum": 6.0}, value='{"max": -2, "other": []}'),
        Leaf("input_args", "3", form=pb.SCALAR, value='{"max": -2}'),
    )
    assert [row["max"] for row in rows] == [1.0, 5.0, -2.0, None]
    assert [row["mean"] for row in rows] == [None, None, 1.0, None]
    assert math.isnan(rows[0]["min"])
    assert rows[0]["norm"] == -math.inf
    assert rows[0]["value"] == '{"max": true, "min": "nan", "norm": "-inf"}'


def test_a_value_may_be_an_infinity_as_strict_json_writes_it():
    (row,) = record_rows(Leaf("input_args", "0", form=pb.SCALAR, type="float", value="-1e999"))
    assert row["value"] == "-1e999"


def test_equal_texts_in_a_dictionary_are_stored_as_one():
    message = batch([Event("Torch.f.0.forward"), Event("Torch.g.0.forward")])
    message.columns.names[1] = "Torch.f.0.forward"
    column = decoded(message).nodes["record"]
    assert column.to_pylist() == ["Torch.f.0.forward"] * 2
    assert column.chunk(0).dictionary.to_pylist() == ["Torch.f.0.forward"]


def test_stacks_and_a_batch_without_events():
    message = pb.Batch(
        stacks=[pb.Stack(id=-3, frames=["inner", "outer"])],
        steps=[pb.StepEvent(step=2, kind=pb.StepEvent.END, events=7)],
    )
    made = decoded(message)
    assert made.stacks.schema == schema.STACKS
    assert made.stacks.to_pylist() == [
        {"process": PROCESS, "stack": -3, "frames": ["inner", "outer"]}
    ]
    assert made.message.steps[0].events == 7
    assert (made.event_count, made.steps_seen, made.records.num_rows) == (0, (), 0)


def test_a_refused_batch_is_empty_and_keeps_its_sequence():
    made = refused_batch(PROCESS, 12)
    assert (made.process, made.sequence, made.event_count) == (PROCESS, 12, 0)
    assert made.records.schema == schema.RECORDS


def ids(*numbers, dtype="<u4"):
    return np.array(numbers, dtype).tobytes()


def set_column(**columns):
    def spoil(message):
        for name, data in columns.items():
            setattr(message.columns, name, data)

    return spoil


def set_outline(**fields):
    def spoil(message):
        outline = pb.Outline.FromString(message.columns.outlines[0])
        for name, value in fields.items():
            if name == "structure":
                outline.structure = value
            elif name == "shape":
                outline.leaves[0].shape[:] = value
            else:
                setattr(outline.leaves[0], name, value)
        message.columns.outlines[0] = outline.SerializeToString()

    return spoil


def set_value(text, leaf=1):
    def spoil(message):
        message.columns.values[:] = [text, "1"]
        message.columns.leaf_value = ids(0, 1) if leaf else ids(1, 2)

    return spoil


def add(field, **values):
    return lambda message: getattr(message, field).add(**values)


# One event whose leaves are a tensor and an int.
MALFORMED = [
    (set_column(event_count=2), "event_step"),
    (set_column(event_count=2**32 - 1), "event_step"),
    (set_column(event_step=ids(-1, dtype="<i8")), "event_step"),
    (set_column(event_step=b""), "event_step"),
    (set_column(first_event=2**63), "first_event"),
    (set_column(event_name=ids(1)), "event_name"),
    (set_column(event_name=ids(0)[:3]), "event_name"),
    (set_column(event_parent=ids(2)), "event_parent"),
    (set_column(event_outline=ids(2)), "event_outline"),
    (set_column(event_outline=ids(0)), "leaf_value"),
    (set_column(event_what=b"\0"), "event_what"),
    (set_column(event_what=b"\4"), "event_what"),
    (set_column(event_what=b"\1"), "event_outline"),
    (set_column(event_kind=b"\0"), "event_kind"),
    (set_column(event_kind=b"\6"), "event_kind"),
    (set_column(event_direction=b"\3"), "event_direction"),
    (set_column(event_stack=b"\0" * 7), "event_stack"),
    (set_column(event_time=b""), "event_time"),
    (set_column(leaf_value=ids(0, 2)), "leaf_value"),
    (set_column(leaf_value=ids(0, 0)), "leaf_value"),
    (set_column(leaf_value=ids(0)), "leaf_value"),
    (set_column(flags=b"\x20"), "flags"),
    (set_column(flags=b""), "flags"),
    (set_column(max=b""), "columns.max"),
    (set_column(sum_of_squares=b"\0" * 16), "sum_of_squares"),
    (set_column(nan_count=ids(-1, dtype="<i8")), "nan_count"),
    (set_column(flags=b"\x08"), "checksum"),
    (set_column(flags=b"\x08", checksum=ids(2**32, dtype="<u8")), "checksum"),
    (set_column(checksum=b"\0"), "checksum"),
    (set_column(digest=ids(1)), "digest"),
    (set_column(std=b"\0" * 4), "columns.std"),
    (set_column(sample_count=b"\2\0"), "columns.samples"),
    (set_column(sample_count=b"\2"), "sample_count"),
    (set_column(event_object=ids(1)), "event_object"),
    (set_column(event_object=ids(0)), "event_object_call"),
    (lambda message: message.columns.digests.append(b"short"), "digests"),
    (lambda message: message.columns.outlines.append(b"\xff"), "outlines"),
    (set_outline(form=0), "form"),
    (set_outline(form=6), "form"),
    (set_outline(shape=[-1]), "shape"),
    (set_outline(shape=[2**62, 4]), "shape"),
    (set_outline(shape=[1] * 300), "shape"),
    (set_outline(extra_json="[]"), "extra_json"),
    (set_outline(extra_json="{"), "extra_json"),
    (set_outline(structure=""), "structure"),
    (set_outline(structure="[0]"), "structure"),
    (set_outline(structure="[0, 1, 1]"), "structure"),
    (set_outline(structure="[0, 1, 2]"), "structure"),
    (set_outline(structure="[0, 1, true]"), "structure"),
    (set_outline(structure="[0, 1, 0.5]"), "structure"),
    (set_outline(structure="[" * 100_000), "structure"),
    (set_value("{"), "values"),
    (set_value("NaN"), "values"),
    (set_value('["\\ud800", 1e999]'), "values"),
    (set_value("[" * 100_000), "values"),
    (set_value("3", leaf=0), "values"),
    (set_value('{"max": "big"}', leaf=0), "values"),
    (set_value('{"max": []}', leaf=0), "values"),
    (add("steps", step=-1, kind=1), "steps.step"),
    (add("steps", step=1, kind=0), "steps.kind"),
    (add("steps", step=1, kind=9), "steps.kind"),
    (add("steps", step=1, kind=3, events=2**63), "steps.events"),
    (add("drops", step=-1), "drops.step"),
    (add("drops", events=2**64 - 1), "drops.events"),
    (add("stacks", id=0), "stacks.id"),
    (lambda message: setattr(message.rank, "rank", -1), "rank.rank"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "field"), MALFORMED)
def test_whatever_is_wrong_is_named(spoil, field):
    message = linear_batch(1, step=0, events=1)
    decoded(message, "md5")
    spoil(message)
    with pytest.raises(MalformedBatch, match=field.replace(".", r"\.")):
        decoded(message, "md5")


def test_an_outline_cannot_blow_up_to_more_rows_than_allowed():
    leaves = tuple(Leaf("input_args", str(i), form=pb.NULL) for i in range(1000))
    message = batch([Event("Torch.f.0.forward", pb.INPUT, list(range(1000)), leaves)] * 5)
    count = 5001
    for name, width in [("step", 8), ("name", 4), ("parent", 4), ("stack", 8), ("time", 8)]:
        setattr(message.columns, f"event_{name}", bytes(width * count))
    for name in ("what", "kind", "direction"):
        setattr(message.columns, f"event_{name}", b"\2" * count)
    message.columns.event_outline = ids(*[1] * count)
    message.columns.event_count = count
    with pytest.raises(MalformedBatch, match="5001000 leaves"):
        decoded(message)


def test_file_names_cannot_blow_up():
    leaf = Leaf("output", "x" * 1_000_000, flags=pb.IS_CAPTURED)
    event = Event("Torch.f.0.forward", structure=[0], leaves=(leaf,))
    with pytest.raises(MalformedBatch, match="file names"):
        decoded(batch([event] * 300))


def test_more_steps_than_allowed():
    message = batch([Event("Torch.f.0.forward", pb.NODE, step=i) for i in range(10_001)])
    with pytest.raises(MalformedBatch, match="event_step: 10001"):
        decoded(message)


def _valid_payload():
    captured = Leaf(
        "output",
        "0",
        flags=31,
        numbers={"checksum": 3, "digest": 1, "max": 1.0, "std": 2.0, "sample_count": 2},
        samples=(1.0, 5.0),
        value='{"max": 2}',
        extra_json='{"a": 1}',
    )
    message = linear_batch(1, step=3, events=3)
    message.MergeFrom(
        pb.Batch(steps=[pb.StepEvent(step=3, kind=2)], drops=[pb.DropCount(step=3, events=1)])
    )
    other = batch([Event("Torch.f.0.forward", pb.OUTPUT, [0], (captured,))], digests=[b"d" * 32])
    return [message.SerializeToString(), other.SerializeToString()]


VALID = _valid_payload()


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_mutilated_payloads_raise_nothing_but_malformed_batch(data):
    payload = bytearray(data.draw(st.sampled_from(VALID)))
    for _ in range(data.draw(st.integers(0, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(payload)) | st.just(len(payload)))
    try:
        made = decode(bytes(payload[:end]), process=PROCESS, sequence=1, summary_mode="xor")
    except MalformedBatch:
        return
    made.records.validate(full=True)
    made.nodes.validate(full=True)
    made.stacks.validate(full=True)
    assert made.records.schema == schema.RECORDS
    assert sum(made.nodes["leaves"].to_pylist()) == made.records.num_rows


@settings(max_examples=200, deadline=None)
@given(payload=st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_malformed_batch(payload):
    try:
        decode(payload, process=PROCESS, sequence=1, summary_mode="md5")
    except MalformedBatch:
        pass
