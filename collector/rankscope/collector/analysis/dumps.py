"""Dump directories, msProbe's or ours, as rows of `records`.

dump.json says which records there were and in which order they ended; a module stands there after
everything that ran inside it. Sequence numbers are made from that order: the inputs of record i
have 2i, its outputs 2i+1. Gradients of a module's parameters stand before its backward record
although they follow from it, so that record's place is moved before theirs.
"""

import gc
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

DOCUMENTS = ("dump.json", "debug.json")
_FOLDER = re.compile(r"(?:rank|proc)(\d+)")
_MODULE = re.compile(r"Module\..+\.(forward|backward|parameters_grad)\.\d+$")
_PARTS = ("input_args", "input_kwargs", "output", "parameters", "input")
_INPUTS = ("input_args", "input_kwargs", "input")
_HEAD = (
    "type",
    "dtype",
    "shape",
    "Max",
    "Min",
    "Mean",
    "Norm",
    "requires_grad",
    "data_name",
    "md5",
)
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_SCALARS = {"bool", "int", "float", "str"}


class Found(NamedTuple):
    """A folder with a dump.json: of which step and place."""

    step: int
    place: int
    folder: Path


@dataclass(frozen=True)
class Read:
    """Rows of `records` with a column `place`, and what the headers say."""

    table: pa.Table
    nodes: list[dict[str, Any]]
    task: str
    level: str
    summary_mode: str
    frames: Mapping[int, Sequence[str]]


def find(path: Path) -> list[Found]:
    """The dumps below a dump path, a step folder, a rank folder or a dump.json; [] without any."""
    if path.is_file():
        return [Found(_step(path.parent.parent), _rank(path.parent) or 0, path.parent)]
    if _holds(path):
        return [Found(_step(path.parent), _rank(path) or 0, path)]
    steps = [path] if re.fullmatch(r"step\d+", path.name) else sorted(path.glob("step*"))
    result = []
    for step in steps:
        folders = sorted((p for p in step.iterdir() if _holds(p)) if step.is_dir() else ())
        known = {p: _rank(p) for p in folders}
        free = max((rank for rank in known.values() if rank is not None), default=-1) + 1
        for folder in folders:
            rank = known[folder]
            if rank is None:
                rank, free = free, free + 1
            result.append(Found(_step(step), rank, folder))
    return result


def read(found: Sequence[Found]) -> Read:
    """All the dumps; ValueError names a file that cannot be read."""
    rows = _Rows()
    task = level = ""
    collecting = gc.isenabled()
    gc.disable()  # of so many new objects none is part of a cycle
    try:
        for one in found:
            document = load(next(one.folder / n for n in DOCUMENTS if (one.folder / n).exists()))
            task, level = document.get("task", "statistics"), document.get("level", "")
            rows.add(one, document["data"])
    finally:
        if collecting:
            gc.enable()
    mode = "statistics"
    if any(c is not None for c in rows.columns["checksum"]):
        mode = "md5" if any(m is not None for m in rows.columns["max"]) else "xor"
    return Read(rows.table(), rows.nodes, task, level, mode, rows.frames)


def load(path: Path) -> dict[str, Any]:
    """A JSON object; msProbe's bare NaN and Infinity are read as well."""
    content = path.read_bytes()
    try:
        try:
            document = orjson.loads(content)
        except orjson.JSONDecodeError:
            document = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return document


def kind_of(record: str) -> tuple[str, str | None]:
    """Kind and direction of a record, from its name."""
    if match := _MODULE.match(record):
        if match[1] == "parameters_grad":
            return "parameters_grad", "backward"
        return "module", match[1]
    if record.endswith(".debug"):
        return "save", None
    return "api", "backward" if record.endswith(".backward") else "forward"


def number(value: Any) -> float | None:
    """A statistic of dump.json as a number: strings such as "nan" count."""
    if type(value) is float:  # nearly all are
        return value
    if value is None or isinstance(value, list | dict):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


