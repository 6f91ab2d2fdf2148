"""Groups of processes that number their ranks independently, and the ranks that keep them apart.

Data-parallel workers of a serving engine are often each a group of their own in which everybody is
rank 0. A *replica* is such a group: the processes of one launch that met at one address. Replica d
has the ranks from d * S on, S being the size of the largest one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

Key = tuple[str, int | None]  # address of the group, number told by a variable where that splits it


@dataclass(frozen=True)
class Claim:
    """A process's claim to a rank of its group; `rank` None when it claims none, or a fixed one."""

    process: str
    order: int  # of joining
    rank: int | None
    group: str = ""
    world_size: int = 0
    replica: int | None = None  # as a data-parallel variable numbers it
    run_key: str = ""
    attempt: int = 0


def places(claims: Iterable[Claim]) -> dict[str, tuple[int | None, int | None]]:
    """Rank and number of the replica of each process; both None where it claims none.

    Depends on what is claimed and on the order of joining, not on the order of learning.
    """
    everyone = list(claims)
    found: dict[str, tuple[int | None, int | None]] = {c.process: (None, None) for c in everyone}
    claims = sorted((c for c in everyone if c.rank is not None), key=lambda c: c.order)
    replicas = _replicas(claims)
    if not replicas:
        return found
    stride = max(max(c.world_size, (c.rank or 0) + 1) for c in claims)
    for number, members in zip(_numbers(replicas), replicas, strict=True):
        for claim in members:
            assert claim.rank is not None
            found[claim.process] = (number * stride + claim.rank, number)
    return found


def _replicas(claims: Sequence[Claim]) -> list[list[Claim]]:
    """The claims of each replica, in the order in which replicas began.

    A restarted job meets at a new address: its n-th group replaces the n-th of the attempt before.
    """
    slots: dict[tuple[str, int], list[Claim]] = {}
    jobs: dict[tuple[str, int], list[Key]] = {}
    divided = _divided(claims)
    for claim in claims:
        key = (claim.group, claim.replica if claim.group in divided else None)
        groups = jobs.setdefault((claim.run_key, claim.attempt), [])
        if key not in groups:
            groups.append(key)
        slots.setdefault((claim.run_key, groups.index(key)), []).append(claim)
    return list(slots.values())


def _divided(claims: Iterable[Claim]) -> set[str]:
    """Groups in which one rank is claimed under several numbers: the address tells too little."""
    numbers: dict[tuple[str, str, int, int | None], set[int]] = {}
    for c in claims:
        if c.replica is not None:
            numbers.setdefault((c.group, c.run_key, c.attempt, c.rank), set()).add(c.replica)
    return {group for (group, *_), told in numbers.items() if len(told) > 1}


def _numbers(replicas: Sequence[Sequence[Claim]]) -> list[int]:
    """The number that the members of a replica were told, where no other has it; else the next."""
    told: list[int | None] = []
    for members in replicas:
        numbers = {c.replica for c in members if c.replica is not None}
        number = numbers.pop() if len(numbers) == 1 else None
        told.append(number if number not in told else None)
    free = (number for number in count() if number not in told)
    return [next(free) if number is None else number for number in told]
