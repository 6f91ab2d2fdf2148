"""Rendering msProbe's layout from the tables of a run, for any steps and ranks, at any time."""

import fnmatch
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from .blobs.layout import TensorFiles
from .blobs.store import BlobReader
from .identity import is_newer
from .layout import Layout
from .query import Run, folder_of
from .render import Header, render, split
from .render.documents import EVENT_COLUMNS
from .render.leaves import COLUMNS as LEAF_COLUMNS
from .rows import member_of
from .store import side_path

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Selection:
    """Whole numbers in spans, both ends included; without spans every number is in."""

    spans: tuple[tuple[int, int], ...] = ()

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return not self.spans
        return not self.spans or any(first <= number <= last for first, last in self.spans)

    @staticmethod
    def parse(text: str | None, name: str) -> "Selection":
        """From "3-5" or "0,2,7-9"; ValueError names the option and what is allowed."""
        spans = []
        for item in text.split(",") if text is not None else ():
            match = _SPAN.fullmatch(item.strip())
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if first > last:
                raise ValueError(
                    f"{name} {text!r}: expected numbers and spans such as 3-5 or 0,2,7-9"
                )
            spans.append((first, last))
        return Selection(tuple(spans))


FORMATS = ("msprobe", "safetensors")


@dataclass(frozen=True)
class Parts:
    """What of each process's step is written: records whose name matches `name` (`*`, `?` and
    `[...]` as in a shell), all without it; `format` is one of FORMATS.
    """

    name: str | None = None
    format: str = "msprobe"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"--format {self.format!r}: expected one of {', '.join(FORMATS)}")

    def of(self, rows: pa.Table) -> pa.Table:
        """The rows of `records` or `nodes` that are wanted."""
        if self.name is None:
            return rows
        pattern = fnmatch.translate(self.name)
        names = rows["record"].combine_chunks().dictionary_encode()
        fits = [name is not None and bool(re.match(pattern, name)) for name in _texts(names)]
        return rows.filter(pa.array(fits, pa.bool_()).take(names.indices))


def export(
    run: Run,
    to: Path,
    steps: Selection,
    ranks: Selection,
    instance: str | None = None,
    attempt: int | None = None,
    parts: Parts = Parts(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Path]:
    """Write the layout of a run into `to`, a new or empty folder, and yield each folder written.

    `progress(done, total)` counts steps. With the format "safetensors" a folder has one file,
    `tensors.safetensors`, of captured tensors under their names.


    One launch of the job is written: the named one, else the newest; with `attempt`, only what ran
    after that many restarts. Where two of its processes share a folder in a step (a restarted
    rank), the later one stands there. ValueError says what is wrong with a request.
    """
    to = Path(os.path.abspath(to))
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"{to}: expected a new or an empty folder")
    processes = _attempt(_launch(run, instance), attempt)
    processes = [p for p in processes if p["rank"] in ranks]
    stacks = run.table("stacks", ["stack", "frames"])
    frames = dict(zip(stacks["stack"].to_pylist(), stacks["frames"].to_pylist(), strict=True))
    aside = to.parent / f".{to.name}.{uuid.uuid4().hex}"
    layout = Layout(to, aside)
    tensors = TensorFiles(BlobReader(side_path(run.path)), layout)
    try:
        numbers = _steps(run, processes, steps)
        for done, step in enumerate(numbers):
            progress(done, len(numbers))
            yield from _export_step(run, layout, tensors, step, processes, frames, parts)
        progress(len(numbers), len(numbers))
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _texts(names: pa.DictionaryArray) -> list[str | None]:
    texts: list[str | None] = names.dictionary.to_pylist()
    return texts


def header(process: Mapping[str, Any], dump_data_dir: str | None) -> Header:
    """The header of a process's documents, from its row in `processes`."""
    return Header(
        task=process["task"],
        level=process["level"],
        summary_mode=process["summary_mode"],
        precision=process["precision"],
        extra_info=bool(process["extra_info"]),
        dump_data_dir=dump_data_dir,
    )


def _launch(run: Run, instance: str | None) -> list[dict[str, Any]]:
    processes = run.processes().to_pylist()
    names = list(dict.fromkeys(p["instance"] for p in processes))
    if not names:
        raise ValueError(f"run {run.name}: no process has been heard yet")
    if instance is not None and instance not in names:
        raise ValueError(f"launch {instance!r}: expected one of {', '.join(map(str, names))}")
    chosen = instance if instance is not None else names[-1]
    return [p for p in processes if p["instance"] == chosen]


def _attempt(processes: Sequence[dict[str, Any]], attempt: int | None) -> list[dict[str, Any]]:
    """The processes of one attempt, or all; the later ones of a folder last."""
    there = sorted({p["attempt"] or 0 for p in processes})
    if attempt is not None and attempt not in there:
        raise ValueError(f"attempt {attempt}: expected one of {', '.join(map(str, there))}")
    chosen = [p for p in processes if attempt is None or (p["attempt"] or 0) == attempt]
    members = {p["process"]: member_of(p, {}) for p in chosen}

    def order(one: dict[str, Any], other: dict[str, Any]) -> int:
        return 1 if is_newer(members[one["process"]], members[other["process"]]) else -1

    return sorted(chosen, key=cmp_to_key(order))


def _steps(run: Run, processes: Sequence[Mapping[str, Any]], steps: Selection) -> list[int]:
    wanted = pc.field("process").isin([p["process"] for p in processes])
    found = pc.unique(run.table("nodes", ["step"], wanted)["step"]).to_pylist()
    return sorted(step for step in found if step in steps)


def _export_step(
    run: Run,
    layout: Layout,
    files: TensorFiles,
    step: int,
    processes: Sequence[Mapping[str, Any]],
    frames: Mapping[int, Sequence[str]],
    parts: Parts,
) -> Iterator[Path]:
    """All processes of a step from one read: finding one costs more than rendering it."""
    here = pc.field("step") == step
    nodes = parts.of(run.table("nodes", ["process", *EVENT_COLUMNS], here))
    columns = ["process", "record", "seq", "leaf", "digest", *LEAF_COLUMNS]
    records = parts.of(run.table("records", columns, here))
    nodes_of, records_of = split(nodes, "process"), split(records, "process")
    by_folder = {folder_of(p): p for p in processes if p["process"] in nodes_of}
    for folder, process in by_folder.items():
        own_nodes = nodes_of[process["process"]]
        own_records = records_of.get(process["process"], records.slice(0, 0))
        if parts.format == "safetensors":
            if files.write_together(step, folder, own_records):
                yield layout.folder(step, folder)
            continue
        tensors = None
        captured = own_records["data_name"].null_count < own_records.num_rows
        if captured or process["task"] == "tensor":
            tensors = str(layout.folder(step, folder) / "dump_tensor_data")
        documents = render(own_nodes, own_records, frames, header(process, tensors))
        files.write(step, folder, own_records)
        yield layout.write(step, folder, documents)
