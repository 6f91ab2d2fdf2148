"""The tables of a run, one list of columns each.

A column may be added; none may be taken away, be renamed or change its type, or older stores could
not be read. Delta Lake types only (signed integers, no float16, no duration). `step` partitions
records and nodes.
"""

import pyarrow as pa

_text = pa.dictionary(pa.int32(), pa.string())

#: One row per leaf of an event (see collector.proto): what dump.json says and more.
RECORDS = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int32()),  # null until known; filled at the seal
        ("process", _text),  # process_uuid
        ("batch", pa.int64()),  # sequence of the batch it came in
        ("seq", pa.int64()),  # of the event, process-wide
        ("leaf", pa.int32()),  # position in the event
        ("record", _text),  # "Functional.linear.0.forward"
        ("kind", _text),  # api, module, parameters_grad, scope, save
        ("direction", _text),  # forward, backward, null
        ("part", _text),  # input_args, input_kwargs, output, parameters, input, parameters_grad
        ("path", _text),  # "0.pair.left"
        ("form", _text),  # tensor, scalar, verbatim, null, empty: how dump.json writes it
        ("type", _text),
        ("dtype", _text),  # null for non-tensors
        ("shape", pa.list_(pa.int64())),  # null for non-tensors
        ("requires_grad", pa.bool_()),
        ("max", pa.float64()),
        ("min", pa.float64()),
        ("mean", pa.float64()),
        ("norm", pa.float64()),
        ("sum", pa.float64()),
        ("sum_of_squares", pa.float64()),
        ("elements", pa.int64()),
        ("nan_count", pa.int64()),
        ("inf_count", pa.int64()),
        ("zero_count", pa.int64()),
        ("std", pa.float64()),
        ("samples", pa.list_(pa.float64())),  # equally spaced elements
        ("checksum", pa.string()),  # as dump.json writes it
        ("digest", pa.string()),  # hex, of a captured tensor
        ("data_name", pa.string()),  # file name under dump_tensor_data
        ("value", _text),  # JSON
        ("extra", _text),  # JSON object of further fields of a tensor entry
        ("stack", pa.int64()),  # stacks.stack
        ("parent", _text),
        ("object", _text),  # "Linear-2": which object a module is
        ("object_call", pa.int64()),
        ("time", pa.float64()),
    ]
)

#: One row per event: the record's place in the call tree and the outline of what it added to it.
NODES = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int32()),
        ("process", _text),
        ("batch", pa.int64()),
        ("seq", pa.int64()),
        ("record", _text),
        ("kind", _text),
        ("direction", _text),
        ("what", _text),  # node, input, output
        ("structure", _text),  # Outline.structure, null when the event has no data
        ("leaves", pa.int32()),  # number of rows in `records`
        ("stack", pa.int64()),
        ("parent", _text),
        ("object", _text),
        ("object_call", pa.int64()),
        ("time", pa.float64()),
    ]
)

#: One row per stack and process that saw it first.
STACKS = pa.schema([("process", _text), ("stack", pa.int64()), ("frames", pa.list_(pa.string()))])

#: One row per change of what is known about a process; the newest `revision` counts.
PROCESSES = pa.schema(
    [
        ("process", pa.string()),
        ("revision", pa.int64()),
        ("instance", pa.string()),  # one launch of the job into this run
        ("joined", pa.int64()),  # order of joining the run
        ("folder", pa.string()),  # rank{R}, proc{pid} or what keeps clashing ones apart
        ("rank", pa.int32()),
        ("rank_source", pa.string()),
        ("claimed_rank", pa.int32()),  # as the process itself numbers it
        ("replica", pa.int32()),  # with split_replicas
        ("clash", pa.string()),  # process it clashes with, or null
        ("world_size", pa.int32()),
        ("local_rank", pa.int32()),
        ("coordinates", pa.string()),  # JSON object
        ("tp", pa.int32()),
        ("pp", pa.int32()),
        ("dp", pa.int32()),
        ("ep", pa.int32()),
        ("cp", pa.int32()),
        ("group", pa.string()),
        ("host", pa.string()),
        ("boot_id", pa.string()),
        ("pid", pa.int64()),
        ("pid_namespace", pa.int64()),
        ("process_started", pa.float64()),
        ("attempt", pa.int32()),
        ("parent_process", pa.string()),
        ("parent_pid", pa.int64()),
        ("device", pa.string()),
        ("run_key", pa.string()),
        ("task", pa.string()),
        ("level", pa.string()),
        ("summary_mode", pa.string()),
        ("precision", pa.string()),
        ("extra_info", pa.bool_()),
        ("config", pa.string()),  # JSON
        ("versions", pa.string()),  # JSON object
        ("state", pa.string()),  # live, left, lost
        ("time", pa.float64()),
    ]
)

#: One row per thing that happened to a (step, process); readers take them together.
STEPS = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int32()),
        ("process", pa.string()),
        ("batch", pa.int64()),
        (
            "event",
            pa.string(),
        ),  # begin, pause, end, skipped, dropped, refused, sealed, left, removed
        (
            "events",
            pa.int64(),
        ),  # end: events the agent recorded; sealed: events stored; dropped: events lost
        ("reason", pa.string()),
        ("expected", pa.string()),  # sealed: JSON list of processes expected
        ("missing", pa.string()),  # sealed: JSON object process -> why
        ("agent_seconds", pa.float64()),  # end: the agent's own time on the job's threads
        ("wall_seconds", pa.float64()),  # end: of the whole step
        ("shed", pa.string()),  # end: what overhead_budget left out
        ("time", pa.float64()),
    ]
)

TABLES = {
    "records": RECORDS,
    "nodes": NODES,
    "stacks": STACKS,
    "processes": PROCESSES,
    "steps": STEPS,
}
PARTITIONED = ("records", "nodes")
