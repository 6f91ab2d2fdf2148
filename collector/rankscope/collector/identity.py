"""Which process is which rank, and under which folder name it stands: pure, no clock, no file.

A run holds *instances*, one per launch of the job. A folder name is `rank{R}` once the rank is
known and `proc{pid}` until then. Names are kept apart where two processes would meet:

- two live processes that claim one rank *clash*: the second is `rank{R}.{host}.{pid}`;
- with `split_replicas`, groups of processes that number their ranks independently are replicas of
  one launch and get ranks of their own (see `replicas`);
- equal pids on two hosts: the second is `proc{pid}.{host}`; anything else that would still meet
  gets the first eight digits of its process id behind it;
- a later attempt of a rank, or the same process in a second session, shares the folder of the
  earlier one and *supersedes* it in the steps that it writes itself.

When a new instance first writes a step, the folders of finished instances leave the layout.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from rankscope.collector.replicas import Claim, places


class State(Enum):
    """Whether more may come from a process."""

    LIVE = "live"
    LEFT = "left"
    LOST = "lost"


@dataclass(frozen=True)
class Process:
    """What identifies a process; `rank` is the one it claims, None while unknown.

    `group`, `world_size` (0 for unknown) and `replica` belong to that rank. A `pinned` rank was
    given by hand and is never changed.
    """

    process: str
    host: str = ""
    boot_id: str = ""
    pid_namespace: int = 0
    pid: int = 0
    parent_pid: int = 0
    started: float = 0.0
    attempt: int = 0
    parent: str = ""
    run_key: str = ""
    rank: int | None = None
    pinned: bool = False
    group: str = ""
    world_size: int = 0
    replica: int | None = None
    delivered_later: bool = False


@dataclass(frozen=True)
class Member:
    """A process with its place in the run. `folder` None: not in the layout (any more).

    `rank` is its rank in the run: the claimed one, or with `split_replicas` that of its replica.
    """

    info: Process
    instance: str
    order: int  # of joining, over the whole run
    folder: str | None
    state: State = State.LIVE
    clash: str = ""  # the process whose rank it claims
    rank: int | None = None
    replica: int | None = None


@dataclass(frozen=True)
class Changes:
    """What a step of the identity changed; apply in this order."""

    changed: list[str] = field(default_factory=list)  # processes whose Member differs
    cleared: list[str] = field(default_factory=list)  # folders that are given up
    renamed: list[tuple[str, str]] = field(default_factory=list)  # folders, old to new
    removed: list[str] = field(default_factory=list)  # folders that leave the layout
    redrawn: list[str] = field(default_factory=list)  # processes whose folders are written anew
    clashes: list[tuple[str, str]] = field(default_factory=list)  # (first, second) claimant


class Identity:
    """The processes of one run. Every method that changes something says what in `Changes`."""

    def __init__(
        self,
        members: Iterable[Member] = (),
        wrote: Iterable[str] = (),
        *,
        split_replicas: bool = False,
    ) -> None:
        """Of an earlier life: its members, in any order, and the instances that wrote a step."""
        self._split = split_replicas
        self.members = {m.info.process: m for m in sorted(members, key=lambda m: m.order)}
        self._wrote = set(wrote)

    def join(self, info: Process) -> Changes:
        """The process said hello. A known one returns to life, with its rank if it tells one."""
        if info.process in self.members:
            return self._return(self.members[info.process], info)
        instance = self.instance_for(info) or info.process
        order = max((m.order for m in self.members.values()), default=-1) + 1
        member = self._set(Member(info, instance, order, folder=None))
        if self._stays_out(member):
            self._set(member, rank=info.rank)
            return Changes(changed=[info.process])
        return self._settle(member)

    def learn(self, process: str, rank: int | None, **told: Any) -> Changes:
        """The process learned its rank; `told` are the fields of Process that belong to it."""
        member = self.members[process]
        if rank is None:
            return Changes()
        info = replace(member.info, rank=rank, **told)
        if info == member.info:
            return Changes()
        member = self._set(member, info=info)
        if member.folder is None:
            self._set(member, rank=rank)
            return Changes(changed=[process])
        return self._settle(member)

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
            if self._split and any(m.state is State.LIVE for m in members):
                return instance  # replicas may be launches of their own
            if all(m.info.run_key != info.run_key for m in members):
                continue
            if info.delivered_later or any(m.state is State.LIVE for m in members):
                return instance
            replaced = all(m.folder is None for m in members)
            newer = info.attempt > max(m.info.attempt for m in members)
            if not replaced and (newer or _is_late_fellow(info, [m.info for m in members])):
                return instance
        return None

    def rivals(self, process: str) -> list[str]:
        """Processes that share its folder and supersede it in the steps they write."""
        own = self.members[process]
        return [
            m.info.process
            for m in self.members.values()
            if m.folder == own.folder and m is not own and is_newer(m, own)
        ]

    # ------------------------------------------------------------------ details

    def _return(self, member: Member, info: Process) -> Changes:
        process = member.info.process
        member = self._set(member, state=State.LIVE)
        claim = (info.rank, info.group, info.replica)
        if info.rank is not None and claim != (
            member.info.rank,
            member.info.group,
            member.info.replica,
        ):
            return self.learn(
                process,
                info.rank,
                pinned=info.pinned,
                group=info.group,
                world_size=info.world_size,
                replica=info.replica,
            )
        taken = any(
            m.folder == member.folder and m.instance != member.instance and m.state is State.LIVE
            for m in self._others(member)
        )
        if member.folder is not None and taken:
            return self._move([member])  # it was given away as a finished instance's
        return Changes(changed=[process])

    def _settle(self, member: Member) -> Changes:
        """Give the member the rank and folder it asks for, and others what follows from that."""
        before = {member.info.process: (member.rank, member.replica)}
        if self._split:
            fellows = [
                m
                for m in self.members.values()
                if m.instance == member.instance and (m is member or m.folder is not None)
            ]
            found = places(_claim(m) for m in fellows)
            before = {m.info.process: (m.rank, m.replica) for m in fellows}
            for fellow in fellows:
                rank, replica = found[fellow.info.process]
                pinned = fellow.info.rank if fellow.info.pinned else None
                self._set(fellow, rank=rank if pinned is None else pinned, replica=replica)
        else:
            self._set(member, rank=member.info.rank)
        moving = [
            m
            for m in map(self.members.__getitem__, before)
            if m.folder is None or (m.rank, m.replica) != before[m.info.process]
        ]
        changes = self._move(moving) if moving else Changes()
        changed = dict.fromkeys([member.info.process, *changes.changed])
        return replace(changes, changed=list(changed))

    def _move(self, moving: Sequence[Member]) -> Changes:
        """Give each of the members its folder, or one that keeps it apart."""
        old = {m.info.process: m.folder for m in moving}
        clashes = []
        for member in moving:
            self._set(member, folder=None)
        for member in map(self.members.__getitem__, old):
            first = self._clashes_with(member)
            folder = self._free_folder(member, clash=first is not None)
            self._set(member, folder=folder, clash=first or "")
            if first and first != member.clash:
                clashes.append((first, member.info.process))
        places = {(old.get(p, m.folder), m.folder) for p, m in self.members.items()}
        moves = {(was, str(self.members[p].folder)) for p, was in old.items() if was}
        moves = {(was, now) for was, now in moves if was != now}
        shared = {
            move
            for move in moves
            if any((was == move[0]) != (now == move[1]) for was, now in places)
        }
        return Changes(
            changed=list(old),
            cleared=sorted({was for was, _ in shared}),
            renamed=_in_order(moves - shared),
            redrawn=self._in_folders({name for move in shared for name in move}),
            clashes=clashes,
        )

    def _in_folders(self, folders: set[str]) -> list[str]:
        return [p for p, m in self.members.items() if m.folder in folders]

    def _clashes_with(self, member: Member) -> str | None:
        """Who claims the member's rank at the same time, the first claimant if several."""
        if member.rank is None:
            return None
        claimants = [m for m in self._others(member) if m.rank == member.rank and m.folder]
        for other in sorted(claimants, key=lambda m: (bool(m.clash), m.order)):
            if _clash(other, member):
                return other.info.process
        return None

    def _free_folder(self, member: Member, *, clash: bool) -> str:
        info, others = member.info, self._others(member)
        host = re.sub(r"[^A-Za-z0-9_-]+", "-", info.host)[:60] or "host"
        if member.rank is not None:
            names = [f"rank{member.rank}", f"rank{member.rank}.{host}.{info.pid}"][clash:]
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
        if member.rank is None:
            return _same_process(other, member)
        return not _clash(other, member)

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


