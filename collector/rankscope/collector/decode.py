"""From the bytes of a batch to Arrow tables, column by column, believing nothing the bytes say.

Every length, id and enum number is checked with numpy before Arrow sees it, because Arrow believes
what it is told. No Python object is made per row: leaves are gathered from their outlines.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError

from rankscope.collector.blobs.digest import DIGEST_BYTES
from rankscope.collector.blobs.names import FILE_NAME, safe_names
from rankscope.collector.columns import Ids, Rows, Texts, read_ids, sparse_texts
from rankscope.collector.events import MAX_INT64, Events, Expansion
from rankscope.collector.outlines import FORMS, NEEDS_VALUE, MalformedBatch, parse_json
from rankscope.collector.schema import NODES, RECORDS, STACKS
from rankscope.collector.statistics import Statistics
from rankscope.collector.wire import MOST_PARTS, Malformed, count_parts
from rankscope.v1 import collector_pb2 as pb

__all__ = ["DecodedBatch", "MalformedBatch", "decode", "refused_batch"]

_NEEDS_VALUE = np.isin(np.arange(max(FORMS) + 1), NEEDS_VALUE)
_NO_STACKS = STACKS.empty_table()
_EMPTY = pa.scalar("", pa.string())
_MAX_BLOB_DIMENSIONS = 100
_MAX_DATA_NAME_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class DecodedBatch:
    """One batch as tables (schemas RECORDS, NODES, STACKS) and what else it says in `message`."""

    process: str
    sequence: int
    records: pa.Table
    nodes: pa.Table
    stacks: pa.Table
    message: pb.Batch
    steps_seen: tuple[int, ...]  # distinct steps of the events, ascending

    @property
    def event_count(self) -> int:
        return int(self.nodes.num_rows)


def refused_batch(process: str, sequence: int) -> DecodedBatch:
    """Stands for a malformed batch that was set aside: once committed, its sequence is handled."""
    return _decode(pb.Batch(), process, sequence, summary_mode="")


def decode(payload: bytes, *, process: str, sequence: int, summary_mode: str) -> DecodedBatch:
    """The tables of a serialized Batch; raises MalformedBatch for whatever is wrong in it.

    `summary_mode` says how checksums are written; a Recording in the batch itself wins.
    """
    try:
        parts = sum(count_parts(payload).values())
        if parts > MOST_PARTS:
            raise MalformedBatch("batch", f"more than {MOST_PARTS} steps, drops, stacks and blobs")
        message = pb.Batch.FromString(payload)
    except (DecodeError, Malformed) as error:
        raise MalformedBatch("batch", f"no Batch message: {error}") from None
    _check_message(message)
    return _decode(message, process, sequence, message.recording.summary_mode or summary_mode)


def _decode(message: pb.Batch, process: str, sequence: int, summary_mode: str) -> DecodedBatch:
    events = Events(message.columns, process, sequence)
    return DecodedBatch(
        process,
        sequence,
        records=_records_table(events, message.columns, summary_mode),
        nodes=_nodes_table(events),
        stacks=_stacks_table(message, process),
        message=message,
        steps_seen=events.steps,
    )


def _check_message(message: pb.Batch) -> None:
    for event in message.steps:
        if event.step < 0:
            raise MalformedBatch("steps.step", f"{event.step} is negative")
        if not pb.StepEvent.BEGIN <= event.kind <= pb.StepEvent.SKIPPED:
            raise MalformedBatch("steps.kind", f"{event.kind} is no kind of step event")
        _check_count("steps.events", event.events)
    for drop in message.drops:
        if drop.step < 0:
            raise MalformedBatch("drops.step", f"{drop.step} is negative")
        _check_count("drops.events", drop.events)
    if message.rank.rank < 0:
        raise MalformedBatch("rank.rank", f"{message.rank.rank} is negative")
    if any(stack.id == 0 for stack in message.stacks):
        raise MalformedBatch("stacks.id", "0 stands for no stack")
    for blob in message.blobs:
        _check_blob(blob)


def _check_blob(blob: pb.Blob) -> None:
    """Its dtype goes into a pickle and its file name into a path: both are letters and digits."""
    if len(blob.digest) != DIGEST_BYTES:
        raise MalformedBatch("blobs.digest", f"{len(blob.digest)} bytes, {DIGEST_BYTES} expected")
    if not re.fullmatch(r"torch\.[a-z0-9_]{1,40}", blob.dtype):
        raise MalformedBatch("blobs.dtype", f"{blob.dtype[:80]!r} is no dtype of torch")
    if not FILE_NAME.fullmatch(blob.file):
        raise MalformedBatch("blobs.file", f"{blob.file[:80]!r} is no name of a tensor file")
    elements = math.prod(blob.shape)
    if len(blob.shape) > _MAX_BLOB_DIMENSIONS or min(blob.shape, default=0) < 0:
        raise MalformedBatch("blobs.shape", f"{list(blob.shape)[:80]} is no shape")
    if not 0 < blob.size <= MAX_INT64 or not elements or blob.size % elements:
        raise MalformedBatch("blobs.size", f"{blob.size} bytes of {elements} elements")
    if blob.offset > MAX_INT64:
        raise MalformedBatch("blobs.offset", f"{blob.offset} is above 2^63 - 1")


def _check_count(field: str, count: int) -> None:
    if count > MAX_INT64:
        raise MalformedBatch(field, f"{count} is above 2^63 - 1")


def _stacks_table(message: pb.Batch, process: str) -> pa.Table:
    if not message.stacks:
        return _NO_STACKS
    rows = [
        {"process": process, "stack": stack.id, "frames": list(stack.frames)}
        for stack in message.stacks
    ]
    return pa.Table.from_pylist(rows, schema=STACKS)


def _nodes_table(events: Events) -> pa.Table:
    columns = events.node_columns()
    return pa.Table.from_arrays([columns[name] for name in NODES.names], schema=NODES)


def _records_table(events: Events, wire: pb.Columns, summary_mode: str) -> pa.Table:
    leaves = Expansion(events)
    values = [parse_json(text, "columns.values") for text in wire.values]
    value_ids = read_ids("leaf_value", wire.leaf_value, leaves.count, len(values) + 1)
    _check_values(leaves, value_ids)
    elements = leaves.templates.elements(leaves.position)
    statistics = Statistics(wire, leaves.tensors, elements, value_ids, values)
    columns: dict[str, Any] = events.arrow_columns(leaves.event)
    columns |= leaves.arrow_columns()
    columns |= statistics.arrow_columns(summary_mode)
    columns["value"] = Texts(wire.values).take_optional(value_ids)
    columns["data_name"] = _data_names(events, leaves, statistics.captured)
    return pa.Table.from_arrays([columns[name] for name in RECORDS.names], schema=RECORDS)


def _check_values(leaves: Expansion, value_ids: Ids) -> None:
    if np.any(_NEEDS_VALUE[leaves.form] & (value_ids == 0)):
        raise MalformedBatch("columns.leaf_value", "a SCALAR or VERBATIM leaf has no value")


def _data_names(events: Events, leaves: Expansion, captured: Rows) -> pa.Array:
    if not len(captured):
        return pa.nulls(leaves.count, pa.string())
    names = events.names_at(leaves.event[captured])
    suffixes, positions = leaves.templates.suffixes, pa.array(leaves.position[captured])
    size = sum(
        pc.sum(pc.binary_length(texts).take(ids)).as_py()
        for texts, ids in ((names.dictionary, names.indices), (suffixes, positions))
    )
    if size > _MAX_DATA_NAME_BYTES:
        raise MalformedBatch("columns.names", f"{size} bytes of file names")
    texts = pc.binary_join_element_wise(names.dictionary_decode(), suffixes.take(positions), _EMPTY)
    return sparse_texts(safe_names(texts), captured, leaves.count)
