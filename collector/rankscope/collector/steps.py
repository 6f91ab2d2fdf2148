"""When a step is written and when it is sealed: a pure state machine, no clock, no file.

Told what happened to which process (`join`, `leave`, `event`, `rows`), it answers in `due(now)`
what is to be done. A step *expects* every process that took part in it without being filtered, and
every live process that may still take part: one that has not passed on to a later step. It is
sealed when all of those ended it or are gone, or `seal_after_seconds` after the first one ended it;
what comes later seals it again. The last seal of a step depends on what each process did, not on
the order in which the processes were heard.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Part(Enum):
    """How far a process is in a step."""

    OPEN = "open"
    PAUSED = "paused"
    ENDED = "ended"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Render:
    """Write the layout of these processes' part of the step."""

    step: int
    processes: frozenset[str]


@dataclass(frozen=True)
class Seal:
    """Replace the step's files by one; `missing` says why an expected process did not end it."""

    step: int
    expected: frozenset[str]
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Step:
    parts: dict[str, Part] = field(default_factory=dict)
    waiting_since: float | None = None  # the first END, or the first news after a seal
    sealed: Seal | None = None
    dirty: bool = False  # something happened since the seal
    render_at: dict[str, float] = field(default_factory=dict)
    rendered_at: dict[str, float] = field(default_factory=dict)
    shares_parts: bool = False  # `parts` is also another step's: copy before a change

    def wants_seal(self) -> bool:
        unsealed = self.sealed is None or self.dirty
        return unsealed and any(part is not Part.SKIPPED for part in self.parts.values())


