"""`rankscope ls RUN`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..layout import folder_order
from ..overview import Overview, Part, overview
from ..query import Run, RunNotFoundError, folder_of, open_run
from .query import fail

WIDEST = 8  # processes that get a column of their own
LONGEST = 40  # lines of a table before its middle is left out

_SHOWN = ("rank", "folder", "host", "pid", "state", "clash")
_SHOWN_IF_ANY = ("replica", "attempt", "parent_process")


def ls(
    run: Annotated[str, typer.Argument(help="RUN, RUN.rankscope, or a store with one run.")],
    all: Annotated[
        bool, typer.Option("--all", help="Older launches too, and every line of long tables.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show a run's processes, steps and what of them is complete, also while it is recorded."""
    try:
        opened = open_run(run)
    except RunNotFoundError as error:
        fail(str(error))
    contents = overview(opened)
    if json:
        _print_json(opened, contents)
    else:
        _print_tables(opened, contents, everything=all)


def _print_json(run: Run, contents: Overview) -> None:
    document = {
        "run": run.name,
        "path": str(run.path),
        "store": str(run.store),
        "processes": contents.processes,
        "refused": contents.refused,
        "steps": [
            {"step": step, "process": process} | asdict(part)
            for step, parts in contents.parts.items()
            for process, part in parts.items()
        ],
    }
    typer.echo(json.dumps(document, indent=2, default=str))


def _print_tables(run: Run, contents: Overview, everything: bool) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 500  # a pipe has no width: nothing is folded there
    instances = list(contents.instances().items())
    console.print(f"run {run.name}: {_count(len(instances), 'launch', 'launches')}")
    console.print(f"  layout {run.path}\n  tables {run.store / 'tables'}")
    if not instances:
        console.print("no process has been heard yet")
    if len(instances) > 1 and not everything:
        console.print(f"the newest of {len(instances)} launches (--all shows the others)")
        instances = instances[-1:]
    for instance, processes in instances:
        console.print(f"\nlaunch {instance}: {_count(len(processes), 'process', 'processes')}")
        processes = sorted(processes, key=lambda p: folder_order(folder_of(p)))
        tables = _process_table(processes), step_table(contents.parts, processes)
        for table in tables:
            console.print(table if everything else _shortened(table))
        for process in processes:
            if text := contents.refused.get(process["process"]):
                console.print(f"{folder_of(process)}: {text}")


def step_table(
    parts: Mapping[int, Mapping[str, Part]], processes: Sequence[Mapping[str, Any]]
) -> Table:
    """Steps by processes. Equal steps that follow each other share a line; where there are many
    processes, those that are equal in a step share a cell."""
    keys = [process["process"] for process in processes]
    names = [folder_of(process) for process in processes]
    table = Table("step")
    if len(keys) <= WIDEST:
        for name in names:
            table.add_column(name)
    else:
        table.add_column(f"{len(keys)} processes")
    rows = []
    for step, present in sorted(parts.items()):
        cells = [str(present[key]) if key in present else "-" for key in keys]
        if any(cell != "-" for cell in cells):
            rows.append((step, cells))
    for cells, same in groupby(rows, key=lambda row: row[1]):
        steps = spans([step for step, _ in same])
        table.add_row(steps, *(cells if len(keys) <= WIDEST else [_grouped(names, cells)]))
    return table


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers with those that follow each other joined: "0-3, 7"."""
    texts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        first, last = members[0], members[-1]
        texts.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(texts)


def _grouped(names: Sequence[str], cells: Sequence[str]) -> str:
    groups: dict[str, list[str]] = {}
    for name, cell in zip(names, cells, strict=True):
        groups.setdefault(cell, []).append(name)
    return "\n".join(f"{_joined(members)}: {cell}" for cell, members in groups.items())


def _joined(names: Sequence[str]) -> str:
    ranks = sorted(int(name[4:]) for name in names if name[:4] == "rank" and name[4:].isdigit())
    others = [name for name in names if not (name[:4] == "rank" and name[4:].isdigit())]
    return ", ".join(([f"rank {spans(ranks)}"] if ranks else []) + others)


def _process_table(processes: Sequence[Mapping[str, Any]]) -> Table:
    names = {process["process"]: folder_of(process) for process in processes}
    more = [name for name in _SHOWN_IF_ANY if any(p.get(name) not in (None, 0) for p in processes)]
    table = Table(*_SHOWN, *(name.removesuffix("_process") for name in more), "process")
    for process in processes:
        cells = {name: process[name] for name in (*_SHOWN, *more)}
        for name in {"clash", "parent_process"} & cells.keys():
            cells[name] = names.get(process[name], process[name])
        if cells.get("replica") is not None:
            cells["replica"] = f"replica{process['replica']}/rank{process['claimed_rank']}"
        texts = ("" if cell is None else str(cell) for cell in cells.values())
        table.add_row(*texts, process["process"][:8])
    return table


def _shortened(table: Table) -> Table:
    """The table with its middle left out when it is long."""
    if table.row_count <= LONGEST:
        return table
    half = LONGEST // 2
    short = Table(*(str(column.header) for column in table.columns))
    columns = [list(column.cells) for column in table.columns]
    for number, row in enumerate(zip(*columns, strict=True)):
        if number == half:
            hidden = table.row_count - 2 * half
            short.add_row(f"... {hidden} more lines (--all)")
        if number < half or number >= table.row_count - half:
            short.add_row(*row)
    return short


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
