"""Which process is which rank, and under which folder name it stands: pure, no clock, no file.

A run holds *instances*, one per launch of the job. A folder name is `rank{R}` once the rank is
known and `proc{pid}` until then. Names are kept apart where two processes would meet:

- two live processes that claim one rank *clash*: the second is `rank{R}.{host}.{pid}`;
- equal pids on two hosts: the second is `proc{pid}.{host}`; anything else that would still meet
  gets the first eight digits of its process id behind it;
- a later attempt of a rank, or the same process in a second session, shares the folder of the
  earlier one and *supersedes* it in the steps that it writes itself.

When a new instance first writes a step, the folders of finished instances leave the layout.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum


class State(Enum):
    """Whether more may come from a process."""

    LIVE = "live"
    LEFT = "left"
    LOST = "lost"


@dataclass(frozen=True)
class Process:
    """What identifies a process; `rank` None while unknown."""

    process: str
    host: str = ""
    boot_id: str = ""
    pid: int = 0
    started: float = 0.0
    attempt: int = 0
    parent: str = ""
    run_key: str = ""
    rank: int | None = None
    delivered_later: bool = False


@dataclass(frozen=True)
class Member:
    """A process with its place in the run. `folder` None: not in the layout (any more)."""

    info: Process
    instance: str
    order: int  # of joining, over the whole run
    folder: str | None
    state: State = State.LIVE
    clash: str = ""  # the process whose rank it claims


@dataclass(frozen=True)
class Changes:
    """What a step of the identity changed; apply in this order."""

    changed: list[str] = field(default_factory=list)  # processes whose Member differs
    renamed: list[tuple[str, str]] = field(default_factory=list)  # folders, old to new
    removed: list[str] = field(default_factory=list)  # folders that leave the layout
    clashes: list[tuple[str, str]] = field(default_factory=list)  # (first, second) claimant


class Identity:
    """The processes of one run. Every method that changes something says what in `Changes`."""

    def __init__(self, members: Iterable[Member] = (), wrote: Iterable[str] = ()) -> None:
        """Of an earlier life: its members, in any order, and the instances that wrote a step."""
        self.members = {m.info.process: m for m in sorted(members, key=lambda m: m.order)}
        self._wrote = set(wrote)

    def join(self, info: Process) -> Changes:
        """The process said hello. A known one returns to life, with its rank if it tells one."""
        if info.process in self.members:
            return self._return(self.members[info.process], info.rank)
        instance = self.instance_for(info) or info.process
        order = max((m.order for m in self.members.values()), default=-1) + 1
        member = self._set(Member(info, instance, order, folder=None))
        if self._stays_out(member):
            return Changes(changed=[info.process])
        return self._place(member)

    def learn(self, process: str, rank: int | None) -> Changes:
        """The process learned its rank."""
        member = self.members[process]
        if rank is None or rank == member.info.rank:
            return Changes()
        member = self._set(member, info=replace(member.info, rank=rank))
        return Changes(changed=[process]) if member.folder is None else self._place(member)

    def leave(self, process: str, state: State) -> Changes:
        """The process said goodbye or was lost."""
        if self.members[process].state is state:
            return Changes()
        self._set(self.members[process], state=state)
        return Changes(changed=[process])

    def writes(self, process: str) -> Changes:
        """Rows of a step came from the process. With the first ones of an instance, the instances
        that have finished leave the layout."""
        own = self.members[process]
        if own.folder is None or own.instance in self._wrote:
            return Changes()
        self._wrote.add(own.instance)
        staying = self._live_instances() | {own.instance}
        gone = [m for m in self.members.values() if m.folder and m.instance not in staying]
        for member in gone:
            self._set(member, folder=None)
        folders = sorted({m.folder for m in gone if m.folder})
        return Changes(changed=[m.info.process for m in gone], removed=folders)

    def instance_for(self, info: Process) -> str | None:
        """The instance a new process belongs to, None when it begins one."""
        by_instance: dict[str, list[Member]] = {}
        for member in self.members.values():
            by_instance.setdefault(member.instance, []).append(member)
        for instance, members in reversed(by_instance.items()):
            if any(m.info.process == info.parent for m in members):
                return instance
            if all(m.info.run_key != info.run_key for m in members):
                continue
            if info.delivered_later or any(m.state is State.LIVE for m in members):
                return instance
            replaced = all(m.folder is None for m in members)
            if not replaced and info.attempt > max(m.info.attempt for m in members):
                return instance
        return None

    def rivals(self, process: str) -> list[str]:
        """Processes that share its folder and supersede it in the steps they write."""
        own = self.members[process]
        return [
            m.info.process
            for m in self.members.values()
            if m.folder == own.folder and m is not own and _age(m) > _age(own)
        ]

    # ------------------------------------------------------------------ details

    def _return(self, member: Member, rank: int | None) -> Changes:
        process = member.info.process
        member = self._set(member, state=State.LIVE)
        if rank is not None and rank != member.info.rank:
            return self.learn(process, rank)
        taken = any(
            m.folder == member.folder and m.instance != member.instance and m.state is State.LIVE
            for m in self._others(member)
        )
        if member.folder is not None and taken:
            return self._place(member)  # it was given away as a finished instance's
        return Changes(changed=[process])

    def _place(self, member: Member) -> Changes:
        """Give the member the folder its rank or pid asks for, or one that keeps it apart."""
        first = self._clashes_with(member)
        folder = self._free_folder(member, clash=first is not None)
        self._set(member, folder=folder, clash=first or "")
        moved = member.folder is not None and member.folder != folder
        return Changes(
            changed=[member.info.process],
            renamed=[(member.folder, folder)] if moved and member.folder else [],
            clashes=[(first, member.info.process)] if first else [],
        )

    def _clashes_with(self, member: Member) -> str | None:
        """Who claims the member's rank at the same time, the first claimant if several."""
        if member.info.rank is None:
            return None
        claimants = [
            m for m in self._others(member) if m.info.rank == member.info.rank and m.folder
        ]
        for other in sorted(claimants, key=lambda m: (bool(m.clash), m.order)):
            same_instance = other.instance == member.instance
            if same_instance and other.info.attempt != member.info.attempt:
                continue  # a restart
            if other.state is State.LIVE and member.state is State.LIVE:
                if not (other.info.delivered_later or member.info.delivered_later):
                    return other.info.process
            late = other.info.delivered_later or member.info.delivered_later
            if late and same_instance and not _same_process(other, member):
                return other.info.process  # nobody knows whether they lived at the same time
        return None

    def _free_folder(self, member: Member, *, clash: bool) -> str:
        info, others = member.info, self._others(member)
        host = re.sub(r"[^A-Za-z0-9_-]+", "-", info.host)[:60] or "host"
        if info.rank is not None:
            names = [f"rank{info.rank}", f"rank{info.rank}.{host}.{info.pid}"][clash:]
        elif any(m.folder == f"proc{info.pid}" and m.info.host == info.host for m in others):
            names = [f"proc{info.pid}"]
        else:
            names = [f"proc{info.pid}", f"proc{info.pid}.{host}"]
        for name in names:
            if all(m.folder != name or self._may_share(m, member) for m in others):
                return name
        return f"{names[-1]}.{info.process[:8]}"

    def _may_share(self, other: Member, member: Member) -> bool:
        if other.instance != member.instance:
            return other.instance not in self._live_instances()
        if member.info.rank is None:
            return _same_process(other, member)
        return True  # a restart: clashes were kept apart before

    def _stays_out(self, member: Member) -> bool:
        """Whether a process that is long gone comes behind an instance that replaced its own."""
        others = self._others(member)
        fellows = [m for m in others if m.instance == member.instance]
        if fellows:
            return all(m.folder is None for m in fellows)
        return member.info.delivered_later and any(
            m.folder and (m.state is State.LIVE or m.info.started > member.info.started)
            for m in others
        )

    def _live_instances(self) -> set[str]:
        return {m.instance for m in self.members.values() if m.state is State.LIVE}

    def _others(self, member: Member) -> list[Member]:
        return [m for m in self.members.values() if m.info.process != member.info.process]

    def _set(self, member: Member, **changes: object) -> Member:
        changed = replace(member, **changes)  # type: ignore[arg-type]
        self.members[member.info.process] = changed
        return changed


def _age(member: Member) -> tuple[int, float, int]:
    return (member.info.attempt, member.info.started, member.order)


def _same_process(one: Member, other: Member) -> bool:
    """Two sessions of one operating system process."""
    a, b = one.info, other.info
    return (a.host, a.boot_id, a.pid, a.started) == (b.host, b.boot_id, b.pid, b.started)
