"""Values that are wrong by themselves: NaN, infinities, and what is unusual."""

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from . import flow, operations, origin
from .figures import Bools
from .finding import Finding
from .leaves import Leaves
from .pairing import Ints

_LARGEST = {"torch.float16": 65504.0, "torch.bfloat16": 3.3895e38, "torch.float32": 3.4028e38}
_GREW = 1e4  # a gradient's norm against its median over the steps
_OUTLIER = 10.0  # a rank's norm against the median of its peers
#: Inputs of these that are nothing but zeros mean that nothing arrives.
_LINEAR = {"linear", "matmul", "conv1d", "conv2d", "conv3d", "bmm", "addmm", "__matmul__"}


def not_finite(leaves: Leaves) -> Iterator[Finding]:
    """The records that made the first NaN or infinity; one finding, or none."""
    nan, inf = nan_rows(leaves), infinite_rows(leaves)
    bad = (nan | inf) & ~leaves.rows.ignored
    found = flow.candidates(leaves.figures, leaves.rows, bad)
    leads = []
    for one in found:
        unit, own = leaves.units[one.unit], leaves.same_record(one.row)
        record = leaves.name(one.row)
        values = [leaves.figures.values[c] for c in leaves.figures.value[0][own].tolist() if c >= 0]
        came = bad[own[leaves.rows.is_input[own]]].any()
        received = operations.is_communication(record) and not came
        group = origin.members(values)
        leads.append(
            origin.Lead(unit.step, unit.rank, record, one.position, received, group, one.row)
        )
    start, ranks = origin.origin(leads, lambda lead, record: _position_of(leaves, lead, record))
    if start is not None:
        word = "NaN" if nan[start.row] else "infinity"
        yield Finding(
            "nan" if nan[start.row] else "inf", start.step, ranks, start.record,
            leaves.rows.argument(start.row), _why(leaves, bad, start.row, word),
            position=start.position,
        )  # fmt: skip


def nan_rows(leaves: Leaves) -> Bools:
    """Tensors with NaN in them."""
    counted = np.nan_to_num(leaves.column("nan_count")) > 0
    # Where there is no count (a dump.json), the statistics say so. null reads as NaN, too.
    seen = leaves.figures.there["max"] & np.isnan(leaves.figures.a["max"])
    result: Bools = counted | seen
    return result


def infinite_rows(leaves: Leaves) -> Bools:
    """Tensors with an infinity that is not meant: -inf is, in masks and what they are added to."""
    numbers, rows = leaves.figures.a, leaves.rows
    positive = leaves.figures.there["max"] & np.isposinf(numbers["max"])
    negative = leaves.figures.there["min"] & np.isneginf(numbers["min"])
    for_masks = leaves.with_names(operations.MASKING)
    given = _any_of_group(leaves, _infinite_arguments(leaves) | (negative & rows.is_input))
    made = negative & ~rows.is_input & ~for_masks & ~given
    argued = _any_of_group(leaves, _infinite_arguments(leaves))
    result: Bools = made | (positive & ~(argued & (for_masks | rows.is_input)))
    return result


def _infinite_arguments(leaves: Leaves) -> Bools:
    """Arguments that are the number inf or -inf."""
    words = {"inf", "-inf", "infinity", "-infinity", "1e999", "-1e999"}
    infinite = [text.strip('"').lower() in words for text in leaves.figures.values]
    result: Bools = np.array([*infinite, False], bool)[leaves.figures.value[0]]
    return result


def _any_of_group(leaves: Leaves, mask: Bools) -> Bools:
    counts = np.bincount(leaves.rows.groups[mask], minlength=leaves.rows.group_count)
    result: Bools = counts[leaves.rows.groups] > 0
    return result


def _position_of(leaves: Leaves, lead: origin.Lead, record: str) -> int | None:
    for number, unit in enumerate(leaves.units):
        if (unit.step, unit.rank) == (lead.step, lead.rank):
            start, end = leaves.start[number], leaves.start[number + 1]
            if record not in leaves.pairs.names:
                return None
            code = leaves.pairs.names.index(record)
            at = np.flatnonzero(leaves.pairs.record[start:end] == code)
            return int(at[0]) if len(at) else None
    return None


def _why(leaves: Leaves, bad: Bools, row: int, word: str) -> str:
    numbers = leaves.figures.a
    seen = ", ".join(f"{name} {numbers[name][row]:.6g}" for name in ("max", "min", "norm"))
    if leaves.rows.is_input[row]:
        return f"{word} comes in, no recorded operation made it ({seen})"
    own = leaves.same_record(row)
    inputs = own[leaves.rows.is_input[own] & leaves.figures.is_tensor[own]]
    if not bad[inputs].any():
        low = np.isneginf(numbers["min"][inputs]).any()
        text = "inputs have none" + (", but -inf as in a mask" if low and word == "NaN" else "")
        return f"{word} is made here: {text} ({seen})"
    return f"{word} in the result, as in the inputs ({seen})"


# ------------------------------------------------------------------------------ what is unusual