def _clash(one: Member, other: Member) -> bool:
    """Whether two that claim one rank live at the same time, or may have."""
    same_instance = one.instance == other.instance
    if same_instance and one.info.attempt != other.info.attempt:
        return False  # a restart
    if one.info.delivered_later or other.info.delivered_later:
        # Nobody knows whether they lived at the same time.
        return same_instance and not _same_process(one, other)
    return one.state is State.LIVE and other.state is State.LIVE


def _is_late_fellow(info: Process, others: Sequence[Process]) -> bool:
    """Whether a process that comes when all others have left is of their launch, and only slow: a
    rank of the same world that none of them had, started by the same parent as those beside it."""
    if info.rank is None or info.world_size < 2:
        return False
    fellows = [o for o in others if o.attempt == info.attempt]
    beside = [o for o in others if _place(o) == _place(info)]
    return (
        all(o.rank is not None and o.rank != info.rank for o in fellows)
        and all(o.world_size == info.world_size for o in fellows)
        and all(o.parent_pid == info.parent_pid for o in beside)
    )


def _place(info: Process) -> tuple[str, str, int]:
    """Where process ids mean the same."""
    return (info.host, info.boot_id, info.pid_namespace)


def is_newer(one: Member, other: Member) -> bool:
    """Which of two processes of a rank counts in a step that both wrote. Clocks of two hosts are
    not compared: there the one that joined later is newer."""
    a, b = one.info, other.info
    if a.attempt != b.attempt:
        return a.attempt > b.attempt
    if a.started != b.started and _place(a) == _place(b):
        return a.started > b.started
    return one.order > other.order


def _same_process(one: Member, other: Member) -> bool:
    """Two sessions of one operating system process."""
    a, b = one.info, other.info
    return (_place(a), a.pid, a.started) == (_place(b), b.pid, b.started)


def _claim(member: Member) -> Claim:
    info = member.info
    return Claim(
        info.process,
        member.order,
        None if info.pinned else info.rank,
        info.group,
        info.world_size,
        info.replica,
        info.run_key,
        info.attempt,
    )


def _in_order(moves: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The renames in an order in which none replaces a folder that is still to be renamed."""
    left, ordered = sorted(moves), []
    while left:
        sources = {old for old, _ in left}
        move = next((m for m in left if m[1] not in sources), None)
        if move is None:  # they go round: one steps aside
            old, new = left.pop(0)
            ordered.append((old, f"{old}.moving"))
            left.append((f"{old}.moving", new))
        else:
            left.remove(move)
            ordered.append(move)
    return ordered
