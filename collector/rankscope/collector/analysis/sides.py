"""One side of a comparison: the leaves of a run, or of a dump directory, as one table.

Rows are sorted by step, place, and the order in which the values were seen. The *place* of a
process is its rank; processes that have none are numbered behind the known ranks, in the order of
joining.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cmp_to_key
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .. import schema
from ..export import Selection
from ..identity import is_newer
from ..query import Run, RunNotFoundError, folder_of, open_run
from ..rows import member_of
from . import dumps

#: Columns of `records` that an analysis reads.
COLUMNS = [
    "step", "process", "seq", "leaf", "record", "kind", "direction", "part", "path", "form", "type",
    "dtype", "shape", "requires_grad", "max", "min", "mean", "norm", "sum", "sum_of_squares",
    "elements", "nan_count", "inf_count", "zero_count", "checksum", "digest", "data_name", "value",
    "extra", "stack", "parent", "std", "samples",
]  # fmt: skip
ALL = Selection()


class AnalysisError(Exception):
    """What was asked for cannot be looked at; the text says why."""


@dataclass(frozen=True)
class Side:
    """`table` has the columns of COLUMNS and `place`. `folders` names a (step, place)'s folder.

    `tensor_file(step, place, name)` is where a captured tensor may stand as a file.
    """

    path: Path
    table: pa.Table
    task: str
    summary_mode: str
    folders: Mapping[tuple[int, int], str]
    processes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    frames: Callable[[int], Sequence[str]] = lambda stack: ()
    store: Path | None = None  # RUN.rankscope, where whole tensors lie by digest

    @property
    def name(self) -> str:
        """The side as it is called on the screen."""
        return self.path.name or str(self.path)

    def tensor_file(self, step: int, place: int, name: str) -> Path:
        """Where the layout has a captured tensor."""
        folder = self.folders.get((step, place), f"rank{place}")
        root = self.path if folder.startswith("/") else self.path / f"step{step}"
        return root / folder / "dump_tensor_data" / name


def open_side(path: Path | str, steps: Selection = ALL, ranks: Selection = ALL) -> Side:
    """The run at a path, or the dump directory there (a dump path, a step, a rank, a dump.json).

    AnalysisError says what was looked for when it is neither.
    """
    place = Path(os.path.abspath(path))
    try:
        run = open_run(place)
    except RunNotFoundError as error:
        found = dumps.find(place)
        if not found:
            raise AnalysisError(f"{error}; nor is there a dump.json below it") from None
        side = _dump_side(place, found, steps, ranks)
    else:
        side = run_side(run, steps, ranks)
    if not side.table.num_rows:
        raise AnalysisError(f"{place}: no values were recorded (task {side.task})")
    return side


def run_side(run: Run, steps: Selection = ALL, ranks: Selection = ALL) -> Side:
    """The newest launch of a run; where two processes of it share a rank, the later one's rows."""
    processes = _newest_launch(run)
    places = {p["process"]: place for p, place in zip(processes, _places(processes), strict=True)}
    places = {process: place for process, place in places.items() if place in ranks}
    if not places:
        raise AnalysisError(f"run {run.name}: no process of the newest launch has such a rank")
    names = [name for name in COLUMNS if name in schema.RECORDS.names]
    where = pc.field("process").isin(list(places))
    if steps.spans:
        spans = [(pc.field("step") >= a) & (pc.field("step") <= b) for a, b in steps.spans]
        chosen = spans[0]
        for span in spans[1:]:
            chosen = chosen | span
        where = where & chosen
    available = [name for name in names if name in run.dataset("records").schema.names]
    table = run.table("records", available, where)
    table = _with_places(_complete(table), places)
    table = _latest_of_place(table, [p["process"] for p in processes])
    by_place = {places[p["process"]]: p for p in processes if p["process"] in places}
    folders = {(step, place): folder_of(by_place[place]) for step, place in _units(table)}
    stacks: dict[int, list[str]] = {}

    def frames(stack: int) -> Sequence[str]:
        if not stacks:
            rows = run.table("stacks", ["stack", "frames"])
            stacks.update(zip(rows["stack"].to_pylist(), rows["frames"].to_pylist(), strict=True))
        return stacks.get(stack, ())

    tasks = [p["task"] for p in by_place.values()]
    modes = [p["summary_mode"] for p in by_place.values()]
    return Side(
        run.path, sort(table), tasks[0] or "statistics", modes[0] or "statistics", folders,
        by_place, frames, run.store,
    )  # fmt: skip