class _Rows:
    """Columns that grow by one dump after another."""

    NAMES = (
        "step", "place", "process", "seq", "leaf", "record", "kind", "direction", "part", "path",
        "form", "type", "dtype", "shape", "requires_grad", "max", "min", "mean", "norm", "elements",
        "nan_count", "checksum", "data_name", "value", "extra", "stack", "parent",
    )  # fmt: skip

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in self.NAMES}
        self.nodes: list[dict[str, Any]] = []
        self.frames: dict[int, Sequence[str]] = {}
        self._rows: list[tuple[Any, ...]] = []

    def add(self, found: Found, data: Mapping[str, Any]) -> None:
        parents = _document(found.folder / "construct.json")
        stack_of: dict[str, int] = {}
        for names, frames in _document(found.folder / "stack.json").values():
            stack = zlib.crc32("\n".join(frames).encode())
            self.frames[stack] = frames
            stack_of.update(dict.fromkeys(names, stack))
        process = f"{found.place:032x}"
        starts = _starts(list(data))
        for index, (record, fields) in enumerate(data.items()):
            kind, direction = kind_of(record)
            parent = parents.get(record)
            head = (found.step, found.place, process)
            tail = (stack_of.get(record), parent[0] if isinstance(parent, list) else parent)
            leaf = 0
            named = {"save": fields} if kind == "save" else fields
            for part, content in named.items():
                if kind == "parameters_grad":
                    part, content = "parameters_grad", {part: content}
                seq = 2 * starts.get(record, index) if part in _INPUTS else 2 * index + 1
                for path, value in _leaves(content):
                    if kind == "parameters_grad":
                        path = path.removesuffix(".0")
                    where = (*head, seq, leaf, record, kind, direction, part, path)
                    self._rows.append((*where, *_entry(value), *tail))
                    leaf += 1

    def table(self) -> pa.Table:
        from .. import schema

        columns: list[Any] = list(zip(*self._rows, strict=True)) or [()] * len(self.NAMES)
        for name, column in zip(self.NAMES, columns, strict=True):
            self.columns[name] = list(column)
        arrays = {}
        for name, column in self.columns.items():
            kind = pa.int64() if name == "place" else schema.RECORDS.field(name).type
            arrays[name] = pa.array(column, pa.string() if pa.types.is_dictionary(kind) else kind)
        rows = len(self._rows)
        for field in schema.RECORDS:
            if field.name not in arrays:
                arrays[field.name] = pa.nulls(rows, field.type)
        return pa.table(arrays)


def _starts(records: Sequence[str]) -> dict[str, float]:
    """Where the inputs of backward module records belong: before their parameters' gradients."""
    result: dict[str, float] = {}
    first_gradient: dict[str, int] = {}
    for index, record in enumerate(records):
        if ".parameters_grad." in record and record.startswith("Module."):
            first_gradient.setdefault(record.split(".parameters_grad.")[0], index)
        elif ".backward." in record and record.startswith("Module."):
            module = record.rsplit(".backward.", 1)[0]
            if module in first_gradient:
                result[record] = first_gradient.pop(module)
    return result


def _leaves(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, list):
        items: list[tuple[Any, Any]] = list(enumerate(content))
    elif isinstance(content, dict) and not _is_leaf(content):
        items = list(content.items())
    else:
        yield path, content
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _is_leaf(content: Mapping[str, Any]) -> bool:
    kind = content.get("type")
    return not content or (isinstance(kind, str) and len(content) > 1)


def _entry(value: Any) -> tuple[Any, ...]:
    """form, type, dtype, shape, requires_grad, max, min, mean, norm, elements, nan_count, checksum,
    data_name, value, extra."""
    if value is None:
        return ("null", *[None] * 14)
    if not isinstance(value, dict):
        return ("verbatim", *[None] * 12, _json(value), None)
    if not value:
        return ("empty", *[None] * 14)
    kind = value["type"]
    if "shape" in value and "dtype" in value:
        return _tensor(value, kind)
    if kind in _SCALARS and "value" in value:
        return ("scalar", kind, *[None] * 11, _json(value["value"]), None)
    return ("verbatim", kind, *[None] * 11, _json(value), None)


def _tensor(value: Mapping[str, Any], kind: str) -> tuple[Any, ...]:
    get = value.get
    shape = value["shape"]
    elements = 1
    for size in shape:
        elements *= size
    high, low, mean, norm = (number(get(k)) for k in _STATISTICS)
    if norm is not None and not shape:
        norm = abs(norm)
    nan = None if high is None else int(high != high)
    known = len(_STATISTICS) + 4 + ("data_name" in value) + ("md5" in value)
    more = {k: v for k, v in value.items() if k not in _HEAD} if len(value) > known else None
    checksum = get("md5")
    return (
        "tensor", kind, value["dtype"], shape, get("requires_grad"), high, low, mean, norm,
        elements, nan, None if checksum is None else str(checksum), get("data_name"), None,
        _json(more) if more else None,
    )  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value)


def _document(path: Path) -> dict[str, Any]:
    return load(path) if path.exists() else {}


def _holds(folder: Path) -> bool:
    return any((folder / name).exists() for name in DOCUMENTS)


def _step(folder: Path) -> int:
    match = re.fullmatch(r"step(\d+)", folder.name)
    return int(match[1]) if match else 0


def _rank(folder: Path) -> int | None:
    match = re.fullmatch(r"rank(\d+)", folder.name)
    return int(match[1]) if match else None
