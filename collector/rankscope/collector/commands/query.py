"""`rankscope query RUN "select ..."`."""

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Annotated, Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table

from ..query import RunNotFoundError, open_run

SHOWN_ROWS = 1000  # as a table; the other formats print every row


class Format(str, Enum):
    """How rows are printed."""

    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"


def query(
    run: Annotated[str, typer.Argument(help="RUN, RUN.rankscope, or a store with one run.")],
    sql: Annotated[
        str,
        typer.Argument(help="DuckDB SQL over records, nodes, processes, steps and stacks."),
    ],
    format: Annotated[
        Format, typer.Option(help="How rows are printed: table, csv, json or parquet.")
    ] = Format.table,
    output: Annotated[
        Path | None, typer.Option(help="Write to this file instead of the terminal.")
    ] = None,
) -> None:
    """Ask a run's tables with SQL, also while it is recorded."""
    if format is Format.parquet and output is None:
        fail("--format parquet needs --output FILE")
    try:
        rows = open_run(run).sql(sql)
    except (RunNotFoundError, duckdb.Error) as error:
        fail(one_line(error))
    try:
        WRITERS[format](rows, output)
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}")


def fail(message: str) -> Any:
    """End the command with one clear line and exit status 2."""
    typer.echo(f"rankscope: {message}", err=True)
    raise typer.Exit(2)


def one_line(error: Exception) -> str:
    """The first lines of an error without the excerpt of the statement, as one."""
    text = str(error).split("\n\n")[0]
    return " ".join(text.split())


def number_text(value: float) -> str:
    """A float as people read it: NaN, Infinity, or the shortest text that means the same."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(value)


@contextmanager
def _text_file(output: Path | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
    else:
        with output.open("w", encoding="utf-8", newline="") as file:
            yield file


def _rows(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    for batch in rows.to_batches(max_chunksize=10_000):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, list | dict):
        return json.dumps(_strict(value), default=str, ensure_ascii=False)
    return "" if value is None else str(value)


def _strict(value: Any) -> Any:
    """The value with NaN and infinities as text, since JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return number_text(value)
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return value


def _write_table(rows: pa.Table, output: Path | None) -> None:
    table = Table()
    for field in rows.schema:
        number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        table.add_column(field.name, justify="right" if number else "left", overflow="fold")
    for row in _rows(rows.slice(0, SHOWN_ROWS)):
        table.add_row(*(_cell(value) for value in row))
    with _text_file(output) as file:
        # A file or a pipe has no width: rows stay whole there.
        wide = None if output is None and sys.stdout.isatty() else 100_000
        console = Console(file=file, width=wide, markup=False, emoji=False, highlight=False)
        console.print(table, crop=False)
        if rows.num_rows > SHOWN_ROWS:
            hidden = rows.num_rows - SHOWN_ROWS
            console.print(f"{hidden} more rows; --format csv prints all")


def _write_csv(rows: pa.Table, output: Path | None) -> None:
    with _text_file(output) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows.column_names)
        writer.writerows([_cell(value) for value in row] for row in _rows(rows))


def _write_json(rows: pa.Table, output: Path | None) -> None:
    with _text_file(output) as file:
        separator = "["
        for row in _rows(rows):
            entry = dict(zip(rows.column_names, map(_strict, row), strict=True))
            file.write(separator + "\n" + json.dumps(entry, default=str, ensure_ascii=False))
            separator = ","
        file.write("[]\n" if separator == "[" else "\n]\n")


def _write_parquet(rows: pa.Table, output: Path | None) -> None:
    # Without statistics: they leave NaN out, and readers that trust them lose those rows.
    pq.write_table(rows, output, write_statistics=False)


WRITERS: dict[Format, Callable[[pa.Table, Path | None], None]] = {
    Format.table: _write_table,
    Format.csv: _write_csv,
    Format.json: _write_json,
    Format.parquet: _write_parquet,
}
