"""The rows of a comparison as a table with msProbe's own columns, and some more behind them."""

from collections.abc import Mapping, Sequence

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from ..render.statistics import SHOWS
from .compare import Comparison
from .figures import Bools, Floats, Hard
from .pairing import Ints
from .verdicts import VERDICTS, Verdicts

_KINDS = ("max", "min", "mean", "norm")
_NAMES = ("max", "min", "mean", "l2norm")
_PARTS = {"input_args": "input", "input_kwargs": "input"}
TENSOR_COLUMNS = (
    "Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio",
    "Five Thousandths Err Ratio",
)  # fmt: skip


def table(comparison: Comparison, verdict: Verdicts) -> pa.Table:
    """All columns are texts, as msProbe writes them: N/A where a side has nothing, percent signs
    behind relative errors."""
    return _Builder(comparison, verdict).build()


class _Builder:
    def __init__(self, comparison: Comparison, verdict: Verdicts) -> None:
        self.comparison, self.verdict = comparison, verdict
        self.figures = comparison.view.figures
        self.sides = (comparison.a.table, comparison.b.table)
        self.rows = (self.figures.pairs.a, self.figures.pairs.b)
        self.scalar = [_printed(text) for text in self.figures.values]

    def build(self) -> pa.Table:
        columns: dict[str, pa.Array] = {}
        for side, word in enumerate(("NPU", "Bench")):
            columns[f"{word} Name"] = self._names(side)
        for title, make in (
            ("Dtype", self._dtypes),
            ("Tensor Shape", self._shapes),
            ("Requires_grad", self._flags),
        ):
            for side, word in enumerate(("NPU", "Bench")):
                columns[f"{word} {title}"] = make(side)
        columns |= self._differences()
        for side, word in enumerate(("NPU", "Bench")):
            for name in _NAMES:
                columns[f"{word} {name}"] = self._statistic(side, name)
        flags = (columns["NPU Requires_grad"], columns["Bench Requires_grad"])
        columns["Requires_grad Consistent"] = pc.if_else(pc.equal(*flags), "True", "False")
        levels = pa.array(VERDICTS)
        columns["Result"] = levels.take(pa.array(self.verdict.level))
        columns["Err_message"] = pa.array(self.verdict.reason)
        columns["NPU_Stack_Info"] = self._stacks()
        if self.figures.whole:
            columns["Data_name"] = self._data_names()
        columns |= self._own()
        return pa.table(columns)

    # ------------------------------------------------------------------------- columns, one a side

    def _names(self, side: int) -> pa.Array:
        rows = self.comparison.view.rows
        parts = [_PARTS.get(part, part) for part in rows.parts]
        parts = ["" if part == "parameters_grad" else part for part in parts]
        names = self.sides[side]["record"]
        record = _taken(names.cast(pa.string()).combine_chunks(), self.rows[side])
        part = _chosen(parts, rows.part, "")
        path = _chosen(rows.paths, rows.path, "")
        pieces = pc.binary_join_element_wise(record, part, path, ".")
        text = pc.replace_substring(pc.utf8_rtrim(pieces, "."), "..", ".")
        return text.fill_null("N/A")

    def _dtypes(self, side: int) -> pa.Array:
        table = self.sides[side]
        dtype = table["dtype"].cast(pa.string()).combine_chunks()
        kind = table["type"].cast(pa.string()).combine_chunks()
        plain = pc.is_in(kind, pa.array(["int", "float", "bool", "str"]))
        classes = pc.binary_join_element_wise("<class '", kind, "'>", "")
        own = pc.coalesce(dtype, pc.if_else(plain, classes, kind))
        return _taken(own, self.rows[side]).fill_null("N/A")

    def _shapes(self, side: int) -> pa.Array:
        column = self.sides[side]["shape"].combine_chunks()
        words = pa.ListArray.from_arrays(column.offsets, column.values.cast(pa.string()))
        joined = pc.binary_join_element_wise("[", pc.binary_join(words, ", "), "]", "")
        form = self.sides[side]["form"].cast(pa.string()).combine_chunks()
        joined = pc.if_else(
            column.is_valid(), joined, pc.if_else(pc.equal(form, "scalar"), "[]", None)
        )
        return _taken(joined, self.rows[side]).fill_null("N/A")

    def _flags(self, side: int) -> pa.Array:
        column = self.sides[side]["requires_grad"].combine_chunks()
        words = pc.if_else(column, "True", "False")
        return _taken(words, self.rows[side]).fill_null("N/A")

    def _statistic(self, side: int, name: str) -> pa.Array:
        kind = _KINDS[_NAMES.index(name)]
        values, shown = self._shown(side, kind)
        text = _number_texts(values, self._whole_number(side))
        text = pc.if_else(pa.array(shown), text, "None")
        scalar = _chosen(self.scalar, self.figures.value[side], "None")
        text = pc.if_else(pa.array(self.figures.is_tensor), text, scalar)
        return pc.if_else(pa.array(self.rows[side] >= 0), text, "N/A")

    def _shown(self, side: int, kind: str) -> tuple[Floats, Bools]:
        """A statistic, and where dump.json prints it; all four are the value of a 0-dim tensor."""
        numbers = (self.figures.a, self.figures.b)[side]
        shows = [SHOWS.get(name) for name in self.figures.dtypes]
        codes = self.figures.dtype[side]
        zero = self._zero_dim(side) & _where(
            [s is not None and s.value_when_0d for s in shows], codes
        )
        wanted = {
            "mean": [bool(s and s.mean) for s in shows],
            "norm": [bool(s and s.norm) for s in shows],
        }
        allowed = _where(wanted.get(kind, [s is not None for s in shows]), codes) | zero
        values = np.where(zero, numbers["max"], numbers[kind])
        there = ~np.isnan(values) | self._is_nan(side)
        return values, allowed & there

    def _is_nan(self, side: int) -> Bools:
        """Rows with a NaN that was measured."""
        column = self.sides[side]["max"].combine_chunks()
        seen = column.is_valid().to_numpy(zero_copy_only=False)
        seen &= np.isnan(column.fill_null(0.0).to_numpy(zero_copy_only=False))
        rows = self.rows[side]
        return np.where(rows >= 0, seen[rows] if len(seen) else False, False)

    def _zero_dim(self, side: int) -> Bools:
        column = self.sides[side]["shape"].combine_chunks()
        empty = np.diff(column.offsets.to_numpy()) == 0
        empty &= column.is_valid().to_numpy(zero_copy_only=False)
        rows = self.rows[side]
        return np.where(rows >= 0, empty[rows] if len(empty) else False, False)

    def _whole_number(self, side: int) -> Bools:
        shows = [SHOWS.get(name) for name in self.figures.dtypes]
        return _where(
            [s is not None and s.number != "float" for s in shows], self.figures.dtype[side]
        )

    # ------------------------------------------------------------------------- differences

    def _differences(self) -> Mapping[str, pa.Array]:
        if self.figures.whole:
            return self._tensor_columns()
        columns: dict[str, pa.Array] = {}
        relative: dict[str, pa.Array] = {}
        both = (self.rows[0] >= 0) & (self.rows[1] >= 0)
        for name, kind in zip(_NAMES, _KINDS, strict=True):
            x, shown_x = self._shown(0, kind)
            y, shown_y = self._shown(1, kind)
            x, y = self._with_scalars(0, x, shown_x), self._with_scalars(1, y, shown_y)
            known = ~(np.isnan(x) | np.isnan(y)) | (shown_x & shown_y)
            with np.errstate(all="ignore"):
                difference = np.where(x == y, 0.0, x - y)
                percent = np.where(x == y, 0.0, np.abs(x - y) / np.abs(y) * 100)
            unknown = self._without_numbers()
            title = "L2norm" if name == "l2norm" else name.capitalize()
            other = "Norm" if name == "l2norm" else name.capitalize()
            columns[f"{title} diff"] = _or(known, _number_texts(difference), unknown, both)
            texts_ = _number_texts(percent)
            signed = pc.if_else(
                pa.array(np.isfinite(percent) & (percent != 0)),
                pc.binary_join_element_wise(texts_, "%", ""),
                texts_,
            )
            relative[f"{other}RelativeErr"] = _or(known, signed, unknown, both)
        return columns | relative

    def _with_scalars(self, side: int, values: Floats, shown: Bools) -> Floats:
        numbers = np.array([_as_number(text) for text in self.figures.values] + [np.nan])
        own = np.where(shown, values, np.nan)
        return np.where(self.figures.is_tensor, own, numbers[self.figures.value[side]])

    def _without_numbers(self) -> pa.Array:
        """0 where nothing can differ, Diff where a value that is no number does."""
        hard = self.figures.hard & (Hard.VALUE | Hard.FORM) != 0
        return _words(hard, "Diff", "0")

    def _tensor_columns(self) -> Mapping[str, pa.Array]:
        rows = len(self.rows[0])
        columns = {}
        for number, title in enumerate(TENSOR_COLUMNS):
            values = ["N/A"] * rows
            for row, one in self.figures.whole.items():
                value = float(one[number])
                values[row] = repr(value) if value == value else one.why or "Nan"
            columns[title] = pa.array(values)
        return columns

    # ------------------------------------------------------------------------- the rest

    def _stacks(self) -> pa.Array:
        frames = self.comparison.a.frames
        column = self.sides[0]["stack"].combine_chunks().fill_null(0)
        codes = _taken(column, self.rows[0]).fill_null(0).dictionary_encode()
        told = ["\n".join(frames(stack)) or "N/A" for stack in codes.dictionary.to_pylist()]
        inputs = self.comparison.view.rows.is_input
        first = _first_of_record(self.figures.pairs.record, self.figures.pairs.unit)
        text = pa.array(told, pa.string()).take(codes.indices)
        return pc.if_else(pa.array(first & inputs), text, "N/A")

    def _data_names(self) -> pa.Array:
        return pc.binary_join_element_wise(
            *(
                _taken(side["data_name"].combine_chunks(), rows).fill_null("N/A")
                for side, rows in zip(self.sides, self.rows, strict=True)
            ),
            ", ",
        )

    def _own(self) -> Mapping[str, pa.Array]:
        units = self.comparison.units
        unit = self.figures.pairs.unit
        return {
            "Step": pa.array(np.array([u.step for u in units])[unit]).cast(pa.string()),
            "Rank": pa.array(np.array([u.rank for u in units])[unit]).cast(pa.string()),
            "Error": _number_texts(self.figures.error),
            "Accuracy Reached or Not": _words(self.verdict.level == 0, "Yes", "No"),
        }


