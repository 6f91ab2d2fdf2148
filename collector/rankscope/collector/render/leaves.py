"""One JSON entry for each row of `records`: what stands in dump.json at the place of that leaf."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from . import columns, statistics

COLUMNS = ["form", "type", "dtype", "shape", "requires_grad", *statistics.KEYS]
COLUMNS += ["checksum", "data_name", "value", "extra", "nan_count", "inf_count", "std", "samples"]


def entries(rows: pa.Table, summary_mode: str, high_precision: bool) -> list[Any]:
    """The entry of each row, in order; equal rows may share one, so none is to be changed.

    `summary_mode` "nan_check" stands for the task of that name: tensors have `is_nan` alone.
    """
    forms = columns.texts(rows, "form")
    values = columns.texts(rows, "value")
    types = columns.texts(rows, "type")
    fragments = {text: None if text is None else raw_json(text) for text in set(values)}
    tensors = iter(_detailed(_tensors(rows, forms, values, summary_mode, high_precision), rows))
    scalars: dict[tuple[str | None, str | None], dict[str, Any]] = {}
    result: list[Any] = []
    for form, kind, value in zip(forms, types, values, strict=True):
        tensor = next(tensors)
        if form == "tensor":
            result.append(tensor)
        elif form == "scalar":
            entry = scalars.get((kind, value))
            if entry is None:
                entry = scalars[kind, value] = {"type": kind, "value": fragments[value]}
            result.append(entry)
        elif form == "verbatim":
            result.append(fragments[value])
        else:
            result.append({} if form == "empty" else None)
    return result


def raw_json(text: str) -> orjson.Fragment:
    """The text as it stands; what is not strict JSON is written as a JSON string."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return orjson.Fragment(orjson.dumps(text))
    return orjson.Fragment(text.encode())


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _tensors(
    rows: pa.Table,
    forms: list[str | None],
    values: list[str | None],
    summary_mode: str,
    high_precision: bool,
) -> Iterable[dict[str, Any]]:
    shapes, lengths = columns.shapes(rows, "shape")
    heads = zip(columns.texts(rows, "type"), columns.texts(rows, "dtype"), shapes, strict=True)
    checksums = columns.plain(rows, "checksum")
    tails = zip(
        columns.plain(rows, "requires_grad"),
        columns.converted(rows, "extra", orjson.loads),
        columns.plain(rows, "data_name"),
        checksums,
        strict=True,
    )
    if summary_mode == "nan_check":
        return _with_is_nan(heads, not_finite(rows), tails)
    if summary_mode == "xor":
        return _with_checksums(heads, tails)
    overrides = [
        _object(value) if form == "tensor" and value is not None else None
        for form, value in zip(forms, values, strict=True)
    ]
    empty = np.fromiter((0 in shape for shape in shapes), dtype=bool, count=len(shapes))
    numbers = zip(*statistics.printed(rows, lengths, empty, overrides, high_precision), strict=True)
    return _with_statistics(heads, numbers, tails, with_checksum=summary_mode == "md5")


def _object(text: str) -> dict[str, Any] | None:
    value = json.loads(text)
    return value if isinstance(value, dict) else None


def _with_statistics(
    heads: Iterable[Any], numbers: Iterable[Any], tails: Iterable[Any], with_checksum: bool
) -> Iterable[dict[str, Any]]:
    for (kind, dtype, shape), (high, low, mean, norm), (grad, extra, name, checksum) in zip(
        heads, numbers, tails, strict=True
    ):
        entry = {
            "type": kind,
            "dtype": dtype,
            "shape": shape,
            "Max": high,
            "Min": low,
            "Mean": mean,
            "Norm": norm,
            "requires_grad": grad,
        }
        if extra is not None or name is not None:
            _add(entry, extra, name)
        if with_checksum:
            entry["md5"] = checksum
        yield entry


def not_finite(rows: pa.Table) -> list[int]:
    """Of each row: whether it is a tensor that holds NaN or infinity, as 0 or 1."""
    counts = [columns.numbers(rows, name)[0] for name in ("nan_count", "inf_count")]
    flags: list[int] = (np.nan_to_num(sum(counts)) > 0).astype(int).tolist()
    return flags


def _with_is_nan(
    heads: Iterable[Any], flags: Iterable[int], tails: Iterable[Any]
) -> Iterable[dict[str, Any]]:
    for (kind, dtype, shape), flag, (grad, extra, name, _) in zip(heads, flags, tails, strict=True):
        entry = {
            "type": kind,
            "dtype": dtype,
            "shape": shape,
            "is_nan": flag,
            "requires_grad": grad,
        }
        _add(entry, extra, name)
        yield entry


def _with_checksums(heads: Iterable[Any], tails: Iterable[Any]) -> Iterable[dict[str, Any]]:
    for (kind, dtype, shape), (grad, extra, name, checksum) in zip(heads, tails, strict=True):
        entry = {
            "type": kind,
            "dtype": dtype,
            "shape": shape,
            "md5": checksum,
            "requires_grad": grad,
        }
        _add(entry, extra, name)
        yield entry


def _detailed(tensors: Iterable[dict[str, Any]], rows: pa.Table) -> Iterable[dict[str, Any]]:
    """The entries with the figures that msProbe does not have, where they were asked for."""
    if rows["std"].null_count == rows["samples"].null_count == rows.num_rows:
        return tensors
    figures = zip(columns.plain(rows, "std"), columns.plain(rows, "samples"), strict=True)
    return (_with_details(entry, *pair) for entry, pair in zip(tensors, figures, strict=True))


def _with_details(
    entry: dict[str, Any], std: float | None, samples: list[float] | None
) -> dict[str, Any]:
    if std is not None:
        entry["std"] = statistics.json_number(std)
    if samples is not None:
        entry["samples"] = [statistics.json_number(sample) for sample in samples]
    return entry


def _add(entry: dict[str, Any], extra: dict[str, Any] | None, name: str | None) -> None:
    entry.update(extra or {})
    if name is not None:
        entry["data_name"] = name
