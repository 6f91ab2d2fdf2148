"""What is known about one run: identity and steps together, and the table rows that say so.

No I/O and no clock of its own: the committer tells what happened, stores the rows that come back,
and hands the jobs on to the finisher once the rows are durable.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rankscope.collector.config import Config
from rankscope.collector.identity import Changes, Identity, Process, State
from rankscope.collector.jobs import (
    Job,
    RemoveFolders,
    RenameFolder,
    RenderStep,
    SealStep,
)
from rankscope.collector.jobs import (
    Part as RenderPart,
)
from rankscope.collector.rows import (
    EMPTY_PROCESSES_ROW,
    EMPTY_STEPS_ROW,
    RECORDING,
    Row,
    claim_of,
    hello_columns,
    hello_of,
    member_of,
    process_of,
    rank_columns,
    recording_columns,
    seal_of,
)
from rankscope.collector.steps import Part, Render, Seal, Steps
from rankscope.v1 import collector_pb2 as pb

_PARTS = {
    pb.StepEvent.BEGIN: ("begin", Part.OPEN),
    pb.StepEvent.PAUSE: ("pause", Part.PAUSED),
    pb.StepEvent.END: ("end", Part.ENDED),
    pb.StepEvent.SKIPPED: ("skipped", Part.SKIPPED),
}
_PART_OF_EVENT = dict(_PARTS.values())


@dataclass
class Effects:
    """Rows to store, jobs to do after them, and lines for users' logs: (process, level, text)."""

    processes: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    notices: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, other: "Effects") -> None:
        """Append another's."""
        self.processes += other.processes
        self.steps += other.steps
        self.jobs += other.jobs
        self.notices += other.notices


