"""Words for a finding: why it counts, and what to look at next."""

import numpy as np

from . import operations
from .figures import Bools, Figures, Hard
from .flow_rows import FlowRows


def why(figures: Figures, rows: FlowRows, bad: Bools, row: int) -> str:
    """What differs, and whether the record's inputs agree."""
    pairs = figures.pairs
    if (hard := figures.hard[row]) & (Hard.ONLY_A | Hard.ONLY_B):
        return _only(figures, rows, row)
    text = difference(figures, row)
    same = (pairs.record == pairs.record[row]) & (pairs.unit == pairs.unit[row])
    inputs = same & rows.is_input
    if rows.is_input[row]:
        if rows.parts[rows.part[row]] == "parameters":
            return f"the parameter differs: {text}"
        if not figures.is_tensor[row]:
            return f"the call's argument differs: {text}"
        return f"no recorded operation made this difference of its input: {text}"
    if hard & Hard.NAN:
        return f"it makes NaN from inputs that {_inputs(bad, inputs)}: {text}"
    return f"inputs {_inputs(bad, inputs)}, the result differs: {text}"


def _inputs(bad: Bools, inputs: Bools) -> str:
    return "agree" if not bad[inputs].any() else "differ too"


def _only(figures: Figures, rows: FlowRows, row: int) -> str:
    pairs, here = figures.pairs, "A" if figures.hard[row] & Hard.ONLY_A else "B"
    other = "B" if here == "A" else "A"
    same = (pairs.record == pairs.record[row]) & (pairs.unit == pairs.unit[row])
    mine = pairs.a if here == "A" else pairs.b
    if ((pairs.a[same] >= 0) & (pairs.b[same] >= 0)).any():
        return f"only {here} has this argument"
    text = f"only {here} has this record"
    behind = np.flatnonzero(
        (pairs.unit == pairs.unit[row]) & ~same & ((pairs.b if here == "A" else pairs.a) >= 0)
    )
    behind = behind[behind > row]
    lone = behind[:1][mine[behind[:1]] < 0] if len(behind) else behind
    if len(lone):
        text += f"; in its place {other} has {rows.names[pairs.record[lone[0]]].replace('*', '')}"
    return text


def difference(figures: Figures, row: int) -> str:
    """One row's difference in figures: "norm 3.2 and 4.1 (relative 0.22)"."""
    hard, parts = int(figures.hard[row]), []
    if hard & Hard.ONLY_A:
        return "only A has it"
    if hard & Hard.ONLY_B:
        return "only B has it"
    if hard & Hard.FORM:
        parts.append("a value of another kind")
    if hard & Hard.SHAPE:
        parts.append("another shape")
    if hard & Hard.DTYPE:
        names = [
            figures.dtypes[codes[row]] if codes[row] >= 0 else "none" for codes in figures.dtype
        ]
        parts.append(f"dtype {names[0]} and {names[1]}")
    if hard & Hard.REQUIRES_GRAD:
        parts.append("requires_grad differs")
    if not figures.is_tensor[row] and not parts:
        x, y = (figures.values[c[row]] if c[row] >= 0 else "null" for c in figures.value)
        parts.append(f"{_short(x)} and {_short(y)}")
    if figures.is_tensor[row]:
        parts.extend(_numbers(figures, row))
    if hard & Hard.CONTENT and len(parts) < 1:
        parts.append("equal statistics, but another checksum: other elements, or in another order")
    return ", ".join(parts) or "equal"


def _numbers(figures: Figures, row: int) -> list[str]:
    parts = []
    for name in ("norm", "mean", "max", "min"):
        x, y = figures.a[name][row], figures.b[name][row]
        if figures.there[name][row] and x != y and not (np.isnan(x) and np.isnan(y)):
            parts.append(f"{name} {x:.6g} and {y:.6g}")
    if figures.error[row] > 0 and parts:
        parts[-1] += f" (error {figures.error[row]:.2g})"
    elif figures.error[row] > 0:
        parts.append(f"error {figures.error[row]:.2g}")
    return parts[:5]


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def words(figures: Figures, rows: FlowRows, row: int) -> list[str]:
    """What to look at next."""
    record = rows.names[figures.pairs.record[row]]
    hard, name = int(figures.hard[row]), operations.api_name(record)
    result = []
    if operations.is_communication(record):
        result.append(
            "A collective: compare its group, its inputs on every member, and whether all of them "
            "call it."
        )
    if hard & (Hard.ONLY_A | Hard.ONLY_B):
        result.append("The two runs call different operations from here on: compare their scripts.")
    if hard & Hard.DTYPE:
        result.append("Check dtypes: autocast, a cast of the layer, or a default dtype.")
    if hard & Hard.NAN:
        result.append(
            "Look for a row that is masked whole, a division by zero, or an overflow before it."
        )
    if name in operations.RANDOM or ".Dropout." in record:
        result.append("Random: check seeds, train() and eval(), and the probability.")
    if rows.parts[rows.part[row]] == "parameters" or _is_weight(rows, row):
        result.append(
            "If it is a parameter: check initialisation, checkpoint loading, and the optimizer of "
            "the step before."
        )
    elif rows.is_input[row] and figures.is_tensor[row]:
        result.append("Check the data: order, seed and sharding of the loader.")
    if record.endswith(".backward") or ".backward." in record:
        result.append("Backward: check the loss, hooks on gradients and the backward of that op.")
    result.append(f'Record its tensors next: {{"task": "tensor", "list": ["{_stem(record)}"]}}')
    return result


def _is_weight(rows: FlowRows, row: int) -> bool:
    return rows.argument(row) in ("input_args.1", "input_args.2")


def _stem(record: str) -> str:
    for word in (".forward", ".backward", ".parameters_grad"):
        record = record.split(word)[0]
    return record.replace("*", "")