def unusual(leaves: Leaves) -> Iterator[Finding]:
    """Notices: near overflow, zeros, gradients that grow or vanish, ranks unlike their peers."""
    yield from _near_overflow(leaves)
    yield from _zeros(leaves)
    yield from _over_steps(leaves)
    yield from _outliers(leaves)


def _notice(leaves: Leaves, kind: str, row: int, ranks: list[int], why: str) -> Finding:
    unit = leaves.units[leaves.pairs.unit[row]]
    return Finding(
        kind, unit.step, ranks, leaves.name(row), leaves.rows.argument(row), why, True,
        leaves.position(row),
    )  # fmt: skip


def _near_overflow(leaves: Leaves) -> Iterator[Finding]:
    limits = np.array([_LARGEST.get(name, np.inf) for name in leaves.figures.dtypes] + [np.inf])
    limit = limits[leaves.figures.dtype[0]]
    peak = leaves.figures.a["max"]
    rows = np.flatnonzero(np.isfinite(peak) & np.isfinite(limit) & (peak > 0.5 * limit))
    rows = rows[~leaves.rows.ignored[rows]]
    yield from _first_of_record(
        leaves,
        "overflow",
        rows,
        lambda row: f"max {peak[row]:.6g} is near the dtype's largest number",
    )


def _zeros(leaves: Leaves) -> Iterator[Finding]:
    high, low = leaves.figures.a["max"], leaves.figures.a["min"]
    dead = leaves.rows.is_input & leaves.with_names(_LINEAR) & (high == 0) & (low == 0)
    dead &= leaves.column("elements") > 1
    first = np.array([path in ("0", "1") for path in leaves.rows.paths] + [False], bool)
    rows = np.flatnonzero(dead & first[leaves.rows.path])
    yield from _first_of_record(leaves, "zeros", rows, lambda row: "the input is nothing but zeros")


def _first_of_record(
    leaves: Leaves, kind: str, rows: Ints, why: Callable[[int], str]
) -> Iterator[Finding]:
    """One notice for each record and argument: the first step, all its ranks."""
    seen: dict[tuple[str, str], list[int]] = {}
    for row in rows.tolist():
        seen.setdefault((leaves.name(row), leaves.rows.argument(row)), []).append(row)
    for group in list(seen.values())[:20]:
        first = group[0]
        step = leaves.units[leaves.pairs.unit[first]].step
        units = [leaves.units[leaves.pairs.unit[row]] for row in group]
        ranks = sorted({unit.rank for unit in units if unit.step == step})
        yield _notice(leaves, kind, first, ranks, why(first))


def _over_steps(leaves: Leaves) -> Iterator[Finding]:
    """Gradients of parameters whose norm leaves its usual size for good or ill."""
    norm = leaves.figures.a["norm"]
    series: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    gradient = np.array([name == "parameters_grad" for name in leaves.rows.parts] + [False], bool)
    for row in np.flatnonzero(gradient[leaves.rows.part] & np.isfinite(norm)).tolist():
        rank = leaves.units[leaves.pairs.unit[row]].rank
        series[rank, leaves.name(row), leaves.rows.argument(row)].append(row)
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for (_, name, _), rows in series.items():
        usual = float(np.median(norm[rows]))
        if len(rows) < 3 or usual == 0:
            continue
        for row in rows:
            kind = "exploding" if norm[row] > _GREW * usual else ""
            kind = "vanishing" if norm[row] * _GREW < usual else kind
            if kind:
                found[kind, name].append(row)
                break
    for (kind, _), rows in found.items():
        ranks = sorted({leaves.units[leaves.pairs.unit[row]].rank for row in rows})
        yield _notice(
            leaves, kind, rows[0], ranks, f"its norm is {norm[rows[0]]:.6g}, unlike others"
        )


def _outliers(leaves: Leaves) -> Iterator[Finding]:
    """Ranks whose norms are far from the median of three or more."""
    if len({unit.rank for unit in leaves.units}) < 3:
        return
    norm = leaves.figures.a["norm"]
    steps = np.array([unit.step for unit in leaves.units])[leaves.pairs.unit]
    rows = np.flatnonzero(np.isfinite(norm) & leaves.figures.is_tensor & ~leaves.rows.ignored)
    keys = np.stack(
        [steps[rows], leaves.pairs.record[rows], leaves.rows.part[rows], leaves.rows.path[rows]]
    )
    _, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.ravel()
    order = np.lexsort((norm[rows], group))
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(order)))
    middle = norm[rows][order][starts + sizes // 2]
    usual = middle[group]
    with np.errstate(all="ignore"):
        ratio = norm[rows] / usual
    odd = (sizes[group] >= 3) & (usual > 0) & ((ratio > _OUTLIER) | (ratio < 1 / _OUTLIER))
    seen: set[int] = set()
    for at in np.flatnonzero(odd).tolist():
        rank = leaves.units[leaves.pairs.unit[rows[at]]].rank
        if rank not in seen:
            seen.add(rank)
            why = f"norm {norm[rows[at]]:.6g}, the median of its peers is {usual[at]:.6g}"
            yield _notice(leaves, "outlier", int(rows[at]), [rank], why)
