"""Reading a run: its tables as Arrow and as SQL, also while a collector writes them.

A reader sees one snapshot of each table. When a seal replaced files under it, it takes a newer
snapshot and tries once more.

SQL goes through Arrow datasets and not through `read_parquet`: Parquet's column statistics leave
NaN out and DuckDB believes them, so `isnan(max)` would find nothing in a file that has NaN.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as fs
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from . import schema

T = TypeVar("T")

SUFFIX = ".rankscope"

_VIEWS = """
create view records as select r.* replace (coalesce(p.rank, r.rank) as rank)
  from all_records r left join processes p using (process);
create view nodes as select n.* replace (coalesce(p.rank, n.rank) as rank)
  from all_nodes n left join processes p using (process);
create view steps as select s.* replace (coalesce(p.rank, s.rank) as rank)
  from all_steps s left join processes p using (process);
create view stacks as select * from all_stacks;
create view completeness as
with seals as (
  select step, expected, missing, time,
    row_number() over (partition by step order by time desc) as age,
    count(*) over (partition by step) as seals
  from all_steps where event = 'sealed'
), wanted as (
  select step, unnest(from_json(expected, '["varchar"]')) as process, true as expected
  from seals where age = 1
), absences as (
  select step, age, unnest(json_keys(missing)) as process, missing from seals
), absent as (
  select step, process,
    max(json_extract_string(missing, process)) filter (age = 1) as missing,
    bool_or(json_extract_string(missing, process) = 'late') as late
  from absences group by step, process
), told as (
  select step, process, max(events) filter (event = 'end') as recorded,
    sum(events) filter (event = 'dropped')::bigint as dropped,
    string_agg(distinct reason, ', ') filter (event = 'dropped') as drop_reasons,
    max(reason) filter (event = 'skipped') as filtered
  from all_steps where step is not null and process is not null group by step, process
), stored as (
  select step, process, count(*) as received from all_nodes group by step, process
)
select step, p.rank, process, coalesce(wanted.expected, false) as expected, recorded,
  coalesce(received, 0) as received, coalesce(dropped, 0) as dropped, drop_reasons, filtered,
  missing, coalesce(late, false) as late, s.time as sealed_at, coalesce(s.seals, 0) as seals
from told full join stored using (step, process) full join wanted using (step, process)
  full join absent using (step, process) left join processes p using (process)
  left join (select step, time, seals from seals where age = 1) s using (step);
"""

_NEWEST_PROCESSES = """
create table processes as select * from all_processes
  qualify row_number() over (partition by process order by revision desc) = 1
"""


class RunNotFoundError(Exception):
    """No run can be read at a path; the text says what was looked for and what is there."""


class Run:
    """The tables of one run: `path` has the folders step{N}, `store` beside it the tables."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.path = store.with_name(store.name.removesuffix(SUFFIX))

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    def dataset(self, table: str) -> ds.Dataset:
        """The newest snapshot of a table of `schema.TABLES`; empty when nothing was written yet."""
        expected = schema.TABLES[table]
        try:
            path = self.store / "tables" / table
            snapshot = DeltaTable(path)
        except TableNotFoundError:
            return ds.dataset(expected.empty_table())
        # Arrow's own file system: the default one is Python, which Arrow's reading threads would
        # still call while the interpreter ends, and abort it.
        files = fs.SubTreeFileSystem(str(path), fs.LocalFileSystem())
        dataset = snapshot.to_pyarrow_dataset(filesystem=files)
        # A store that an older version wrote lacks the columns that came later.
        later = [field for field in expected if field.name not in dataset.schema.names]
        if not later:
            return dataset
        return dataset.replace_schema(pa.schema([*dataset.schema, *map(_plain, later)]))

    def table(
        self, name: str, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        """Rows of a table, read whole: name the columns you need and the rows you want."""
        wanted = list(columns) if columns is not None else None
        return again_if_gone(lambda: self.dataset(name).to_table(columns=wanted, filter=where))

    def processes(self) -> pa.Table:
        """The newest row of each process, in the order in which they joined."""
        return self.sql("select * from processes order by joined, process")

    def connection(self) -> duckdb.DuckDBPyConnection:
        """A new in-memory database with the views records, nodes, processes, steps, stacks and
        completeness.

        `processes` holds the newest row of each process; `rank` is filled in from it where it was
        not known when a row was written.
        """
        connection = duckdb.connect(config={"python_enable_replacements": False})
        for name in schema.TABLES:
            connection.register(f"all_{name}", self.dataset(name))
        connection.execute(_NEWEST_PROCESSES)
        connection.execute(_VIEWS)
        return connection

    def sql(self, statement: str) -> pa.Table:
        """The result of a statement, read whole. `duckdb.Error` says what is wrong with it."""
        return again_if_gone(lambda: self._sql(statement))

    def _sql(self, statement: str) -> pa.Table:
        with self.connection() as connection:
            relation = connection.sql(statement)
            # A statement without rows (COPY, SET) has no relation.
            return pa.table({}) if relation is None else relation.to_arrow_table()


def open_run(path: Path | str) -> Run:
    """The run at a path: RUN, RUN.rankscope, or a store that holds one run.

    RunNotFoundError says what was looked for and what is there instead.
    """
    place = Path(os.path.abspath(path))
    sibling = place.with_name(place.name + SUFFIX)
    candidates = [place, sibling] if place.name.endswith(SUFFIX) else [sibling]
    for candidate in candidates:
        if (candidate / "tables").is_dir():
            return Run(candidate)
    inside = sorted(p for p in place.glob("*" + SUFFIX) if (p / "tables").is_dir())
    if len(inside) == 1:
        return Run(inside[0])
    raise RunNotFoundError(_not_found(place, sibling, inside))


def folder_of(process: Mapping[str, Any]) -> str:
    """The folder of a process, also when it has left the layout of the run."""
    if process["folder"]:
        return str(process["folder"])
    rank: int | None = process["rank"]
    name = f"proc{process['pid']}" if rank is None else f"rank{rank}"
    return f"{name}.{process['process'][:8]}" if process["clash"] else name


def again_if_gone(read: Callable[[], T]) -> T:
    """Read once more when files of the snapshot were replaced meanwhile."""
    try:
        return read()
    except FileNotFoundError:
        return read()
    except duckdb.Error as error:
        if "No such file" not in str(error) and "FileNotFoundError" not in str(error):
            raise
        return read()


def _plain(field: pa.Field) -> pa.Field:
    """The field without its dictionary, as Delta has it."""
    kind = field.type
    return field.with_type(kind.value_type) if pa.types.is_dictionary(kind) else field


def _not_found(place: Path, sibling: Path, inside: Sequence[Path]) -> str:
    if inside:
        names = ", ".join(p.name.removesuffix(SUFFIX) for p in inside)
        return f"{place} holds {len(inside)} runs, name one of them: {names}"
    if not place.exists():
        there = f"{place} does not exist"
    else:
        entries = sorted(p.name for p in place.iterdir()) if place.is_dir() else []
        shown = ", ".join(entries[:8]) + (", ..." if len(entries) > 8 else "")
        there = f"{place} holds {shown or 'nothing'}"
    return f"no run here: looked for {sibling}/tables and {place}/*{SUFFIX}/tables; {there}"
