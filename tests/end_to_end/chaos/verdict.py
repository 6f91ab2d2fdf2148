"""What was produced against what is stored: the one assertion of the suite."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from rankscope.collector.store import StoreGone, open_readonly


@dataclass
class Outcome:
    """One row's figures. `lost` is what nobody counted; `lost_seconds` how far back it reaches."""

    name: str
    produced: int = 0
    stored: int = 0
    duplicates: int = 0
    dropped: int = 0
    lost: int = 0
    lost_seconds: float = 0.0
    blocked_seconds: float = 0.0
    exit_seconds: float = 0.0
    status: int | None = None
    processes: int = 0
    losses: list[tuple[int, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Sentences about what is wrong; none: all is well."""


HEADINGS = (
    ("fault", 30, lambda o: o.name),
    ("exit", 6, lambda o: str(o.status)),
    ("procs", 6, lambda o: str(o.processes)),
    ("produced", 9, lambda o: str(o.produced)),
    ("stored", 8, lambda o: str(o.stored)),
    ("twice", 6, lambda o: str(o.duplicates)),
    ("dropped", 8, lambda o: str(o.dropped)),
    ("lost", 5, lambda o: str(o.lost)),
    ("lost ms", 8, lambda o: f"{1000 * o.lost_seconds:.0f}"),
    ("blocked ms", 11, lambda o: f"{1000 * o.blocked_seconds:.0f}"),
    ("exit s", 7, lambda o: f"{o.exit_seconds:.2f}"),
)


def lines(outcomes):
    """The table that is printed."""
    yield "".join(
        title.ljust(width) if i == 0 else title.rjust(width)
        for i, (title, width, _) in enumerate(HEADINGS)
    )
    for outcome in outcomes:
        texts = [(text(outcome), width) for _, width, text in HEADINGS]
        yield "".join(t.ljust(w) if i == 0 else t.rjust(w) for i, (t, w) in enumerate(texts))
        yield from (f"    {fault}" for fault in outcome.faults)


@dataclass
class Stored:
    """What the store says of one process."""

    sequences: np.ndarray
    last_time: float
    leaves: int
    records: int
    twice: int
    dropped: int
    refused: int
    ended_steps: dict[int, int]
    step_counts: Counter


NOTHING = Stored(np.zeros(0, int), 0.0, 0, 0, 0, 0, 0, {}, Counter())


def read_run(run):
    """(rows of processes, process -> Stored); nothing when there is no such run."""
    try:
        reader = open_readonly(run)
    except StoreGone:
        return [], {}
    steps = reader.steps_rows().to_pylist()
    rows = reader.processes()
    parts = [reader.read_step(number) for number in reader.step_numbers()]
    nodes = _joined(parts, 0, ["process", "seq", "step", "leaves", "time"])
    records = _joined(parts, 1, ["process", "seq", "leaf"])
    return rows, {
        row["process"]: _of_process(row["process"], nodes, records, steps) for row in rows
    }


def _joined(parts, index, columns):
    """Columns of all steps as numpy arrays; none when nothing is stored."""
    tables = [part[index].select(columns) for part in parts]
    return {
        name: np.concatenate([_plain(table[name]) for table in tables]) if tables else np.zeros(0)
        for name in columns
    }


def _plain(column):
    if pa.types.is_dictionary(column.type):
        column = column.cast(pa.string())
    return column.to_numpy(zero_copy_only=False)


def _of_process(process, nodes, records, steps):
    events = [row for row in steps if row["process"] == process]
    own = {name: column[nodes["process"] == process] for name, column in nodes.items()}
    leaves = {name: column[records["process"] == process] for name, column in records.items()}
    pairs = np.stack([leaves["seq"], leaves["leaf"]], axis=1) if len(leaves["seq"]) else []
    distinct = np.unique(own["seq"])
    twice = len(own["seq"]) - len(distinct)
    twice += len(pairs) - (len(np.unique(pairs, axis=0)) if len(pairs) else 0)
    return Stored(
        sequences=distinct,
        last_time=float(own["time"].max()) if len(distinct) else 0.0,
        leaves=int(own["leaves"].sum()),
        records=len(leaves["seq"]),
        twice=twice,
        dropped=sum(row["events"] or 0 for row in events if row["event"] == "dropped"),
        refused=sum(row["event"] == "refused" for row in events),
        ended_steps={row["step"]: row["events"] for row in events if row["event"] == "end"},
        step_counts=Counter(own["step"].tolist()),
    )


def judge(outcome, run, journals, *, may_lose_seconds=None):
    """Fill in an outcome. `journals` is what `read_journals` gives.

    `may_lose_seconds`: a process that was killed may lack what it recorded last, that long ago at
    most; None: nothing may be missing that was not counted.
    """
    rows, stored = read_run(run)
    known = {row["pid"]: row["process"] for row in rows}
    outcome.processes = len(journals)
    for pid, recorded in journals.items():
        outcome.produced += recorded[0]
        found = stored[known[pid]] if pid in known else NOTHING
        _judge_process(outcome, pid, recorded, found, may_lose_seconds)
    if len(known) != len(rows):
        outcome.faults.append("two processes with one pid")
    _judge_layout(outcome, Path(run))
    return outcome


def _judge_process(outcome, pid, recorded, found, may_lose_seconds):
    say = outcome.faults.append
    produced, first_time, last_time = recorded
    stored = len(found.sequences)
    outcome.stored += stored
    outcome.duplicates += found.twice
    outcome.dropped += found.dropped
    if found.twice:
        say(f"process {pid}: {found.twice} rows are stored twice")
    if found.refused:
        say(f"process {pid}: {found.refused} batches were refused")
    if found.leaves != found.records:
        say(f"process {pid}: its events have {found.leaves} leaves, {found.records} are stored")
    lost = produced - stored - found.dropped
    if may_lose_seconds is None:
        if lost:
            say(f"process {pid}: {produced} events - {stored} stored - {found.dropped} dropped")
    else:
        outcome.lost += max(lost, 0)
        since = last_time - (found.last_time or first_time) if lost > 0 else 0.0
        outcome.lost_seconds = max(outcome.lost_seconds, since)
        if since > may_lose_seconds:
            say(f"process {pid}: the last {since:.2f} s are lost")
    if not found.dropped and stored and found.sequences[-1] != stored - 1:
        say(f"process {pid}: the events up to {found.sequences[-1]} are only {stored}")
    if not found.dropped:
        for step, events in found.ended_steps.items():
            if found.step_counts[step] != events:
                say(f"process {pid}, step {step}: {events} said, {found.step_counts[step]} stored")


def _judge_layout(outcome, run):
    """Every file of the layout is whole, and every step that ended has its dump.json."""
    for path in run.rglob("*"):
        if path.is_dir():
            continue
        if path.suffix != ".json":
            outcome.faults.append(f"{path.relative_to(run)} does not belong there")
            continue
        try:
            json.loads(path.read_text())
        except ValueError as error:
            outcome.faults.append(f"{path.relative_to(run)} is not whole: {error}")
    try:
        reader = open_readonly(run)
    except StoreGone:
        return
    rows = {row["process"]: row for row in reader.processes()}
    for step in reader.steps_rows().to_pylist():
        folder = rows[step["process"]]["folder"] if step["process"] in rows else None
        if step["event"] != "end" or folder is None:
            continue
        if not (run / f"step{step['step']}" / folder / "dump.json").exists():
            outcome.faults.append(f"step{step['step']}/{folder}/dump.json is missing")
