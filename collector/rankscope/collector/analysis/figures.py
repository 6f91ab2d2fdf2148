"""Differences of leaves that belong together, and one number for how far a leaf is off.

The *error* of a leaf is the largest of these, where both sides have the number:

- max, min, samples   difference / largest absolute value of either side
- mean                difference / root mean square of the elements, since sums cancel
- norm                difference / the larger norm
- numbers that are no tensors: difference / the larger one

It is 0 when everything is equal, infinite when the leaves cannot be compared (`Hard` says why).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from .elementwise import Errors
from .pairing import Ints, Pairs, Texts, texts

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
STATISTICS = ("max", "min", "mean", "norm")


class Hard(IntFlag):
    """Why two leaves differ whatever their numbers."""

    NONE = 0
    ONLY_A = 1  # B has no such leaf
    ONLY_B = 2
    NAN = 4  # NaN on one side only
    INF = 8  # infinite on one side only, or with another sign
    SHAPE = 16
    DTYPE = 32
    FORM = 64  # a tensor here, another value or nothing there
    VALUE = 128  # a value that is no number differs
    REQUIRES_GRAD = 256
    CONTENT = 512  # checksums or digests differ


@dataclass(frozen=True)
class Figures:
    """One row a pair. Statistics are NaN where a side has none; `there` says which."""

    pairs: Pairs
    a: dict[str, Floats]
    b: dict[str, Floats]
    there: dict[str, Bools]  # both sides have the statistic
    error: Floats
    hard: Ints
    is_tensor: Bools
    dtype: tuple[Ints, Ints]
    dtypes: list[str]
    soft: Bools  # a mask: booleans, or -inf on both sides
    value: tuple[Ints, Ints]
    values: list[str]
    whole: Mapping[int, Errors]  # by row


def figures(
    a: pa.Table,
    b: pa.Table,
    pairs: Pairs,
    equal_nan: bool = True,
    whole: Mapping[tuple[int, int], Errors] | None = None,
) -> Figures:
    """Compare all pairs. `equal_nan`: NaN on both sides is equal. `whole` has the errors of whole
    tensors by pair of rows."""
    both = (pairs.a >= 0) & (pairs.b >= 0)
    dtype, form, value = (texts(a, b, name) for name in ("dtype", "form", "value"))
    dtype_a, dtype_b = _taken(dtype.a, pairs.a), _taken(dtype.b, pairs.b)
    form_a, form_b = _taken(form.a, pairs.a), _taken(form.b, pairs.b)
    value_a, value_b = _taken(value.a, pairs.a), _taken(value.b, pairs.b)
    is_tensor = _is(form, form_a, "tensor") | _is(form, form_b, "tensor")
    tensors = both & _is(form, form_a, "tensor") & _is(form, form_b, "tensor")

    stats_a = {name: _numbers(a, name, pairs.a) for name in STATISTICS}
    stats_b = {name: _numbers(b, name, pairs.b) for name in STATISTICS}
    there = {name: tensors & stats_a[name][1] & stats_b[name][1] for name in STATISTICS}
    va = {name: stats_a[name][0] for name in STATISTICS}
    vb = {name: stats_b[name][0] for name in STATISTICS}
    count = _numbers(a, "elements", pairs.a)[0]
    error, hard = _statistic_errors(va, vb, there, count, equal_nan)
    hard[pairs.b < 0] |= Hard.ONLY_A
    hard[pairs.a < 0] |= Hard.ONLY_B
    hard[both & (form_a != form_b)] |= Hard.FORM
    hard[tensors & (dtype_a != dtype_b)] |= Hard.DTYPE
    hard[tensors & _different_shapes(a, b, pairs)] |= Hard.SHAPE
    hard[tensors & _different_flags(a, b, pairs)] |= Hard.REQUIRES_GRAD

    zeros_a, known_a = _numbers(a, "zero_count", pairs.a)
    zeros_b, known_b = _numbers(b, "zero_count", pairs.b)
    boolean = _is(dtype, dtype_a, "torch.bool") & _is(dtype, dtype_b, "torch.bool")
    counted = tensors & boolean & known_a & known_b
    zero_error = np.abs(zeros_a - zeros_b) / np.maximum(count, 1)
    error = np.where(counted, np.maximum(error, zero_error), error)
    soft = tensors & (boolean | (np.isneginf(va["min"]) & np.isneginf(vb["min"])))

    samples = tensors & (hard & (Hard.SHAPE | Hard.DTYPE) == 0)
    sampled = _sample_errors(a, b, pairs, samples, va, vb)
    error = np.fmax(error, sampled)
    elements = _whole(pairs, whole or {}, error)
    _compare_values(form, form_a, form_b, value, value_a, value_b, both, a, pairs, error, hard)
    equal, different = _same_content(a, b, pairs, tensors)
    keep = ~int(Hard.NAN | Hard.INF) if equal_nan else -1
    error[equal], hard[equal] = 0.0, hard[equal] & keep
    hard[different] |= Hard.CONTENT
    return Figures(
        pairs, va, vb, there, error, hard, is_tensor, (dtype_a, dtype_b), dtype.names, soft,
        (value_a, value_b), value.names, elements,
    )  # fmt: skip


def _whole(
    pairs: Pairs, whole: Mapping[tuple[int, int], Errors], error: Floats
) -> Mapping[int, Errors]:
    """Errors of whole tensors by row, after raising `error` where they say more."""
    if not whole:
        return {}
    keys = zip(pairs.a.tolist(), pairs.b.tolist(), strict=True)
    found = {row: whole[key] for row, key in enumerate(keys) if key in whole}
    for row, one in found.items():
        if one.max_absolute > 0 and one.largest > 0:
            error[row] = max(error[row], one.max_absolute / one.largest)
    return found


def _statistic_errors(
    va: dict[str, Floats],
    vb: dict[str, Floats],
    there: dict[str, Bools],
    count: Floats,
    equal_nan: bool,
) -> tuple[Floats, Ints]:
    rows = len(count)
    error, hard = np.zeros(rows), np.zeros(rows, np.int64)
    with np.errstate(all="ignore"):
        largest = np.zeros(rows)
        for name in ("max", "min"):
            for side in (va, vb):
                value = np.abs(side[name])
                largest = np.where(np.isfinite(value), np.maximum(largest, value), largest)
        norm = np.fmax(np.abs(va["norm"]), np.abs(vb["norm"]))
        rms = norm / np.sqrt(np.maximum(count, 1))
        mean = np.fmax(np.abs(va["mean"]), np.abs(vb["mean"]))
        # dump.json has no norm of some types: there the largest element stands for it.
        usual = np.where(np.isfinite(rms) & (rms > 0), np.maximum(rms, mean), largest)
        scales = {"max": largest, "min": largest, "mean": usual, "norm": norm}
        for name in STATISTICS:
            x, y = va[name], vb[name]
            nan = np.isnan(x) != np.isnan(y)
            if not equal_nan:
                nan |= np.isnan(x) | np.isnan(y)
            infinite = (np.isinf(x) | np.isinf(y)) & (x != y) & ~(np.isnan(x) | np.isnan(y))
            hard[there[name] & nan] |= Hard.NAN
            hard[there[name] & infinite] |= Hard.INF
            relative = np.where(x == y, 0.0, np.abs(x - y) / scales[name])
            valid = there[name] & np.isfinite(relative)
            error = np.where(valid, np.maximum(error, relative), error)
    return error, hard


def _sample_errors(
    a: pa.Table,
    b: pa.Table,
    pairs: Pairs,
    wanted: Bools,
    va: dict[str, Floats],
    vb: dict[str, Floats],
) -> Floats:
    """Largest difference of the samples of a row, relative to the largest element; NaN without."""
    result = np.full(len(pairs.a), np.nan)
    flat_a, starts_a, sizes_a = _lists(a["samples"])
    flat_b, starts_b, sizes_b = _lists(b["samples"])
    if not len(flat_a) or not len(flat_b):
        return result
    rows = np.flatnonzero(wanted)
    rows = rows[(sizes_a[pairs.a[rows]] > 0) & (sizes_a[pairs.a[rows]] == sizes_b[pairs.b[rows]])]
    if not len(rows):
        return result
    sizes = sizes_a[pairs.a[rows]]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    x = flat_a[np.repeat(starts_a[pairs.a[rows]], sizes) + within]
    y = flat_b[np.repeat(starts_b[pairs.b[rows]], sizes) + within]
    with np.errstate(all="ignore"):
        largest = np.fmax.reduce([np.abs(v[n]) for v in (va, vb) for n in ("max", "min")])
        off = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
        off = np.where(np.isfinite(off), off, 0.0)
        scale = np.where(np.isfinite(largest[rows]) & (largest[rows] > 0), largest[rows], 1.0)
        result[rows] = np.maximum.reduceat(off, np.cumsum(sizes) - sizes) / scale
    return result


def _lists(column: pa.ChunkedArray) -> tuple[Floats, Ints, Ints]:
    array = column.combine_chunks()
    if pa.types.is_null(array.type):
        return np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
    offsets = array.offsets.to_numpy().astype(np.int64)
    flat = array.values.to_numpy(zero_copy_only=False)
    return flat, offsets[:-1], np.diff(offsets)


def _compare_values(
    form: Texts,
    form_a: Ints,
    form_b: Ints,
    value: Texts,
    value_a: Ints,
    value_b: Ints,
    both: Bools,
    a: pa.Table,
    pairs: Pairs,
    error: Floats,
    hard: Ints,
) -> None:
    """Leaves that are no tensors; devices and process groups may differ between two machines."""
    differ = both & (form_a == form_b) & ~_is(form, form_a, "tensor") & (value_a != value_b)
    rows = np.flatnonzero(differ)
    if not len(rows):
        return
    kinds = texts(a, a, "type")
    kind_of = _taken(kinds.a, pairs.a)
    for row in rows.tolist():
        kind = kinds.names[kind_of[row]] if kind_of[row] >= 0 else ""
        if kind == "torch.device":
            continue
        x, y = (value.names[code] if code >= 0 else "null" for code in (value_a[row], value_b[row]))
        off = _number_error(x, y)
        if off is None:
            hard[row] |= Hard.VALUE
        else:
            error[row] = off


def _number_error(x: str, y: str) -> float | None:
    """Relative difference of two JSON numbers; None unless both are numbers with a fraction."""
    try:
        u, v = orjson.loads(x), orjson.loads(y)
    except orjson.JSONDecodeError:
        return None
    if isinstance(u, bool) or isinstance(v, bool):
        return None
    if not (isinstance(u, float | int) and isinstance(v, float | int)):
        return None
    if isinstance(u, int) and isinstance(v, int):
        return None
    return abs(u - v) / (max(abs(u), abs(v)) or 1.0)


def _same_content(a: pa.Table, b: pa.Table, pairs: Pairs, tensors: Bools) -> tuple[Bools, Bools]:
    """Where digests or checksums of both sides are equal, and where they differ."""
    equal, different = np.zeros(len(pairs.a), bool), np.zeros(len(pairs.a), bool)
    for name in ("checksum", "digest"):
        if a[name].null_count == a.num_rows or b[name].null_count == b.num_rows:
            continue
        codes = texts(a, b, name)
        x, y = _taken(codes.a, pairs.a), _taken(codes.b, pairs.b)
        known = tensors & (x >= 0) & (y >= 0)
        equal |= known & (x == y)
        different |= known & (x != y)
    return equal & ~different, different


def _different_shapes(a: pa.Table, b: pa.Table, pairs: Pairs) -> Bools:
    flat_a, starts_a, sizes_a = _lists(a["shape"])
    flat_b, starts_b, sizes_b = _lists(b["shape"])
    rows = np.flatnonzero((pairs.a >= 0) & (pairs.b >= 0))
    result = np.zeros(len(pairs.a), bool)
    i, j = pairs.a[rows], pairs.b[rows]
    result[rows] = sizes_a[i] != sizes_b[j]
    for dim in range(int(sizes_a.max(initial=0))):
        has = rows[(sizes_a[i] > dim) & (sizes_b[j] > dim)]
        x, y = pairs.a[has], pairs.b[has]
        result[has] |= flat_a[starts_a[x] + dim] != flat_b[starts_b[y] + dim]
    return result


def _different_flags(a: pa.Table, b: pa.Table, pairs: Pairs) -> Bools:
    flags = []
    for table, rows in ((a, pairs.a), (b, pairs.b)):
        column = table["requires_grad"].combine_chunks()
        known = column.is_valid().to_numpy(zero_copy_only=False)
        flag = column.fill_null(False).to_numpy(zero_copy_only=False)
        flags.append(_taken(np.where(known, flag.astype(np.int64), -1), rows))
    result: Bools = (flags[0] >= 0) & (flags[1] >= 0) & (flags[0] != flags[1])
    return result


def _numbers(table: pa.Table, name: str, rows: Ints) -> tuple[Floats, Bools]:
    """A column at the given rows and where it is there; NaN where it is not."""
    column = table[name].combine_chunks()
    known = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    if not len(values):
        return np.full(len(rows), np.nan), np.zeros(len(rows), bool)
    inside = rows >= 0
    return np.where(inside, values[rows], np.nan), inside & known[rows]


def _taken(codes: Ints, rows: Ints) -> Ints:
    """The codes at the given rows, -1 where there is no row."""
    if not len(codes):
        return np.full(len(rows), -1, np.int64)
    return np.where(rows >= 0, codes[rows], -1)


def _is(column: Texts, codes: Ints, name: str) -> Bools:
    result: Bools = codes == (column.names.index(name) if name in column.names else -2)
    return result
