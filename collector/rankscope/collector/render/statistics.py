"""Which statistics dump.json prints for a dtype: one row a dtype, as msProbe prints them.

The tables hold every number; what is null here is null in msProbe's dump too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from . import columns

KEYS = ("max", "min", "mean", "norm")
JsonNumber = float | int | bool | str | orjson.Fragment | None
Mask = npt.NDArray[np.bool_]

INFINITY = orjson.Fragment(b"1e999")
MINUS_INFINITY = orjson.Fragment(b"-1e999")
_SPECIAL: dict[str, JsonNumber] = {"nan": "nan", "inf": INFINITY, "infinity": INFINITY}
_SPECIAL |= {"-inf": MINUS_INFINITY, "-infinity": MINUS_INFINITY}


class Shows(NamedTuple):
    """What is printed for a dtype: as which kind of number, and whether Mean and Norm are."""

    number: Literal["float", "int", "bool", "none"]
    mean: bool = False
    norm: bool = False
    value_when_0d: bool = False  # a 0-dim tensor shows its value in all four places


_FULL = Shows("float", mean=True, norm=True, value_when_0d=True)
_WIDE = Shows("float", value_when_0d=True)
_INTEGER = Shows("int", value_when_0d=True)
_COMPLEX = Shows("float", mean=True)
_NOTHING = Shows("none")

#: Dtypes not listed (float8, float4, bits) print null everywhere.
SHOWS: Mapping[str, Shows] = {
    "torch.float32": _FULL,
    "torch.float16": _FULL,
    "torch.bfloat16": _FULL,
    "torch.float64": _WIDE,
    "torch.int8": _INTEGER,
    "torch.int16": _INTEGER,
    "torch.int32": _INTEGER,
    "torch.int64": _INTEGER,
    "torch.uint8": _INTEGER,
    "torch.uint16": _INTEGER,
    "torch.uint32": _INTEGER,
    "torch.uint64": _INTEGER,
    "torch.bool": Shows("bool"),
    "torch.complex32": _COMPLEX,
    "torch.complex64": _COMPLEX,
    "torch.complex128": _COMPLEX,
    "torch.qint8": _WIDE,
    "torch.quint8": _WIDE,
    "torch.qint32": _WIDE,
    "torch.quint4x2": _WIDE,
    "torch.quint2x4": _WIDE,
}


def json_number(value: Any) -> JsonNumber:
    """A number as strict JSON that msProbe's tools read; the text "nan", "inf", "-inf" counts."""
    if isinstance(value, str):
        return _SPECIAL.get(value.lower(), value)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else INFINITY if value > 0 else MINUS_INFINITY
    return value  # type: ignore[no-any-return]


def printed(
    rows: pa.Table,
    lengths: npt.NDArray[np.int64],
    empty: Mask,
    overrides: Sequence[Mapping[str, Any] | None],
    high_precision: bool,
) -> list[list[JsonNumber]]:
    """Max, Min, Mean and Norm of every row as dump.json prints them, None for null.

    `lengths` is the number of dimensions, `empty` says which tensors have no element; an override
    (keys of KEYS) stands for the column of that name, exact where a float64 is not.
    """
    codes, dtypes = columns.coded(rows, "dtype")
    shows = [SHOWS.get(dtype or "", _NOTHING) for dtype in dtypes]

    def where(condition: Callable[[Shows], bool]) -> Mask:
        return np.array([condition(show) for show in shows], dtype=bool)[codes]

    some = ~empty & where(lambda show: show.number != "none")
    zero_dim = (lengths == 0) & where(lambda show: show.value_when_0d)
    sums = ~where(lambda show: high_precision and show.value_when_0d)
    allowed = {
        "max": some,
        "min": some,
        "mean": some & (zero_dim | (sums & where(lambda show: show.mean))),
        "norm": some & (zero_dim | (sums & where(lambda show: show.norm))),
    }
    integer, boolean = (
        where(lambda show: show.number == "int"),
        where(lambda show: show.number == "bool"),
    )
    peak = columns.numbers(rows, "max")
    lists = []
    for key in KEYS:
        values, valid = peak if key == "max" else columns.numbers(rows, key)
        values, valid = np.where(zero_dim, peak[0], values), np.where(zero_dim, peak[1], valid)
        lists.append(_as_json(values, valid & allowed[key], integer, boolean))
    for row, override in enumerate(overrides):
        if override is not None:
            _override(row, override, lists, allowed, bool(zero_dim[row]))
    return lists


def _as_json(
    values: npt.NDArray[np.float64], shown: Mask, integer: Mask, boolean: Mask
) -> list[JsonNumber]:
    result: list[JsonNumber] = values.tolist()
    finite = np.isfinite(values)
    for i in np.flatnonzero(~shown).tolist():
        result[i] = None
    for i in np.flatnonzero(shown & ~finite).tolist():
        result[i] = json_number(result[i])
    for i in np.flatnonzero(shown & finite & integer).tolist():
        result[i] = int(values[i])
    for i in np.flatnonzero(shown & finite & boolean).tolist():
        result[i] = bool(values[i])
    return result


def _override(
    row: int,
    override: Mapping[str, Any],
    lists: list[list[JsonNumber]],
    allowed: Mapping[str, Mask],
    zero_dim: bool,
) -> None:
    for key, numbers in zip(KEYS, lists, strict=True):
        if not allowed[key][row]:
            continue
        if key in override:
            numbers[row] = json_number(override[key])
        elif zero_dim and "max" in override:
            numbers[row] = json_number(override["max"])
