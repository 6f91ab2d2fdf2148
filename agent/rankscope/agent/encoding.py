"""How values that are no tensors are written: the forms that msProbe's dump.json has for them.

Every leaf is a (Leaf, JSON text) pair; the text is the leaf's value in the tables, and what
dump.json shows follows from the leaf's form (see `Form` in collector.proto).
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from rankscope.v1 import collector_pb2 as pb


class Leaf(NamedTuple):
    form: int
    type: str


Encoded = tuple[Leaf, str]

NULL = Leaf(pb.NULL, "NoneType")
SCALARS: dict[type, Leaf] = {
    kind: Leaf(pb.SCALAR, kind.__name__) for kind in (bool, int, float, str)
}
#: Mapping keys under which dtypes and devices are written out.
SPECIAL_KEYS = frozenset(("dtype", "output_dtype", "device"))

_MAX_TEXT = 65536


def scalar_json(value: bool | int | float | str) -> str:
    """Strict JSON: NaN is "nan", infinities are numbers that overflow. Very long strings
    are cut.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return '"nan"' if value != value else ("1e999" if value > 0 else "-1e999")
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        value = value[:_MAX_TEXT] + f"... ({len(value)} characters)"
    return json.dumps(value)


def key_text(key: object) -> str:
    """A mapping key as JSON would have it."""
    if isinstance(key, str):
        return str(key)
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    return str(key)


def by_key(key: str, value: Any) -> Encoded | None:
    """The encodings that depend on the key: dtypes and devices in keyword arguments. None: no
    special case.
    """
    if key == "device":
        if isinstance(value, torch.device):
            return Leaf(pb.SCALAR, "torch.device"), json.dumps(f"{value.type}:{value.index}")
        if isinstance(value, int | str) and not isinstance(value, bool):
            return Leaf(pb.SCALAR, "torch.device"), json.dumps(value)
    elif isinstance(value, torch.dtype):
        return Leaf(pb.SCALAR, "torch.dtype"), json.dumps(str(value))
    return None


def encode(value: Any) -> Encoded | list[Any] | dict[Any, Any]:
    """A leaf, or the list or dict that a container stands for. Tensors, None and plain scalars are
    not asked here.
    """
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)  # type: ignore[no-any-return]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=False))
    if isinstance(value, list | tuple):
        return list(value)
    # Before mappings: the outputs of model libraries are both, and as a mapping lack what is None.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value.items())
    for base, leaf in SCALARS.items():
        if isinstance(value, base):
            return leaf, scalar_json(base(value))
    if isinstance(value, np.generic):
        return Leaf(pb.SCALAR, str(value.dtype)), _json_of(value.item())
    if isinstance(value, np.ndarray):
        return Leaf(pb.VERBATIM, "numpy.ndarray"), json.dumps(_array(value))
    distributed = _distributed(value)
    return distributed if distributed is not None else _other(value)


def _slice(value: slice) -> Encoded:
    def member(x: Any) -> int | None:
        try:
            return None if x is None else int(x)
        except (TypeError, ValueError, RuntimeError):
            return None

    parts = [member(value.start), member(value.stop), member(value.step)]
    return Leaf(pb.SCALAR, "slice"), json.dumps(parts)


def _other(value: Any) -> Encoded:
    """Null in dump.json; the tables say what it was."""
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return Leaf(pb.NULL, name[:256]), ""


def _complex(value: complex) -> Encoded:
    return Leaf(pb.NULL, "complex"), json.dumps(str(value))


_ENCODERS: dict[type, Any] = {
    type(...): lambda _: (Leaf(pb.SCALAR, "ellipsis"), '"..."'),
    slice: _slice,
    complex: _complex,
    torch.Size: lambda v: (Leaf(pb.SCALAR, "torch.Size"), json.dumps([int(x) for x in v])),
    torch.memory_format: lambda v: (
        Leaf(pb.VERBATIM, "torch.memory_format"),
        json.dumps({"type": "torch.memory_format", "format": str(v).rpartition(".")[2]}),
    ),
    torch.dtype: lambda v: (Leaf(pb.EMPTY, "torch.dtype"), json.dumps(str(v))),
    torch.device: lambda v: (Leaf(pb.EMPTY, "torch.device"), json.dumps(str(v))),
}


def _array(value: np.ndarray) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "numpy.ndarray",
        "dtype": str(value.dtype),
        "shape": list(value.shape),
    }
    entry.update(dict.fromkeys(("Max", "Min", "Mean", "Norm")))
    if value.size and value.dtype.kind in "fiub":
        wide = value.astype(np.float64)
        figures = (value.max(), value.min(), wide.mean(), np.sqrt(np.square(wide).sum()))
        for key, figure in zip(("Max", "Min", "Mean", "Norm"), figures, strict=True):
            number = figure.item()
            entry[key] = number if math.isfinite(number) else str(number)
    return entry


def _json_of(value: Any) -> str:
    if isinstance(value, bool | int | float | str):
        return scalar_json(value)
    return json.dumps(str(value))


def _distributed(value: Any) -> Encoded | dict[str, Any] | None:
    """Process groups, reduce operations and point-to-point operations; torch.distributed is never
    imported for it.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return None
    if isinstance(value, dist.ProcessGroup):
        return Leaf(pb.VERBATIM, "torch.ProcessGroup"), json.dumps(_group(dist, value))
    if isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return Leaf(pb.SCALAR, "torch.distributed.ReduceOp"), json.dumps(str(value))
    if isinstance(value, dist.P2POp):
        return {
            "class_type": "torch.distributed.P2POp",
            "tensor": value.tensor,
            "op": value.op.__name__,
            "peer": value.peer,
            "tag": value.tag,
            "group_id": _group(dist, value.group)["group_id"] if value.group else None,
        }
    return None


def _group(dist: Any, group: Any) -> dict[str, Any]:
    """Ranks of a group and the CRC-32 of their list, which is msProbe's id of the group."""
    try:
        ranks = list(dist.get_process_group_ranks(group))
    except (ValueError, RuntimeError, KeyError):
        ranks = []
    return {
        "type": "torch.ProcessGroup",
        "group_ranks": ranks,
        "group_id": f"{zlib.crc32(str(ranks).encode()):08x}",
    }
