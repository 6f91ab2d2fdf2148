"""Batches made by hand, as an agent would send them."""

import json
from dataclasses import dataclass, field

import numpy as np

from rankscope.v1 import collector_pb2 as pb

EVERY_FLAG = pb.HAS_RANGE | pb.HAS_SUMS | pb.HAS_COUNTS


@dataclass
class Leaf:
    """One leaf: its template, its JSON value (as text) and, for a tensor, its statistics."""

    part: str
    path: str
    form: int = pb.TENSOR
    type: str = "torch.Tensor"
    value: str = ""
    dtype: str = "torch.float32"
    shape: tuple = (2, 3)
    requires_grad: bool = True
    extra_json: str = ""
    flags: int = EVERY_FLAG
    numbers: dict = field(default_factory=dict)  # max, min, sum, sum_of_squares, *_count, checksum
    samples: tuple = ()  # numbers has their sample_count

    def template(self):
        is_tensor = self.form == pb.TENSOR
        more = {"dtype": self.dtype, "shape": self.shape, "requires_grad": self.requires_grad}
        more |= {"extra_json": self.extra_json}
        return pb.LeafTemplate(
            part=self.part,
            path=self.path,
            form=self.form,
            type=self.type,
            **(more if is_tensor else {}),
        )


@dataclass
class Event:
    """One event; `structure` None means no data, else a JSON value with leaf numbers."""

    name: str
    what: int = pb.INPUT
    structure: object = None
    leaves: tuple = ()
    step: int = 0
    kind: int = pb.API
    direction: int = pb.FORWARD
    parent: str = ""
    stack: int = 0
    time: float = 1.5


_TENSOR_COLUMNS = {
    "max": "<f8",
    "min": "<f8",
    "sum": "<f8",
    "sum_of_squares": "<f8",
    "nan_count": "<i8",
    "inf_count": "<i8",
    "zero_count": "<i8",
    "checksum": "<u8",
    "digest": "<u4",
    "std": "<f8",
    "sample_count": "<u2",
}
_OPTIONAL = ("checksum", "digest", "std", "sample_count")


def columns(events, first_event=0, digests=()):
    """A Columns message of these events."""
    leaves = [leaf for event in events for leaf in event.leaves]
    tensors = [leaf for leaf in leaves if leaf.form == pb.TENSOR]
    names = _distinct([e.name for e in events] + [e.parent for e in events if e.parent])
    outlines = [_outline(event) for event in events]
    distinct_outlines = _distinct([outline for outline in outlines if outline])
    values = _distinct([leaf.value for leaf in leaves if leaf.value])
    message = pb.Columns(
        first_event=first_event,
        event_count=len(events),
        names=names,
        outlines=distinct_outlines,
        values=values,
        digests=digests,
        event_step=_bytes([e.step for e in events], "<i8"),
        event_name=_bytes([names.index(e.name) for e in events], "<u4"),
        event_what=_bytes([e.what for e in events], "u1"),
        event_kind=_bytes([e.kind for e in events], "u1"),
        event_direction=_bytes([e.direction for e in events], "u1"),
        event_outline=_ids(outlines, distinct_outlines),
        event_parent=_ids([e.parent for e in events], names),
        event_stack=_bytes([e.stack for e in events], "<i8"),
        event_time=_bytes([e.time for e in events], "<f8"),
        leaf_value=_ids([leaf.value for leaf in leaves], values),
        flags=_bytes([leaf.flags for leaf in tensors], "u1"),
    )
    for name, dtype in _TENSOR_COLUMNS.items():
        if name in _OPTIONAL and not any(name in leaf.numbers for leaf in tensors):
            continue
        numbers = [leaf.numbers.get(name, 0) for leaf in tensors]
        setattr(message, name, _bytes(numbers, dtype))
    message.samples = _bytes([number for leaf in tensors for number in leaf.samples], "<f8")
    return message


def batch(events, first_event=0, digests=(), **more):
    """A Batch message; `more` are its other fields."""
    return pb.Batch(columns=columns(events, first_event, digests), **more)


def linear_batch(sequence, step, events=4, maximum=1.0):
    """A batch of `events` linear calls, each with one tensor and one int; no two are equal."""
    made = [
        Event(
            f"Functional.linear.{number}.forward",
            structure={"input_args": [0, 1]},
            leaves=(
                Leaf("input_args", "0", numbers={"max": maximum, "sum": float(sequence)}),
                Leaf("input_args", "1", form=pb.SCALAR, type="int", value=str(number)),
            ),
            step=step,
            stack=7,
        )
        for number in range(events)
    ]
    first_event = (sequence - 1) * events
    stacks = [pb.Stack(id=7, frames=["File a.py, line 1"])] if sequence == 1 else []
    return batch(made, first_event, stacks=stacks)


def _outline(event):
    if event.structure is None:
        return b""
    outline = pb.Outline(
        structure=json.dumps(event.structure), leaves=[leaf.template() for leaf in event.leaves]
    )
    return outline.SerializeToString(deterministic=True)


def _distinct(items):
    return list(dict.fromkeys(items))


def _ids(items, known):
    return _bytes([known.index(item) + 1 if item else 0 for item in items], "<u4")


def _bytes(numbers, dtype):
    return np.array(numbers, dtype).tobytes()