class Book:
    """The state of one run. One thread at a time."""

    def __init__(
        self, config: Config, rows: Iterable[Row] = (), events: Iterable[Row] = ()
    ) -> None:
        """Rows of the tables `processes` and `steps` of an earlier life are replayed."""
        self._config = config
        self._rows: dict[str, Row] = {}
        self._crowded = False
        self.steps = Steps(
            seal_after_seconds=config.seal_after_seconds,
            pause_render_seconds=config.pause_render_seconds,
        )
        for row in sorted(rows, key=lambda row: row["revision"]):
            self._rows[row["process"]] = dict(row)
        self.identity = self._replay(list(events))

    # ------------------------------------------------------------------ what happened

    def hello(self, hello: pb.Hello) -> Effects:
        """A process said hello."""
        process = hello.process_uuid
        new = EMPTY_PROCESSES_ROW | {"process": process, "revision": -1}
        row = self._rows.setdefault(process, new)
        row |= hello_columns(hello)
        if hello.HasField("rank"):
            row |= rank_columns(hello.rank)
        changes = self.identity.join(process_of(hello))
        self.steps.join(process)
        effects = self._effects(changes)
        if self._is_crowded() and not self._crowded:
            self._crowded = True
            limit = self._config.layout_max_processes
            text = f"more than {limit} processes: dump.json is written by `rankscope export` only"
            effects.notices.append((process, "info", text))
        return effects

    def batch(
        self, process: str, sequence: int, message: pb.Batch, steps_seen: Iterable[int], now: float
    ) -> Effects:
        """A batch is about to be stored; call in the order of sequences."""
        effects = Effects()
        row = self._rows[process]
        if message.HasField("recording"):
            row |= recording_columns(message.recording)
            effects.processes.append(self._revise(process))
        if message.HasField("rank"):
            row |= rank_columns(message.rank)
            changes = self.identity.learn(process, **claim_of(message.rank))
            effects.add(self._effects(changes))
            if not changes.changed:
                effects.processes.append(self._revise(process))
        begun = {event.step for event in message.steps}
        for step in steps_seen:
            if step not in begun and not self.steps.took_part(process, step):
                effects.steps.append(self._step_row(process, sequence, step, "begin"))
            self.steps.rows(process, step, now)
        for event in message.steps:
            name, part = _PARTS.get(event.kind, ("begin", Part.OPEN))
            self.steps.event(process, event.step, part, now)
            effects.steps.append(
                self._step_row(
                    process,
                    sequence,
                    event.step,
                    name,
                    events=event.events if part is Part.ENDED else None,
                    reason=event.reason or None,
                    agent_seconds=event.agent_seconds or None,
                    wall_seconds=event.wall_seconds or None,
                    shed=event.shed or None,
                    time=event.time,
                )
            )
        for drop in message.drops:
            effects.steps.append(
                self._step_row(
                    process,
                    sequence,
                    drop.step,
                    "dropped",
                    events=drop.events,
                    reason=drop.reason,
                )
            )
        if steps_seen or message.steps:
            effects.add(self._effects(self.identity.writes(process)))
        if message.HasField("goodbye"):
            reason = message.goodbye.reason
            effects.steps.append(self._step_row(process, sequence, None, "left", reason=reason))
        return effects

    def refused(self, process: str, sequence: int, why: str) -> Effects:
        """A batch was set aside."""
        return Effects(steps=[self._step_row(process, sequence, None, "refused", reason=why)])

    def gone(self, process: str, state: State, why: str, now: float) -> Effects:
        """The process left or was lost."""
        if process not in self.identity.members:
            return Effects()
        if self.identity.members[process].state is not State.LIVE:
            return Effects()
        label = "lost" if state is State.LOST else f"left: {why}"
        self.steps.leave(process, label, now)
        return self._effects(self.identity.leave(process, state))

    # ------------------------------------------------------------------ what is to be done

    def due(self, now: float) -> list[Job]:
        """Renders and seals that are due; the rows they need are stored."""
        return self._jobs(self.steps.due(now))

    def finish(self, now: float) -> list[Job]:
        """All renders and seals that are left, for a collector that ends."""
        return self._jobs(self.steps.finish(now))

    def live(self) -> list[str]:
        """Processes of which more may come."""
        return [p for p, m in self.identity.members.items() if m.state is State.LIVE]

    def belongs(self, info: Process) -> bool:
        """Whether the process is of this run, or would join an instance of it. A run without any
        process is one whose collector was killed before its first commit.
        """
        if info.process in self._rows or not self._rows:
            return True
        return self.identity.instance_for(info) is not None

    def has_left(self, process: str) -> bool:
        """Whether the process said goodbye."""
        member = self.identity.members.get(process)
        return member is not None and member.state is State.LEFT

    def hello_of(self, process: str) -> pb.Hello:
        """As much of its Hello as the tables keep."""
        return hello_of(self._rows[process])

    def folders_of(self, process: str) -> list[tuple[int, str]]:
        """(step, folder) of what stands in the layout for the process."""
        folder = self.identity.members[process].folder
        if folder is None or not self._eager():
            return []
        steps = self.steps.steps_of(process)
        return [(step, folder) for step in steps if not self._superseded(process, step)]

    def row(self, process: str) -> Row:
        """The newest row of `processes`."""
        return self._rows[process]

    def in_layout(self) -> list[tuple[str, int, str]]:
        """(process, step, folder) of all that should stand in the layout."""
        return [(p, *place) for p in self.identity.members for place in self.folders_of(p)]

    # ------------------------------------------------------------------ details

    def _jobs(self, actions: Iterable[Render | Seal]) -> list[Job]:
        jobs: list[Job] = []
        for action in actions:
            if isinstance(action, Seal):
                ranks = {p: m.rank for p, m in self.identity.members.items() if m.rank is not None}
                jobs.append(SealStep(action, ranks))
            elif parts := self._render_parts(action):
                jobs.append(RenderStep(action.step, parts))
        return jobs

    def _render_parts(self, render: Render) -> dict[str, RenderPart]:
        if not self._eager():
            return {}
        parts = {}
        for process in sorted(render.processes):
            folder = self.identity.members[process].folder
            if folder and not self._superseded(process, render.step):
                row = self._rows[process]
                parts[process] = RenderPart(folder, *(row[name] for name in RECORDING))
        return parts

    def _superseded(self, process: str, step: int) -> bool:
        return any(self.steps.took_part(rival, step) for rival in self.identity.rivals(process))

    def _eager(self) -> bool:
        return self._config.layout == "eager" and not self._is_crowded()

    def _is_crowded(self) -> bool:
        in_layout = sum(member.folder is not None for member in self.identity.members.values())
        return in_layout > self._config.layout_max_processes

    def _effects(self, changes: Changes) -> Effects:
        effects = Effects(processes=[self._revise(process) for process in changes.changed])
        if changes.cleared:
            effects.jobs.append(RemoveFolders(tuple(changes.cleared)))
        effects.jobs += [RenameFolder(old, new) for old, new in changes.renamed]
        if changes.removed:
            effects.jobs.append(RemoveFolders(tuple(changes.removed)))
        for process in changes.redrawn:
            for step in self.steps.steps_of(process):
                self.steps.want_render(process, step, 0.0)
        for first, second in changes.clashes:
            effects.notices += self._clash_notices(first, second)
        return effects

    def _clash_notices(self, first: str, second: str) -> list[tuple[str, str, str]]:
        if any(self.identity.members[p].info.delivered_later for p in (first, second)):
            return []  # nobody who could mend it is left
        rank, folder = self.identity.members[second].rank, self.identity.members[second].folder
        cure = "tell them apart with start(rank_id=...), such as rank_id=self.gpu_id"
        groups = {self.identity.members[p].info.group for p in (first, second)}
        if len(groups) > 1 and not self._config.split_replicas:
            cure += ", or number them by group: rankscope serve --split-replicas"
        return [
            (
                one,
                "warning",
                f"{self._who(other)} claims rank {rank} as well; both are kept "
                f"(the second one as {folder}); {cure}",
            )
            for one, other in ((first, second), (second, first))
        ]

    def _who(self, process: str) -> str:
        row = self._rows[process]
        return f"process {row['pid']} on {row['host']}"

    def _revise(self, process: str) -> Row:
        row, member = self._rows[process], self.identity.members[process]
        row |= {
            "revision": row["revision"] + 1,
            "instance": member.instance,
            "joined": member.order,
            "folder": member.folder,
            "rank": member.rank,
            "replica": member.replica,
            "clash": member.clash or None,
            "state": member.state.value,
            "time": time.time(),
        }
        return dict(row)

    def _step_row(
        self, process: str, batch: int, step: int | None, event: str, **columns: Any
    ) -> Row:
        rank = self.identity.members[process].rank
        known = {"step": step, "rank": rank, "process": process, "batch": batch, "event": event}
        return EMPTY_STEPS_ROW | known | columns

    def _replay(self, events: list[Row]) -> Identity:
        left = {row["process"]: row["reason"] for row in events if row["event"] == "left"}
        members = [
            member_of(row, left) for row in self._rows.values() if row["folder"] or row["instance"]
        ]
        for member in members:
            if member.state is State.LIVE:
                self.steps.join(member.info.process)
        seals: dict[int, Row] = {}
        known = [r for r in events if r["process"] in self._rows and r["batch"] is not None]
        known.sort(key=lambda row: row["batch"])
        for row in known:
            if (part := _PART_OF_EVENT.get(row["event"])) is not None:
                self.steps.event(row["process"], row["step"], part, 0.0)
        for member in members:
            if member.state is not State.LIVE:
                process = member.info.process
                why = "lost" if member.state is State.LOST else f"left: {left.get(process, '')}"
                self.steps.leave(process, why, 0.0)
        for row in sorted((r for r in events if r["event"] == "sealed"), key=lambda r: r["time"]):
            seals[row["step"]] = row
        self.steps.restore(map(seal_of, seals.values()), 0.0)
        wrote = {m.instance for m in members if self.steps.steps_of(m.info.process)}
        return Identity(members, wrote, split_replicas=self._config.split_replicas)