class Steps:
    """The steps of one run. Times are any monotonic seconds, the same clock throughout."""

    def __init__(
        self,
        *,
        seal_after_seconds: float = 30.0,
        pause_render_seconds: float = 5.0,
        settle_seconds: float = 0.5,
    ) -> None:
        """A pause is rendered `settle_seconds` later, since an END often follows at once."""
        self._seal_after = seal_after_seconds
        self._pause_render = pause_render_seconds
        self._settle = settle_seconds
        self._steps: dict[int, _Step] = {}
        self._active: set[int] = set()  # steps with something to render or seal
        self._incomplete: set[int] = set()  # sealed, but somebody was missing
        self._live: dict[str, int] = {}  # process -> highest step it took part in, -1 for none
        self._gone: dict[str, str] = {}
        self._common_parts: dict[str, Part] = {}

    # ------------------------------------------------------------------ what happened

    def join(self, process: str) -> None:
        """The process said hello, for the first time or again."""
        self._gone.pop(process, None)
        if process not in self._live:
            self._live[process] = max(self.steps_of(process), default=-1)

    def leave(self, process: str, why: str, now: float) -> None:
        """The process said goodbye or was lost; its open parts are rendered."""
        self._live.pop(process, None)
        self._gone[process] = why
        for number in self._active | self._incomplete:
            step = self._steps[number]
            if step.parts.get(process) in (Part.OPEN, Part.PAUSED):
                self._active.add(number)
                step.render_at[process] = now
            if step.sealed is not None and step.sealed.missing.get(process, why) != why:
                self._reopen(number, now)

    def event(self, process: str, number: int, part: Part, now: float) -> None:
        """The process began, paused, ended or was kept from recording the step."""
        step = self._touch(process, number, now)
        before = step.parts.get(process)
        ended_before = before in (Part.ENDED, Part.SKIPPED)
        if before is not None and before is not part and (ended_before or part is Part.SKIPPED):
            part = Part.ENDED  # no step begins again, and one filtered in part is not skipped
        step.parts[process] = part
        if part is Part.ENDED:
            step.render_at[process] = now
            if step.waiting_since is None:
                step.waiting_since = now
        elif part is Part.PAUSED:
            last = step.rendered_at.get(process, now - self._pause_render)
            earliest = max(now + self._settle, last + self._pause_render)
            step.render_at.setdefault(process, earliest)

    def rows(self, process: str, number: int, now: float) -> None:
        """Rows of the step were stored."""
        step = self._touch(process, number, now)
        part = step.parts.setdefault(process, Part.OPEN)
        if part is Part.SKIPPED:
            part = step.parts[process] = Part.ENDED
        if part is Part.ENDED or process in self._gone:
            step.render_at[process] = now

    def restore(self, seals: Iterable[Seal], now: float) -> None:
        """After a replay of an earlier life with `join`, `event` and `leave`: its last seals.

        Nothing is rendered for the replay itself; steps that changed after their seal, or never had
        one, are sealed again.
        """
        for seal in seals:
            step = self._steps.setdefault(seal.step, _Step())
            step.sealed = seal
            outcome = self._outcome(seal.step)
            known = step.parts.keys()
            step.dirty = (outcome.expected & known, outcome.missing.keys() & known) != (
                seal.expected & known,
                seal.missing.keys() & known,
            )
            if seal.missing:
                self._incomplete.add(seal.step)
        for number, step in self._steps.items():
            step.render_at.clear()
            step.waiting_since = now if step.wants_seal() else None
            if step.waiting_since is None:
                self._rest(number)

    def want_render(self, process: str, number: int, now: float) -> None:
        """The layout of this part is missing or stale."""
        self._active.add(number)
        self._steps[number].render_at[process] = now

    # ------------------------------------------------------------------ what is to be done

    def due(self, now: float) -> list[Render | Seal]:
        """What is to be done now, renders before seals; what is returned counts as done."""
        actions: list[Render | Seal] = []
        for number in sorted(self._active):
            if ready := self._ready(self._steps[number], now):
                actions.append(Render(number, ready))
        for number in sorted(self._active):
            if self._may_seal(number, now):
                actions.append(self._close(number))
            self._rest(number)
        return actions

    def next_due(self) -> float | None:
        """When `due` has something to say if nothing else happens, None for never."""
        times: list[float] = []
        for number in self._active:
            step = self._steps[number]
            times.extend(step.render_at.values())
            if step.waiting_since is not None and step.wants_seal():
                times.append(step.waiting_since + self._seal_after)
        return min(times, default=None)

    def finish(self, now: float) -> list[Render | Seal]:
        """Everything left to do regardless of delays, for a collector that ends."""
        for number in self._active:
            step = self._steps[number]
            for process, part in step.parts.items():
                if part in (Part.OPEN, Part.PAUSED) or process in step.render_at:
                    step.render_at[process] = now
            if step.wants_seal():
                step.waiting_since = now - self._seal_after
        return self.due(now)

    def idle(self) -> bool:
        """Whether nothing is left to render or seal."""
        return not self._active

    def is_active(self, number: int) -> bool:
        """Whether something is left to render or seal of the step."""
        return number in self._active

    def took_part(self, process: str, number: int) -> bool:
        """Whether the process has anything in the step."""
        step = self._steps.get(number)
        return step is not None and step.parts.get(process, Part.SKIPPED) is not Part.SKIPPED

    def steps_of(self, process: str) -> list[int]:
        """The steps in which the process has anything, ascending."""
        return sorted(number for number in self._steps if self.took_part(process, number))

    # ------------------------------------------------------------------ details

    def _touch(self, process: str, number: int, now: float) -> _Step:
        step = self._steps.setdefault(number, _Step())
        self._active.add(number)
        if step.shares_parts:
            step.parts = dict(step.parts)
            step.shares_parts = False
        if step.sealed is not None:
            self._reopen(number, now)
        if process in self._live:
            self._live[process] = max(self._live[process], number)
        return step

    def _reopen(self, number: int, now: float) -> None:
        step = self._steps[number]
        self._active.add(number)
        if not step.dirty:
            step.dirty = True
            step.waiting_since = now

    def _ready(self, step: _Step, now: float) -> frozenset[str]:
        ready = frozenset(process for process, at in step.render_at.items() if at <= now)
        for process in ready:
            del step.render_at[process]
            step.rendered_at[process] = now
        return ready

    def _may_seal(self, number: int, now: float) -> bool:
        step = self._steps[number]
        if not step.wants_seal():
            return False
        if step.waiting_since is not None and now >= step.waiting_since + self._seal_after:
            return True
        return self._outcome(number).missing.keys() <= self._gone.keys()

    def _close(self, number: int) -> Seal:
        step = self._steps[number]
        step.sealed = self._outcome(number)
        step.dirty = False
        step.waiting_since = None
        if step.sealed.missing:
            self._incomplete.add(number)
        else:
            self._incomplete.discard(number)
        return step.sealed

    def _outcome(self, number: int) -> Seal:
        parts = self._steps[number].parts
        expected = {process for process, part in parts.items() if part is not Part.SKIPPED}
        expected |= {p for p, last in self._live.items() if p not in parts and last < number}
        missing = {p: self._gone.get(p, "late") for p in expected if parts.get(p) is not Part.ENDED}
        return Seal(number, frozenset(expected), dict(sorted(missing.items())))

    def _rest(self, number: int) -> None:
        """Take a step with nothing to do out of the way, and let equal ones share memory."""
        step = self._steps[number]
        if step.render_at or step.wants_seal():
            return
        self._active.discard(number)
        step.rendered_at = {}
        if step.parts != self._common_parts:
            self._common_parts = step.parts
        step.parts = self._common_parts
        step.shares_parts = True