def of_table(
    table: pa.Table,
    task: str = "statistics",
    summary_mode: str = "statistics",
    processes: Mapping[int, Mapping[str, Any]] | None = None,
) -> Side:
    """A side of rows in memory: the columns of `records`, and `place`."""
    return Side(Path("memory"), sort(_complete(table)), task, summary_mode, {}, processes or {})


def sort(table: pa.Table) -> pa.Table:
    """Rows by step, place and the order in which they were seen."""
    keys = [table[name].to_numpy() for name in ("leaf", "seq", "place", "step")]
    order = np.lexsort(keys)
    if np.all(order[1:] > order[:-1]):
        return table.combine_chunks()
    return table.take(pa.array(order)).combine_chunks()


def _dump_side(
    place: Path, found: Sequence[dumps.Found], steps: Selection, ranks: Selection
) -> Side:
    wanted = [one for one in found if one.step in steps and one.place in ranks]
    if not wanted:
        raise AnalysisError(f"{place}: no dump of such steps and ranks")
    read = dumps.read(wanted)
    root = place if place.is_dir() else place.parent
    folders = {(one.step, one.place): str(one.folder) for one in wanted}
    return Side(
        root, sort(_complete(read.table)), read.task, read.summary_mode, folders,
        frames=lambda stack: read.frames.get(stack, ()),
    )  # fmt: skip


def _newest_launch(run: Run) -> list[dict[str, Any]]:
    processes = run.processes().to_pylist()
    if not processes:
        raise AnalysisError(f"run {run.name}: no process has been heard yet")
    newest = [p for p in processes if p["instance"] == processes[-1]["instance"]]
    members = {p["process"]: member_of(p, {}) for p in newest}

    def order(one: dict[str, Any], other: dict[str, Any]) -> int:
        return 1 if is_newer(members[one["process"]], members[other["process"]]) else -1

    return sorted(newest, key=cmp_to_key(order))


def _places(processes: Sequence[Mapping[str, Any]]) -> list[int]:
    """The rank of each; processes that share a rank and live at once are one after another too."""
    free = max((p["rank"] for p in processes if p["rank"] is not None), default=-1) + 1
    result = []
    for process in processes:
        if process["rank"] is not None and not process["clash"]:
            result.append(int(process["rank"]))
        else:
            result.append(free)
            free += 1
    return result


def _complete(table: pa.Table) -> pa.Table:
    for name in COLUMNS:
        if name not in table.schema.names:
            kind = pa.list_(pa.float64()) if name == "samples" else pa.float64()
            table = table.append_column(name, pa.nulls(table.num_rows, kind))
    return table


def _with_places(table: pa.Table, places: Mapping[str, int]) -> pa.Table:
    encoded = table["process"].cast(pa.string()).combine_chunks().dictionary_encode()
    numbers = np.array([places[name] for name in encoded.dictionary.to_pylist()] or [0])
    column = numbers[encoded.indices.to_numpy()] if table.num_rows else np.zeros(0, np.int64)
    return table.append_column("place", pa.array(column, pa.int64()))


def _latest_of_place(table: pa.Table, order: Sequence[str]) -> pa.Table:
    """Of a step and place that several processes wrote, the rows of the one latest in `order`."""
    encoded = table["process"].cast(pa.string()).combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if len(names) == len(pc.unique(table["place"])):
        return table
    age = np.array([order.index(name) for name in names])[encoded.indices.to_numpy()]
    step, place = table["step"].to_numpy(), table["place"].to_numpy()
    units, inverse = np.unique(np.stack([step, place]), axis=1, return_inverse=True)
    newest = np.full(units.shape[1], -1)
    np.maximum.at(newest, inverse.ravel(), age)
    return table.filter(pa.array(age == newest[inverse.ravel()]))


def _units(table: pa.Table) -> list[tuple[int, int]]:
    pairs = np.unique(np.stack([table["step"].to_numpy(), table["place"].to_numpy()]), axis=1)
    return [(int(step), int(place)) for step, place in pairs.T]
