"""Rows of the tables as Arrow: put together, put in order, cut down. No I/O."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def concatenated(parts: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """One table in one chunk, with one dictionary a column."""
    table = pa.concat_tables(parts) if parts else schema.empty_table()
    return table.unify_dictionaries().combine_chunks()


def in_order(table: pa.Table, by_rank: bool = False) -> pa.Table:
    """By (process, seq, leaf), or (rank, process, seq, leaf) with unknown ranks last."""
    keys: list[npt.NDArray[Any]] = [table["seq"].to_numpy(), _process_order(table)]
    if "leaf" in table.column_names:
        keys.insert(0, table["leaf"].to_numpy())
    if by_rank:
        keys.append(pc.fill_null(table["rank"], 2**31 - 1).to_numpy())
    order = np.lexsort(keys)
    if np.array_equal(order, np.arange(len(order))):
        return table
    return table.take(pa.array(order)).combine_chunks()


def with_ranks(table: pa.Table, ranks: Mapping[str, int]) -> pa.Table:
    """The table with the ranks of `ranks`; processes that are not in it keep what they have."""
    codes, names = _codes(table)
    if not len(names):
        return table
    known = pa.array([ranks.get(name) for name in names], pa.int32()).take(pa.array(codes))
    column = pc.coalesce(known, table["rank"].combine_chunks())
    return table.set_column(table.column_names.index("rank"), table.schema.field("rank"), column)


def only_processes(table: pa.Table, processes: Collection[str]) -> pa.Table:
    codes, names = _codes(table)
    wanted = np.array([name in processes for name in names], np.bool_)
    if wanted.all():
        return table
    return table.filter(pa.array(wanted[codes]))


def only_batches_of(nodes: pa.Table, records: pa.Table) -> pa.Table:
    """The records of batches up to the newest that each process has in `nodes`."""
    codes, names = _codes(nodes)
    newest = np.full(len(names), -1, np.int64)
    np.maximum.at(newest, codes, nodes["batch"].to_numpy())
    by_name = dict(zip(names, newest.tolist(), strict=True))
    codes, names = _codes(records)
    limits = np.array([by_name.get(name, -1) for name in names], np.int64)
    keep = records["batch"].to_numpy() <= limits[codes] if len(names) else np.zeros(0, np.bool_)
    return records if keep.all() else records.filter(pa.array(keep))


def _codes(table: pa.Table) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Index of each row's process in the list of the table's processes."""
    column = table["process"].unify_dictionaries().combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    return column.indices.to_numpy(), column.dictionary.to_pylist()


def _process_order(table: pa.Table) -> npt.NDArray[Any]:
    codes, names = _codes(table)
    position = np.zeros(len(names), np.int64)
    position[np.argsort(np.array(names, np.str_))] = np.arange(len(names))
    return position[codes]
