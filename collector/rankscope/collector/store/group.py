"""A group of batches, and which of its rows each table still lacks: pure, no I/O."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.collector.decode import DecodedBatch
from rankscope.collector.schema import PARTITIONED, TABLES
from rankscope.collector.store.errors import StoreError

Row = Mapping[str, Any]

#: Tables in the order of their commits. `nodes` is last: its sequences say what is whole.
ORDER = ("stacks", "steps", "processes", "records", "nodes")


@dataclass(frozen=True)
class Group:
    """Batches (ascending per process) and rows that are committed together.

    Rows of `steps` with a batch belong to that batch and are stored once with it. The other rows of
    `steps` and all of `processes` are *loose*: they are the collector's own.
    """

    batches: Sequence[DecodedBatch] = ()
    steps: Sequence[Row] = ()
    processes: Sequence[Row] = ()
    sequences: dict[str, int] = field(init=False)  # highest of each process

    def __post_init__(self) -> None:
        rows_table(self.steps, TABLES["steps"])
        rows_table(self.processes, TABLES["processes"])
        sequences: dict[str, int] = {}
        for batch in self.batches:
            sequences[batch.process] = max(batch.sequence, sequences.get(batch.process, 0))
        object.__setattr__(self, "sequences", sequences)

    def loose_rows(self, table: str) -> list[Row]:
        if table == "processes":
            return list(self.processes)
        return [row for row in self.steps if table == "steps" and row.get("batch") is None]

    def rows(self, table: str, stored: Callable[[str], int], loose: Sequence[Row]) -> pa.Table:
        """The rows that `table` lacks when it has all batches of a process up to `stored` of it."""
        schema = TABLES[table]
        if table == "processes":
            return rows_table(loose, schema)
        if table == "steps":
            of_batches = [
                row
                for row in self.steps
                if row.get("batch") is not None and row["batch"] > stored(row["process"])
            ]
            return rows_table([*of_batches, *loose], schema)
        parts = [getattr(batch, table) for batch in self._lacking(stored)]
        return pa.concat_tables([schema.empty_table(), *parts])

    def _lacking(self, stored: Callable[[str], int]) -> Iterable[DecodedBatch]:
        newest: dict[str, int] = {}
        for batch in self.batches:
            if batch.sequence > newest.get(batch.process, stored(batch.process)):
                newest[batch.process] = batch.sequence
                yield batch


def rows_table(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    """Rows as a table; raises StoreError for unknown columns and for values that do not fit.

    Arrow would drop the former and turn 2.7 into 2 without a word. Types are given, not inferred,
    because each inference looks for optional packages on disk.
    """
    unknown = set().union(*rows) - set(schema.names)
    if unknown:
        raise StoreError(f"no such columns: {sorted(unknown)}; allowed: {schema.names}")
    for column in schema:
        values = (row.get(column.name) for row in rows)
        if pa.types.is_integer(column.type) and any(isinstance(value, float) for value in values):
            raise StoreError(f"{column.name} holds integers only, not fractions")
    try:
        return pa.Table.from_pylist(list(rows), schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise StoreError(f"rows do not fit {schema.names}: {error}") from error


def by_step(table: str, rows: pa.Table) -> list[tuple[int | None, pa.Table]]:
    """The rows split by their partition, in order; under None for a table without."""
    if not len(rows):
        return []
    if table not in PARTITIONED:
        return [(None, rows)]
    steps = rows["step"].to_numpy()
    if np.any(np.diff(steps) < 0):
        order = np.argsort(steps, kind="stable")
        rows, steps = rows.take(pa.array(order)), steps[order]
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    ends = [*starts[1:].tolist(), len(steps)]
    return [
        (int(steps[start]), rows.slice(start, end - start))
        for start, end in zip(starts.tolist(), ends, strict=True)
    ]
