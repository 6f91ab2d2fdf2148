"""Parquet files of a table: written and fsynced before anything names them, read back as Arrow."""

import json
import os
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from rankscope.collector.store.errors import foreign_errors

ROW_GROUP_ROWS = 131_072

#: Statistics only for columns that order rows: Arrow's and delta-rs' statistics of columns that may
#: hold NaN or Inf make readers skip files that have what they look for.
_STATISTICS = ("rank", "process", "batch", "seq")


@dataclass(frozen=True)
class DataFile:
    """A durable Parquet file that no log entry names yet. `name` is relative to its table."""

    name: str
    size_bytes: int
    rows: int
    step: int | None  # the partition, None in a table without
    statistics: str  # JSON, as Delta's log wants it

    def add_action(self, data_change: bool) -> AddAction:
        partition = {} if self.step is None else {"step": str(self.step)}
        now = int(time.time() * 1000)
        return AddAction(self.name, self.size_bytes, partition, now, data_change, self.statistics)


def file_name(kind: str, collector_id: str, step: int | None) -> str:
    """A new name; kind is "part" or "seal". Whoever made a file can be told from its name."""
    name = f"{kind}-{collector_id}-{uuid.uuid4().hex}.parquet"
    return name if step is None else f"step={step}/{name}"


def own_files(root: Path, collector_id: str) -> list[str]:
    """Names of all data files that this collector ever made here and that still exist."""
    own = re.compile(rf"(step=\d+/)?(part|seal)-{re.escape(collector_id)}-[0-9a-f]{{32}}\.parquet")
    folders = [root, *root.glob("step=*/")]
    names = (str(path.relative_to(root)) for folder in folders for path in folder.iterdir())
    return [name for name in names if own.fullmatch(name)]


def write_file(root: Path, name: str, table: pa.Table, step: int | None) -> DataFile:
    """Writes a table (without its partition column) so that it survives a power loss."""
    path = root / name
    if step is not None:
        table = table.drop_columns(["step"])
    # Many chunks with a dictionary each take four times as long to write.
    table = table.unify_dictionaries().combine_chunks()
    with foreign_errors(path):
        if step is not None:
            make_folder(path.parent)
        try:
            _write_parquet(path, table)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        size = path.stat().st_size
    return DataFile(name, size, table.num_rows, step, _statistics(table))


def _write_parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(
        table,
        path,
        compression="zstd",
        write_statistics=[column for column in _STATISTICS if column in table.column_names],
        row_group_size=ROW_GROUP_ROWS,
        store_schema=False,
    )
    fsync(path)
    fsync(path.parent)


def read_file(
    root: Path, name: str, schema: pa.Schema, columns: Collection[str] | None = None
) -> pa.Table:
    """The rows of one data file in `schema`, dictionaries kept; only `columns` when given.

    Columns that the file's writer did not know yet are null.
    """
    fields = [field for field in schema if columns is None or field.name in columns]
    footer = pq.read_metadata(root / name)
    plain = set(footer.schema.names)
    texts = [f.name for f in schema if pa.types.is_dictionary(f.type) and f.name in plain]
    with pq.ParquetFile(root / name, metadata=footer, read_dictionary=texts) as file:
        stored = set(file.schema_arrow.names)
        table = file.read(columns=[field.name for field in fields if field.name in stored])
    if "/" in name and any(field.name == "step" for field in fields):
        step = int(name.split("/")[0].removeprefix("step="))
        table = table.append_column("step", pa.repeat(pa.scalar(step, pa.int64()), len(table)))
    for field in fields:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    wanted = pa.schema(fields)
    return table.select(wanted.names).cast(wanted)


def count_rows(root: Path, name: str) -> int:
    """Rows of a data file, from its footer."""
    return int(pq.read_metadata(root / name).num_rows)


def make_folder(path: Path) -> None:
    """Makes a folder in an existing one, durably. A deleted store does not come back this way."""
    try:
        path.mkdir()
    except FileExistsError:
        return
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Makes a file's content, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_files(root: Path, names: Collection[str]) -> None:
    for name in names:
        (root / name).unlink(missing_ok=True)


def _statistics(table: pa.Table) -> str:
    low: dict[str, object] = {}
    high: dict[str, object] = {}
    nulls: dict[str, int] = {}
    for name in _STATISTICS:
        if name not in table.column_names:
            continue
        column = table[name]
        nulls[name] = column.null_count
        if pa.types.is_dictionary(column.type):
            column = column.combine_chunks()
            column = column.dictionary.take(column.indices.unique())
        edges = pc.min_max(column).as_py()
        if edges["min"] is not None:
            low[name], high[name] = edges["min"], edges["max"]
    return json.dumps(
        {"numRecords": len(table), "minValues": low, "maxValues": high, "nullCount": nulls}
    )
