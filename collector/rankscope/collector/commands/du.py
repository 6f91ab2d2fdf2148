"""`rankscope du RUN`."""

import json as encoding
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..query import RunNotFoundError, open_run
from ..usage import usage
from .query import fail

_LONGEST = 40


def du(
    run: Annotated[str, typer.Argument(help="RUN, RUN.rankscope, or a store with one run.")],
    json: Annotated[bool, typer.Option("--json", help="Everything, in bytes, as JSON.")] = False,
) -> None:
    """Say what of a run holds how much on the disk: steps, processes, kinds of records."""
    try:
        opened = open_run(run)
    except RunNotFoundError as error:
        fail(str(error))
    found = usage(opened)
    if json:
        typer.echo(encoding.dumps(asdict(found) | {"total": found.total}, indent=2))
        return
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(
        f"run {opened.name}: {size(found.total)}\n"
        f"  tensors {size(found.tensors)}, of which no record refers to "
        f"{size(found.unreferenced)}\n  tables {size(found.tables)}\n"
        f"  documents and small .pt files {size(found.documents)}\n  spool {size(found.spool)}"
    )
    for by, rows in found.groups.items():
        if rows:
            console.print(_table(by, rows))


def size(count: int) -> str:
    """Bytes as people read them."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _table(by: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(by, "tensors", "logical", "stored", "alone")
    shown = rows if len(rows) <= _LONGEST else rows[: _LONGEST // 2] + rows[-_LONGEST // 2 :]
    for row in shown:
        texts = (size(row[name]) for name in ("logical", "stored", "alone"))
        table.add_row(str(row[by]), str(row["tensors"]), *texts)
    if len(shown) < len(rows):
        table.caption = f"{len(rows) - len(shown)} lines in the middle left out; --json has all"
    return table
