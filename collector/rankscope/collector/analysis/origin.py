"""The first divergence of all ranks.

A rank's first difference may be another rank's doing: what it receives, or the result of a
collective. Such a candidate is dropped when a rank that takes part in the communication diverged
before it. Of those left, the earliest by step and place in the run is the origin.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from . import operations


@dataclass(frozen=True)
class Lead:
    """A rank's first difference. `received`: its own inputs agree, others' data made the result."""

    step: int
    rank: int
    record: str
    position: int
    received: bool
    members: tuple[int, ...]  # ranks that take part in the record; () for all
    row: int


def origin(
    leads: Sequence[Lead], position_of: Callable[[Lead, str], int | None]
) -> tuple[Lead | None, list[int]]:
    """The lead where it starts, and the ranks on which that record is the first difference.

    `position_of(lead, record)` is where the lead's rank has a record in the lead's step.
    """
    first: dict[int, Lead] = {}
    for lead in sorted(leads, key=lambda one: one.step):
        first.setdefault(lead.rank, lead)
    own = [lead for lead in first.values() if not _explained(lead, first, position_of)]
    if not own:
        own = list(first.values())
    if not own:
        return None, []
    start = min(own, key=lambda one: (one.step, one.position, one.rank))
    same = [o for o in first.values() if (o.step, o.record) == (start.step, start.record)]
    return start, sorted({one.rank for one in same if one in own or one.received is False})


def _explained(
    lead: Lead, first: Mapping[int, Lead], position_of: Callable[[Lead, str], int | None]
) -> bool:
    if not lead.received:
        return False
    for other in first.values():
        if other.rank == lead.rank or (lead.members and other.rank not in lead.members):
            continue
        if other.step < lead.step:
            return True
        if other.step > lead.step:
            continue
        if operations.api_name(lead.record) in operations.RECEIVES:
            if not other.received:
                return True
            continue
        there = position_of(other, lead.record)
        if other.record == lead.record:
            if not other.received:
                return True
        elif there is None or other.position < there:
            return True
    return False


def members(values: Sequence[str]) -> tuple[int, ...]:
    """The ranks of the process group among a record's values; () where none is named."""
    for text in values:
        if "group_ranks" in text:
            try:
                found = orjson.loads(text)["group_ranks"]
            except (orjson.JSONDecodeError, KeyError, TypeError):
                numbers = re.search(r'group_ranks"?:\s*\[([\d, ]*)\]', text)
                found = [int(n) for n in numbers[1].split(",")] if numbers and numbers[1] else []
            return tuple(found)
    return ()
