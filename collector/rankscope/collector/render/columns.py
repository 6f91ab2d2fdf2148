"""Arrow columns as Python lists; `to_pylist()` on a dictionary column costs ten times as much."""

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

T = TypeVar("T")


def ordered(table: pa.Table, names: list[str], keys: list[str]) -> pa.Table:
    """The named columns, rows sorted by `keys`: integer columns, the most significant first."""
    table = table.select(names).unify_dictionaries().combine_chunks()
    order = np.lexsort(
        [_array(table, key).to_numpy(zero_copy_only=False) for key in reversed(keys)]
    )
    return table if np.all(order[1:] > order[:-1]) else table.take(pa.array(order)).combine_chunks()


def split(table: pa.Table, name: str) -> dict[str, pa.Table]:
    """The rows of each text of a column, in their order, for one pass over the table in all."""
    codes, distinct = coded(table, name)
    order = np.argsort(codes, kind="stable")
    grouped = table.take(pa.array(order))
    starts = np.searchsorted(codes[order], np.arange(len(distinct) + 1)).tolist()
    slices = zip(distinct, pairwise(starts), strict=True)
    return {text: grouped.slice(a, b - a) for text, (a, b) in slices if text is not None and a < b}


def texts(table: pa.Table, name: str) -> list[str | None]:
    """A text column, dictionary-encoded or not."""
    return converted(table, name, lambda text: text)


def converted(table: pa.Table, name: str, convert: Callable[[str], T]) -> list[T | None]:
    """A text column with `convert` applied once to each distinct text; null stays None."""
    indices, distinct = coded(table, name)
    values: list[T | None] = [None if text is None else convert(text) for text in distinct]
    return [values[i] for i in indices.tolist()]


def coded(table: pa.Table, name: str) -> tuple[npt.NDArray[np.int64], list[str | None]]:
    """A text column as indices into its distinct texts; the last of these is None, for null."""
    array = _array(table, name)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    elif len(array.dictionary) > len(array):
        # A slice that still carries the dictionary of a whole table.
        array = array.cast(array.type.value_type).dictionary_encode()
    distinct: list[str | None] = [*array.dictionary.to_pylist(), None]
    indices = array.indices.fill_null(len(distinct) - 1)
    return indices.to_numpy(zero_copy_only=False), distinct


def numbers(table: pa.Table, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """A number column and where it is not null; nulls are 0."""
    array = _array(table, name)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return array.fill_null(0).to_numpy(zero_copy_only=False), valid


def plain(table: pa.Table, name: str) -> list[T | None]:
    """A column without dictionary (numbers, booleans, plain strings), nulls as None."""
    values: list[T | None] = _array(table, name).to_pylist()
    return values


def shapes(table: pa.Table, name: str) -> tuple[list[tuple[int, ...]], npt.NDArray[np.int64]]:
    """A list column as tuples, null as (), and the length of each."""
    array = _array(table, name)
    offsets = array.offsets.to_numpy()
    flat = tuple(array.values.to_numpy(zero_copy_only=False).tolist())
    starts = offsets.tolist()
    lists = [flat[a:b] for a, b in pairwise(starts)]
    return lists, np.diff(offsets)


def _array(table: pa.Table, name: str) -> pa.Array:
    return table.column(name).combine_chunks()
