"""What must be equal over ranks: results of collectives, and parameters that are replicated.

Which parameters are, coordinates say: equal over data parallelism, those of norms over tensor
parallelism as well. Without coordinates the run itself does: a parameter that was equal on all
ranks in an earlier step, one that most ranks agree on, or, of two ranks, one that differs while
most others are equal.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from . import operations, origin
from .finding import Finding
from .leaves import Leaves

T = TypeVar("T")

_EQUAL_RESULT = {
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "_all_gather_base",
}  # fmt: skip
#: Places of the parameters among the arguments, where modules are not recorded.
_PARAMETERS = {
    "linear": (1, 2), "embedding": (1,), "layer_norm": (2, 3), "batch_norm": (3, 4),
    "group_norm": (2, 3), "rms_norm": (2,), "conv1d": (1, 2), "conv2d": (1, 2), "conv3d": (1, 2),
}  # fmt: skip
_TOLERANCE = 1e-6
_MOST = 0.75


class Value(NamedTuple):
    """What is known of a tensor."""

    shape: tuple[int, ...]
    content: str | None  # a checksum or digest
    numbers: tuple[float, ...]  # max, min, mean, norm

    def like(self, other: "Value") -> bool:
        """Equal up to the rounding of sums in another order."""
        if self.shape != other.shape:
            return False
        if self.content is not None and other.content is not None:
            return self.content == other.content
        x, y = np.array(self.numbers), np.array(other.numbers)
        with np.errstate(invalid="ignore"):
            size = np.fmax(np.abs(x), np.abs(y))
            size[2] = np.nanmax(np.append(size, 0.0))  # a mean cancels
            same = (x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) <= _TOLERANCE * size)
        return bool(np.all(same))


class _Call(NamedTuple):
    record: str
    signature: tuple[Any, ...]
    row: int
    results: tuple[Value, ...]


def collectives(leaves: Leaves) -> Iterator[Finding]:
    """Collectives that a member did not call, or whose result is not the same on all members."""
    for step, calls in _calls(leaves).items():
        for group, by_rank in calls.items():
            yield from _of_group(leaves, step, group, by_rank)


def _calls(leaves: Leaves) -> dict[int, dict[tuple[int, ...], dict[int, list[_Call]]]]:
    """Calls in order, by step, members and rank."""
    result: dict[int, dict[tuple[int, ...], dict[int, list[_Call]]]] = {}
    everyone = {unit.step: [] for unit in leaves.units}  # type: dict[int, list[int]]
    for unit in leaves.units:
        everyone[unit.step].append(unit.rank)
    names = leaves.pairs.names
    wanted = np.array(
        [operations.is_communication(name) and name.endswith("forward") for name in names], bool
    )
    _, first = np.unique(leaves.rows.groups, return_index=True)
    for row in sorted(first[wanted[leaves.pairs.record[first]]].tolist()):
        unit, own = leaves.units[leaves.pairs.unit[row]], leaves.same_record(row)
        api = leaves.api[leaves.pairs.record[row]]
        if api in ("send", "recv", "isend", "irecv", "batch_isend_irecv"):
            continue
        codes = leaves.figures.value[0][own].tolist()
        members = origin.members([leaves.figures.values[c] for c in codes if c >= 0])
        members = members or tuple(everyone[unit.step])
        call = _Call(leaves.name(row), (api, _shape(leaves, own)), row, _results(leaves, api, own))
        of_group = result.setdefault(unit.step, {}).setdefault(members, {})
        of_group.setdefault(unit.rank, []).append(call)
    return result


def _shape(leaves: Leaves, own: Any) -> tuple[int, ...]:
    tensors = own[leaves.figures.is_tensor[own]]
    return tuple(leaves.shapes[int(tensors[0])] or ()) if len(tensors) else ()


def _results(leaves: Leaves, api: str, own: Any) -> tuple[Value, ...]:
    """What stands in the tensor that all members have in the end."""
    if api not in _EQUAL_RESULT:
        return ()
    found = []
    for row in own.tolist():
        argument = leaves.rows.argument(row)
        if argument == "output.0" or argument.startswith("output.0."):
            found.append(_value(leaves, row))
    return tuple(found)


def _of_group(
    leaves: Leaves, step: int, group: Sequence[int], by_rank: Mapping[int, list[_Call]]
) -> Iterator[Finding]:
    present = {unit.rank for unit in leaves.units if unit.step == step}
    members = [rank for rank in group if rank in present]
    longest = max(len(calls) for calls in by_rank.values())
    shortest = min(len(by_rank.get(rank, ())) for rank in members)
    for number in range(longest):
        here = {
            rank: by_rank[rank][number]
            for rank in members
            if rank in by_rank and number < len(by_rank[rank])
        }
        counts = Counter(call.signature for call in here.values())
        lacking = [rank for rank in members if rank not in here]
        # Where one has fewer calls, its own later calls stand at the place of the one it left out.
        short = [rank for rank in members if len(by_rank.get(rank, ())) == shortest < longest]
        odd_one = len(counts) > 1 or _odd_ranks(here)
        if short and (lacking or odd_one):
            full = next(call for rank, call in here.items() if rank not in short)
            why = f"rank {_list(short)} of group {list(group)} does not call it"
            yield _finding(leaves, "missing_collective", step, short, full, "", why)
            return
        if odd_one:
            odd = _odd_ranks(here) or _rare(here)
            call = here[odd[0]]
            why = f"its result is not the same on the ranks {sorted(here)}: {_told(here)}"
            yield _finding(leaves, "collective", step, odd, call, "output.0", why)
            return


def _finding(
    leaves: Leaves, kind: str, step: int, ranks: list[int], call: _Call, argument: str, why: str
) -> Finding:
    argument = argument or leaves.rows.argument(call.row)
    return Finding(
        kind, step, ranks, call.record, argument, why, position=leaves.position(call.row)
    )


def _odd_ranks(here: Mapping[int, _Call]) -> list[int]:
    """Ranks whose results are not those of most; all of them where no result has a majority."""
    results = {rank: call.results for rank, call in here.items() if call.results}
    return _minority(results, lambda x, y: len(x) == len(y) and all(map(Value.like, x, y)))


def _rare(here: Mapping[int, _Call]) -> list[int]:
    return _minority({rank: c.signature for rank, c in here.items()}, lambda x, y: x == y)


def _minority(values: Mapping[int, T], alike: Callable[[T, T], bool]) -> list[int]:
    """Keys whose value is not that of most; all keys where no value has a majority, none where
    all are alike."""
    classes: list[tuple[T, list[int]]] = []
    for rank, value in values.items():
        for known, ranks in classes:
            if alike(known, value):
                ranks.append(rank)
                break
        else:
            classes.append((value, [rank]))
    if len(classes) < 2:
        return []
    classes.sort(key=lambda one: -len(one[1]))
    if len(classes[0][1]) > len(classes[1][1]):
        return sorted(rank for _, ranks in classes[1:] for rank in ranks)
    return sorted(values)


def _told(here: Mapping[int, _Call]) -> str:
    texts = [
        f"rank {rank} norm {call.results[0].numbers[3]:.6g} max {call.results[0].numbers[0]:.6g}"
        for rank, call in sorted(here.items())
        if call.results
    ]
    return "; ".join(texts[:4])


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


# ------------------------------------------------------------------------- replicated parameters


def replicated(leaves: Leaves, processes: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """Parameters that should be equal and are not: one finding for each step, the first of it."""
    rows = _parameter_rows(leaves)
    by_step: dict[int, dict[tuple[str, str], dict[int, int]]] = {}
    for row in rows:
        unit = leaves.units[leaves.pairs.unit[row]]
        key = (leaves.name(row), leaves.rows.argument(row))
        by_step.setdefault(unit.step, {}).setdefault(key, {})[unit.rank] = row
    for groups, norms_only in _groups(leaves, processes):
        equal_before: set[tuple[tuple[str, str], tuple[int, ...]]] = set()
        known = groups is not None
        for step in sorted(by_step):
            members = groups or [sorted({u.rank for u in leaves.units if u.step == step})]
            for group in members:
                if len(group) > 1:
                    yield from _of_step(
                        leaves, step, group, by_step[step], equal_before, known, norms_only
                    )


def _of_step(
    leaves: Leaves,
    step: int,
    group: Sequence[int],
    parameters: Mapping[tuple[str, str], Mapping[int, int]],
    equal_before: set[tuple[tuple[str, str], tuple[int, ...]]],
    known: bool,
    norms_only: bool,
) -> Iterator[Finding]:
    odd: dict[tuple[str, str], list[int]] = {}
    equal: set[tuple[str, str]] = set()
    same_constant: set[tuple[str, str]] = set()
    for key, by_rank in parameters.items():
        there = {rank: row for rank, row in by_rank.items() if rank in group}
        if len(there) < 2 or (norms_only and not _is_norm(key[0])):
            continue
        values = {rank: _value(leaves, row) for rank, row in there.items()}
        ranks = _minority(values, Value.like)
        if ranks:
            odd[key] = ranks
        else:
            equal.add(key)
            row = next(iter(there.values()))
            if leaves.figures.a["max"][row] == leaves.figures.a["min"][row]:
                same_constant.add(key)
    telling = len(equal - same_constant)
    mostly = telling >= _MOST * max(telling + len(odd), 1) and telling > 0
    found = []
    for key, ranks in odd.items():
        majority = len(ranks) < len(group) / 2
        if known or majority or (key, tuple(group)) in equal_before or mostly:
            found.append((min(parameters[key].values()), key, ranks))
    equal_before |= {(key, tuple(group)) for key in equal}
    if found:
        row, (name, argument), ranks = min(found, key=lambda one: leaves.position(one[0]))
        shown = "; ".join(
            f"rank {r} norm {leaves.figures.a['norm'][x]:.6g}"
            for r, x in sorted(parameters[name, argument].items())[:4]
        )
        why = f"a replicated parameter is not equal on the ranks {list(group)}: {shown}"
        if len(found) > 1:
            why += f" (and {len(found) - 1} more)"
        yield Finding("replicated", step, ranks, name, argument, why, position=leaves.position(row))


def _value(leaves: Leaves, row: int) -> Value:
    numbers = leaves.figures.a
    return Value(
        tuple(leaves.shapes[row] or ()),
        leaves.contents[row],
        tuple(float(numbers[name][row]) for name in ("max", "min", "mean", "norm")),
    )


def _is_norm(record: str) -> bool:
    module = operations.module_of(record)
    word = module[1] if module else operations.api_name(record)
    return "norm" in word.lower()


def _parameter_rows(leaves: Leaves) -> list[int]:
    parts = np.array([name == "parameters" for name in leaves.rows.parts] + [False], bool)
    rows = np.flatnonzero(parts[leaves.rows.part])
    if len(rows):
        return rows.tolist()
    result: list[int] = []
    for row in np.flatnonzero(leaves.with_names(set(_PARAMETERS))).tolist():
        api = leaves.api[leaves.pairs.record[row]]
        places = {f"input_args.{place}" for place in _PARAMETERS[api]}
        if leaves.figures.is_tensor[row] and leaves.rows.argument(row) in places:
            result.append(row)
    return result


def _groups(
    leaves: Leaves, processes: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[list[list[int]] | None, bool]]:
    """Groups of ranks that hold the same parameters, and whether only those of norms; None where
    nothing is known."""
    names = ("tp", "pp", "ep", "cp", "dp")
    known = {
        rank: {name: process.get(name) for name in names} for rank, process in processes.items()
    }
    if not any(value is not None for one in known.values() for value in one.values()):
        yield None, False
        return
    for free, norms_only in (("dp", False), ("tp", True)):
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for rank, one in sorted(known.items()):
            groups[tuple(one[name] for name in names if name != free)].append(rank)
        yield list(groups.values()), norms_only
