"""The HTML report: one file that needs nothing else."""

from collections import defaultdict
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from . import operations
from .advice import difference
from .compare import Comparison
from .figures import Hard
from .verdicts import VERDICTS, Verdicts

TOP_ROWS = 400
_POINTS = 1500  # of a line along the run
_LARGE = 2.0  # stands for an error that is no number


def write_html(comparison: Comparison, verdict: Verdicts, path: Path) -> None:
    """Summary, steps by ranks, modules by error, the error along the run, the worst rows."""
    template = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    data = orjson.dumps(document(comparison, verdict), option=orjson.OPT_SERIALIZE_NUMPY).decode()
    # Within a script element only "</" could end it.
    path.write_text(template.replace("/*DATA*/null", data.replace("</", "<\\/")), encoding="utf-8")


def document(comparison: Comparison, verdict: Verdicts) -> dict[str, Any]:
    """What the page shows, as JSON."""
    return {
        "a": str(comparison.a.path),
        "b": str(comparison.b.path),
        "first": comparison.first.document() if comparison.first else None,
        "advice": comparison.advice,
        "notes": comparison.notes,
        "counts": dict(
            zip(VERDICTS, np.bincount(verdict.level, minlength=3).tolist(), strict=True)
        ),
        "cells": _cells(comparison, verdict),
        "tree": _tree(comparison, verdict),
        "line": _line(comparison, verdict),
        "rows": _worst(comparison, verdict),
    }


def shown_error(comparison: Comparison) -> Any:
    """The error of each row; 2 where it is no number."""
    figures = comparison.view.figures
    hard = figures.hard & ~int(Hard.CONTENT | Hard.REQUIRES_GRAD) != 0
    return np.where(hard, _LARGE, figures.error)


def _cells(comparison: Comparison, verdict: Verdicts) -> list[dict[str, Any]]:
    """A cell for each step and rank."""
    figures, error = comparison.view.figures, shown_error(comparison)
    unit = figures.pairs.unit
    count = len(comparison.units)
    worst = np.zeros(count)
    np.maximum.at(worst, unit, error)
    bad = np.bincount(unit[verdict.level == 2], minlength=count)
    rows = np.bincount(unit, minlength=count)
    cells = []
    for number, one in enumerate(comparison.units):
        first = comparison.candidates.get(number)
        cells.append(
            {
                "step": one.step,
                "rank": one.rank,
                "rows": int(rows[number]),
                "bad": int(bad[number]),
                "error": float(worst[number]),
                "first": first.document() if first else None,
            }
        )
    return cells


def _tree(comparison: Comparison, verdict: Verdicts) -> dict[str, Any]:
    """Modules below each other, each with the worst error of its records, all ranks and steps."""
    figures, error = comparison.view.figures, shown_error(comparison)
    pairs = figures.pairs
    worst = np.zeros(len(pairs.names))
    np.maximum.at(worst, pairs.record, error)
    level = np.zeros(len(pairs.names), np.int64)
    np.maximum.at(level, pairs.record, verdict.level)
    present = np.unique(pairs.record).tolist()
    root: dict[str, Any] = {"name": "model", "error": 0.0, "level": 0, "children": {}}
    for code in present:
        parts = _path(pairs.names[code])
        node = root
        for part in parts:
            children = node["children"]
            node = children.setdefault(
                part, {"name": part, "error": 0.0, "level": 0, "children": {}}
            )
        node["error"] = max(node["error"], float(worst[code]))
        node["level"] = max(node["level"], int(level[code]))
    return _listed(root)


def _path(record: str) -> list[str]:
    if module := operations.module_of(record):
        path, cls, what = module
        return [*path.split("."), f"{cls} {what}"]
    prefix = record.split(".", 1)[0]
    return [f"({prefix})", operations.api_name(record) or record]


def _listed(node: dict[str, Any]) -> dict[str, Any]:
    children = [_listed(child) for child in node["children"].values()]
    for child in children:
        node["error"] = max(node["error"], child["error"])
        node["level"] = max(node["level"], child["level"])
    return node | {"children": children}


def _line(comparison: Comparison, verdict: Verdicts) -> list[dict[str, Any]]:
    """The error along the run: of each step, the worst of all ranks by place in the step."""
    error, pairs = shown_error(comparison), comparison.view.figures.pairs
    by_step: dict[int, list[int]] = defaultdict(list)
    for number, one in enumerate(comparison.units):
        by_step[one.step].append(number)
    result = []
    for step, numbers in sorted(by_step.items()):
        bounds = [np.searchsorted(pairs.unit, [n, n + 1]) for n in numbers]
        longest = max(int(end - start) for start, end in bounds)
        size = max(1, -(-longest // _POINTS))
        worst = np.zeros(-(-longest // size))
        names: Sequence[str] = [""] * len(worst)
        names = list(names)
        for start, end in bounds:
            at = np.arange(end - start) // size
            np.maximum.at(worst, at, error[start:end])
        start, end = max(bounds, key=lambda one: one[1] - one[0])
        for point in range(len(worst)):
            row = min(int(start) + point * size, int(end) - 1)
            names[point] = pairs.names[pairs.record[row]]
        result.append({"step": step, "error": worst.tolist(), "names": names})
    return result


def _worst(comparison: Comparison, verdict: Verdicts) -> list[list[Any]]:
    """The rows that come first among the bad ones, then the worst of the others."""
    figures, error = comparison.view.figures, shown_error(comparison)
    pairs, rows = figures.pairs, comparison.view.rows
    order = np.lexsort((np.arange(len(error)), -error, -verdict.level))[: TOP_ROWS // 2]
    early = np.flatnonzero(verdict.level == 2)[: TOP_ROWS // 2]
    chosen = sorted({*order.tolist(), *early.tolist()})
    return [
        [
            comparison.units[pairs.unit[row]].step,
            comparison.units[pairs.unit[row]].rank,
            pairs.names[pairs.record[row]],
            rows.argument(row),
            VERDICTS[verdict.level[row]],
            float(error[row]),
            verdict.reason[row] or difference(figures, row),
        ]
        for row in chosen
    ]