def _first_of_record(record: Ints, unit: Ints) -> Bools:
    key = unit * (int(record.max(initial=0)) + 1) + record
    _, first = np.unique(key, return_index=True)
    result = np.zeros(len(record), bool)
    result[first] = True
    return result


def _where(flags: Sequence[bool], codes: Ints) -> Bools:
    return np.array([*flags, False], bool)[codes]


def _chosen(words: Sequence[str], codes: Ints, otherwise: str) -> pa.Array:
    """The word of each code; `otherwise` for -1."""
    own = np.where(codes < 0, len(words), codes)
    return pa.array([*words, otherwise], pa.string()).take(pa.array(own))


def _taken(array: pa.Array, rows: Ints) -> pa.Array:
    """The values at the given rows, null where there is no row."""
    return array.take(pa.array(rows, mask=rows < 0))


def _words(flags: Bools, yes: str, no: str) -> pa.Array:
    return pc.if_else(pa.array(flags), yes, no)


def _or(known: Bools, text: pa.Array, unknown: pa.Array, both: Bools) -> pa.Array:
    return pc.if_else(pa.array(both), pc.if_else(pa.array(known), text, unknown), "N/A")


def _number_texts(values: Floats, whole: Bools | None = None) -> pa.Array:
    text = pa.array(values).cast(pa.string())
    text = pc.if_else(pa.array(values == 0), "0", text)
    if whole is not None and whole.any():
        safe = np.where(whole & np.isfinite(values) & (np.abs(values) < 2**62), values, 0)
        text = pc.if_else(pa.array(whole), pa.array(safe.astype(np.int64)).cast(pa.string()), text)
    return pc.if_else(pa.array(np.isnan(values)), "Nan", text)


def _printed(text: str) -> str:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return (
        value
        if isinstance(value, str)
        else "None"
        if isinstance(value, dict | list)
        else str(value)
    )


def _as_number(text: str) -> float:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return float("nan")
    return (
        float("nan")
        if isinstance(value, bool) or not isinstance(value, int | float)
        else float(value)
    )
