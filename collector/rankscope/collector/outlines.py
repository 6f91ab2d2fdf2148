"""Outlines: the shapes of events' data, parsed once per distinct serialized message."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
from google.protobuf.message import DecodeError

from rankscope.v1 import collector_pb2 as pb

FORMS = {
    pb.TENSOR: "tensor",
    pb.SCALAR: "scalar",
    pb.VERBATIM: "verbatim",
    pb.NULL: "null",
    pb.EMPTY: "empty",
}
NEEDS_VALUE = (pb.SCALAR, pb.VERBATIM)

#: How a part is called in the name of a saved tensor; None leaves it out.
_FILE_PARTS = {
    "input_args": "input",
    "input_kwargs": "kwargs",
    "parameters_grad": None,
    "save": None,
}
_MAX_DIMENSIONS = 256
_MAX_INT64 = 2**63 - 1
_CACHED_BYTES = 4 * 1024

#: Columns of leaf templates.
TEMPLATES = pa.schema(
    [
        ("part", pa.string()),
        ("path", pa.string()),
        ("type", pa.string()),
        ("dtype", pa.string()),
        ("extra", pa.string()),
        ("file_suffix", pa.string()),  # what follows the record's name in data_name
        ("shape", pa.list_(pa.int64())),
        ("requires_grad", pa.bool_()),
        ("elements", pa.int64()),
    ]
)


class MalformedBatch(ValueError):
    """A payload that is no valid Batch: names the field and why. Sending it again cannot help."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True, eq=False)
class ParsedOutline:
    """One outline: its structure text and its leaf templates as columns."""

    structure: str
    templates: pa.RecordBatch
    forms: npt.NDArray[np.uint8]

    @property
    def leaves(self) -> int:
        return len(self.forms)


def parse_outline(serialized: bytes) -> ParsedOutline:
    """The outline of these bytes; raises MalformedBatch. Small ones are remembered."""
    if len(serialized) > _CACHED_BYTES:
        return _parse(serialized)
    return _parse_cached(serialized)


def parse_json(text: str, field: str) -> Any:
    """The value of a strict JSON text, which may hold 1e999; raises MalformedBatch."""
    try:
        return orjson.loads(text)
    except ValueError:
        pass
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise MalformedBatch(field, f"{text[:80]!r} is no JSON: {error}") from None
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse(serialized: bytes) -> ParsedOutline:
    try:
        outline = pb.Outline.FromString(serialized)
    except DecodeError as error:
        raise MalformedBatch("outlines", f"no Outline message: {error}") from None
    _check_structure(outline.structure, len(outline.leaves))
    rows = [_template(leaf) for leaf in outline.leaves]
    forms = np.fromiter((leaf.form for leaf in outline.leaves), np.uint8, len(rows))
    return ParsedOutline(
        outline.structure, pa.RecordBatch.from_pylist(rows, schema=TEMPLATES), forms
    )


_parse_cached = lru_cache(maxsize=4096)(_parse)


def _template(leaf: pb.LeafTemplate) -> dict[str, Any]:
    if leaf.form not in FORMS:
        raise MalformedBatch("outlines.leaves.form", f"{leaf.form} is none of {sorted(FORMS)}")
    names = [_FILE_PARTS.get(leaf.part, leaf.part), leaf.path]
    row: dict[str, Any] = {
        "part": leaf.part,
        "path": leaf.path,
        "type": leaf.type,
        "file_suffix": "." + ".".join([name for name in names if name] + ["pt"]),
    }
    if leaf.form == pb.TENSOR:
        row |= {
            "dtype": leaf.dtype,
            "shape": list(leaf.shape),
            "requires_grad": leaf.requires_grad,
            "elements": _elements(leaf.shape),
            "extra": _extra(leaf.extra_json),
        }
    return row


def _elements(shape: Any) -> int:
    if len(shape) > _MAX_DIMENSIONS:
        reason = f"{len(shape)} dimensions, at most {_MAX_DIMENSIONS}"
        raise MalformedBatch("outlines.leaves.shape", reason)
    if any(size < 0 for size in shape):
        raise MalformedBatch("outlines.leaves.shape", f"negative size in {list(shape)}")
    elements: int = math.prod(shape)
    if elements > _MAX_INT64:
        raise MalformedBatch("outlines.leaves.shape", f"{list(shape)} has more than 2^63 elements")
    return elements


def _extra(text: str) -> str | None:
    if text and not isinstance(parse_json(text, "outlines.leaves.extra_json"), dict):
        raise MalformedBatch("outlines.leaves.extra_json", f"{text[:80]!r} is no JSON object")
    return text or None


def _check_structure(text: str, leaves: int) -> None:
    numbers = sorted(_numbers(parse_json(text, "outlines.structure")))
    if numbers != list(range(leaves)):
        reason = f"{text[:80]!r} does not hold each of its {leaves} leaves once"
        raise MalformedBatch("outlines.structure", reason)


def _numbers(structure: Any) -> Iterator[int]:
    pending = [structure]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, bool | float):
            raise MalformedBatch("outlines.structure", f"{item!r} is no number of a leaf")
        elif isinstance(item, int):
            yield item
