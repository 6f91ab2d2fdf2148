"""What a run holds: its processes, and how much of each step came from each of them.

A process's part of a step is in one of these states:

- complete: it ended the step and everything it recorded is stored
- arriving: it ended the step, some events are still to come
- open: it is in the step now
- skipped: a filter kept it from recording
- incomplete: it did not end the step, or some of its events are gone; `why` says what is known
- missing: the same, and nothing of it is stored
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .query import Run

_STORED = """
select step, process, count(distinct record) filter (structure is not null) as records,
  count(*) as events from all_nodes group by step, process
"""
_HAPPENED = """
select step, process, event, events, reason, missing, agent_seconds, wall_seconds, shed
  from all_steps
  where step is not null order by batch, time
"""
_COST = ("agent_seconds", "wall_seconds", "shed")
_LEFT_OUT = re.compile(r"(\w+): (\d+) tensors")  # as an agent counts them
_REFUSED = """
select process, count(*) as batches, min(reason) as reason from all_steps
  where event = 'refused' group by process order by process
"""


@dataclass(frozen=True)
class Part:
    """One process's part of one step. `records` counts those with data, as in dump.json."""

    records: int = 0
    state: str = "open"
    why: str = ""
    dropped: int = 0
    shed: str = ""
    agent_seconds: float | None = None
    wall_seconds: float | None = None

    def __str__(self) -> str:
        text = f"{self.records} {self.state}" if self.records or not self.why else self.state
        text += f" ({self.why})" if self.why else ""
        text += f", without {self.shed.replace(',', ' and ')}" if self.shed else ""
        return text + (f", {self.dropped} events dropped" if self.dropped else "")


@dataclass(frozen=True)
class Overview:
    """A run's processes as they joined, and parts by step, then by process.

    `refused` says for a process how many of its batches could not be read and were set aside.
    """

    processes: list[dict[str, Any]]
    parts: Mapping[int, Mapping[str, Part]]
    refused: Mapping[str, str]

    def instances(self) -> dict[str, list[dict[str, Any]]]:
        """Processes by launch of the job, the oldest launch first."""
        result: dict[str, list[dict[str, Any]]] = {}
        for process in self.processes:
            result.setdefault(process["instance"] or "", []).append(process)
        return result


@dataclass
class _Seen:
    """What the tables say about one (step, process)."""

    records: int = 0
    stored: int = 0
    recorded: int | None = None  # events the agent says it recorded, known at the end of the step
    skipped: str | None = None
    dropped: int = 0
    drop_reasons: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)  # tensors, by reason
    missing: str | None = None  # why, from the newest seal
    cost: dict[str, Any] = field(default_factory=dict)  # agent_seconds, wall_seconds, shed


def overview(run: Run) -> Overview:
    """Read what a run holds; columns are projected, so this stays cheap for large runs."""
    processes = run.processes().to_pylist()
    seen: dict[tuple[int, str], _Seen] = {}
    for row in run.sql(_STORED).to_pylist():
        entry = seen.setdefault((row["step"], row["process"]), _Seen())
        entry.records, entry.stored = row["records"], row["events"]
    _happened(run.sql(_HAPPENED).to_pylist(), seen)
    states = {p["process"]: p["state"] or "live" for p in processes}
    parts: dict[int, dict[str, Part]] = {}
    for (step, process), entry in sorted(seen.items()):
        parts.setdefault(step, {})[process] = _part(entry, states.get(process, "unknown"))
    refused = {
        row["process"]: f"{row['batches']} batches refused ({row['reason']})"
        for row in run.sql(_REFUSED).to_pylist()
    }
    return Overview(processes, parts, refused)


def _happened(rows: Iterable[dict[str, Any]], seen: dict[tuple[int, str], _Seen]) -> None:
    seals: dict[int, dict[str, str]] = {}
    for row in rows:
        if row["event"] == "sealed":
            seals[row["step"]] = json.loads(row["missing"] or "{}")
            continue
        if not row["process"]:
            continue
        entry = seen.setdefault((row["step"], row["process"]), _Seen())
        if row["event"] == "end":
            entry.recorded = max(entry.recorded or 0, row["events"] or 0)
            entry.cost = {name: row[name] for name in _COST}
            entry.cost["shed"] = row["shed"] or ""
        elif row["event"] == "skipped":
            entry.skipped = row["reason"] or "filter"
        elif row["event"] == "dropped":
            entry.dropped += row["events"] or 0
            if match := _LEFT_OUT.fullmatch(row["reason"] or ""):
                entry.left_out[match[1]] += int(match[2])
            else:
                entry.drop_reasons.add(row["reason"] or row["event"])
    for step, missing in seals.items():
        for process, why in missing.items():
            seen.setdefault((step, process), _Seen()).missing = why


def _part(seen: _Seen, process_state: str) -> Part:
    state, why = _state(seen, process_state)
    if state == "missing" and seen.records:
        state = "incomplete"
    if seen.dropped:
        why = ", ".join(filter(None, [why, *sorted(seen.drop_reasons)]))
    texts = (f"{n} tensors left out: {reason}" for reason, n in sorted(seen.left_out.items()))
    why = ", ".join(filter(None, [why, *texts]))
    return Part(seen.records, state, why, seen.dropped, **seen.cost)


def _state(seen: _Seen, process_state: str) -> tuple[str, str]:
    if seen.recorded is not None:
        lacking = seen.recorded - seen.stored
        if lacking <= 0:
            return "complete", ""
        state = "arriving" if process_state == "live" else "missing"
        return state, f"{lacking} events not stored"
    if seen.skipped is not None:
        return "skipped", seen.skipped
    if process_state != "live":
        return "missing", seen.missing or process_state
    if seen.missing is not None:
        return "missing", seen.missing
    return "open", ""
