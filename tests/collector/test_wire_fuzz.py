"""Whatever bytes come in a batch, they are decoded or refused, and nothing else happens."""

import pytest
from batches import linear_batch
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.collector import answers
from rankscope.collector.decode import MalformedBatch, decode
from rankscope.collector.run_names import MOST_BYTES, folder_name, run_of
from rankscope.collector.schema import NODES, RECORDS
from rankscope.collector.wire import Malformed, count_parts, read_message
from rankscope.v1 import collector_pb2 as pb

GOOD = linear_batch(1, 3, events=5).SerializeToString()
COLUMNS = [field.name for field in pb.Columns.DESCRIPTOR.fields]
MANY = settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_refusal(error):
    """It names what is wrong."""
    assert error.field
    assert error.reason


def check(payload):
    """Decoded tables are as the schema says and agree with each other; else it is refused."""
    try:
        decoded = decode(payload, process="a" * 32, sequence=1, summary_mode="statistics")
    except MalformedBatch as error:
        return check_refusal(error)
    decoded.records.validate(full=True)
    decoded.nodes.validate(full=True)
    assert decoded.records.schema.equals(RECORDS)
    assert decoded.nodes.schema.equals(NODES)
    assert sum(decoded.nodes["leaves"].to_pylist()) == decoded.records.num_rows
    assert all(step >= 0 for step in decoded.steps_seen)


@MANY
@given(st.binary(max_size=300))
def test_any_bytes(payload):
    check(payload)


@MANY
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=6))
def test_a_good_batch_with_bytes_changed(changes):
    payload = bytearray(GOOD)
    for at, value in changes:
        payload[at] = value
    check(bytes(payload))


@MANY
@given(st.sampled_from(COLUMNS), st.binary(max_size=64), st.integers(0, 2**32 - 1))
def test_a_good_batch_with_one_column_replaced(name, data, number):
    batch = pb.Batch.FromString(GOOD)
    field = pb.Columns.DESCRIPTOR.fields_by_name[name]
    values = {field.TYPE_BYTES: data, field.TYPE_STRING: data.hex()}
    value = values.get(field.type, number)
    setattr(batch.columns, name, value) if not field.label == field.LABEL_REPEATED else getattr(
        batch.columns, name
    ).append(value)
    check(batch.SerializeToString())


@MANY
@given(st.binary(max_size=200))
def test_any_message_off_a_stream(data):
    try:
        read_message(data)
        count_parts(data)
    except (DecodeError, Malformed):
        pass


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_names_of_runs_become_folders_and_come_back(one, other):
    for run in (one, other):
        name = folder_name(run)
        assert 0 < len(name.encode()) <= MOST_BYTES
        assert "/" not in name
        assert not name.startswith((".", "-"))
        assert not name.endswith((".rankscope", "."))
        assert run_of(name) in (run, None)
    assert (one == other) == (folder_name(one) == folder_name(other))


@pytest.mark.parametrize(
    ("accepted", "sequence", "drops", "expected"),
    [
        (4, 5, [], True),
        (4, 4, [], False),
        (4, 6, [], False),
        (4, 8, [(5, 7)], True),
        (4, 8, [(7, 7), (5, 6)], True),
        (4, 8, [(5, 5), (7, 7)], False),
        (0, 2**63, [(1, 2**63 - 1)], True),
        (0, 2**63, [(1, 2**62)] * 1000, False),
    ],
)
def test_a_gap_is_allowed_only_where_drops_name_all_of_it(accepted, sequence, drops, expected):
    counts = [pb.DropCount(first_sequence=first, last_sequence=last) for first, last in drops]
    assert answers.follows(accepted, sequence, pb.Batch(drops=counts)) is expected
