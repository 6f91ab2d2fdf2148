"""Why a row of a dump of ours may differ from msProbe's. docs/differences.md has the reasons; where
a rule needs more than the row, it looks at the whole dumps, so that it fits nothing else.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from dumpdiff import _number
from peerdiff import MISSING, STATISTICS, close


@dataclass(frozen=True)
class Rule:
    """`fits(row, context)` is whether the row differs for this reason; `moves(record, context)`
    whether the record may stand at another place."""

    name: str
    fits: Any
    moves: Any = lambda record, context: False


def _forward(record):
    return record.replace(".backward", ".forward")


def _is_backward(record, kind=""):
    return ".backward" in record and record.startswith("Module." if kind == "module" else kind)


def _tensors(value):
    if isinstance(value, dict):
        if "dtype" in value:
            yield value
        else:
            for item in value.values():
                yield from _tensors(item)
    elif isinstance(value, list):
        for item in value:
            yield from _tensors(item)


# ------------------------------------------------------------------------------------ bits


def _other_bits(row, context):
    """msProbe changed the results of this run: its numbers are near ours."""
    a, b = row.peer, row.ours
    if not context.changed or row.kind != "value" or not isinstance(a, dict):
        return False
    return isinstance(b, dict) and list(a) == list(b) and all(_near(k, a, b) for k in a)


def _near(key, a, b):
    x, y = _number(a[key]), _number(b[key])
    if x == y or not (isinstance(x, float) and isinstance(y, float)):
        return x == y
    if not math.isfinite(x):
        return key in STATISTICS and close(key, a, b)
    sizes = [abs(x), abs(y)]
    if "dtype" in a and key in STATISTICS:
        sizes += [abs(_number(e[k])) for e in (a, b) for k in ("Max", "Min")]
    # A gradient that is zero but for rounding has no digit in common with another such run.
    return abs(x - y) <= max(1e-9, 0.02 * max(size for size in sizes if math.isfinite(size)))


# -------------------------------------------------------------------------------- keywords


def _has_keyword_tensors(record, context):
    if not _is_backward(record, "module"):
        return False
    forward = context.ours.data.get(_forward(record), {})
    return any(t["requires_grad"] for t in _tensors(forward.get("input_kwargs", {})))


def _keyword_gradient(row, context):
    if row.kind != "value" or not _has_keyword_tensors(row.record, context):
        return False
    return row.path[0] == "output" and (row.peer == MISSING or row.peer == [])


# -------------------------------------------------------------------- the same tensor twice


def _is_given_twice(record, context):
    if not _is_backward(record, "module"):
        return False
    forward = context.ours.data.get(_forward(record), {})
    given = [str(t) for t in _tensors(forward.get("input_args", [])) if t["requires_grad"]]
    return len(given) > len(set(given))


def _given_twice(row, context):
    return row.kind == "value" and row.path[0] == "output" and _is_given_twice(row.record, context)


def _other_way(row, context):
    """MultiheadAttention asks `query is key`; msProbe's hooks give it copies. Functions that it
    calls more often then have other numbers everywhere.
    """
    return _stem(row.record) in _stems_of_another_way(context)


@functools.cache
def _stems_of_another_way(context):
    twice = any(_is_given_twice(name, context) for name in context.ours.data)
    return _unequal_stems(context) if twice else frozenset()


def _stem(record):
    return ".".join(record.split(".")[:2])


@functools.cache
def _unequal_stems(context):
    counts = [Counter(_stem(n) for n in x.data if n.endswith(".forward")) for x in context.both]
    return {stem for stem in counts[0] | counts[1] if counts[0][stem] != counts[1][stem]}


# ------------------------------------------------------------------------- no node of its own


def _hands_on(record, context):
    """The call returned what it was given: no node is its own. At L1 msProbe has none either."""
    if context.ours.level == "L1" or not _is_backward(record):
        return False
    forward = context.ours.data.get(_forward(record), {})
    given = [*_tensors(forward.get("input_args", [])), *_tensors(forward.get("input_kwargs", {}))]
    return any(t in given for t in _tensors(forward.get("output", [])))


def _handed_on(row, context):
    return row.kind != "record" and _hands_on(row.record, context)


# -------------------------------------------------------------------------------- in place


def _in_place_after(row, context):
    """msProbe loses the backward of a module whose output is changed in place."""
    if row.kind == "record":
        return row.peer == MISSING and _is_backward(row.record, "module")
    name = _stem(row.record).rpartition(".")[2]
    return name in ("__iadd__", "add_", "relu_") and _is_backward(row.record)


# ------------------------------------------------------------------------------- other names


def _bound_early(row, context):
    """F.relu as a default argument: msProbe shows the torch.relu that it calls."""
    inner, outer = _stem(row.record).split(".")
    if row.kind != "record" or inner not in ("Torch", "Functional"):
        return False
    here, there = f"Functional.{outer}", f"Torch.{outer}"
    counts = [Counter(map(_stem, x.data)) for x in context.both]
    return counts[0][here] + counts[0][there] == counts[1][here] + counts[1][there]


def _below_dispatcher(row, context):
    """Called by the Python body of an operator, or on the fake tensors that give shapes."""
    if row.kind != "record" or row.ours != MISSING:
        return False
    frames = context.peer.frames.get(_forward(row.record), ())
    below = ("torch/_ops.py", "torch/_subclasses/", "torch/distributed/tensor/_dispatch.py")
    return any(place in frame for frame in frames for place in below)


def _recomputed(row, context):
    """msProbe goes silent when a recomputation stops early inside a function that it watches."""
    return row.kind == "record" and row.peer == MISSING and row.record in _after_stop(context)


@functools.cache
def _after_stop(context):
    """Our records of functions from the first one on that was stopped under both."""
    data = context.ours.data
    stopped = [
        index
        for index, name in enumerate(data)
        if list(data[name])
        == list(context.peer.data.get(name, ()))
        == ["input_args", "input_kwargs"]
    ]
    later = list(data)[min(stopped) :] if stopped else []
    return {name for name in later if not name.startswith("Module.")}


def _unused(row, context):
    """msProbe's hook on a module runs also what made the outputs that nobody used."""
    if row.kind != "record" or row.ours != MISSING or not _is_backward(row.record):
        return False
    return not any(_tensors(context.peer.data[row.record]))


def _own_parameters(record, context):
    """At L0 nothing tells when an inner module's turn is over until the next module's node runs."""
    return context.ours.level == "L0" and ".parameters_grad." in record


@functools.cache
def _other_signature(context):
    """generate() asks the signature of a forward, which msProbe replaces: it then leaves out
    position_ids, and nothing that follows is the same.
    """
    names = [n for n in context.ours.data if n.startswith("Module.") and n in context.peer.data]
    given, without = (
        {n for n in names if x.data[n].get("input_kwargs", {}).get("position_ids")}
        for x in reversed(context.both)
    )
    return bool(given - without)


def _module_order(record, context):
    """A module with several outputs is complete when the last gradient of them has arrived."""
    entry = context.ours.data.get(record, {})
    return _is_backward(record, "module") and len(entry.get("input", [])) > 1


RULES = [
    Rule("bits", _other_bits),
    Rule("signature", lambda row, c: _other_signature(c), lambda record, c: _other_signature(c)),
    Rule("keyword tensors", _keyword_gradient, _has_keyword_tensors),
    Rule("given twice", _given_twice),
    Rule("bound early", _bound_early),
    Rule("below the dispatcher", _below_dispatcher),
    Rule("another way", _other_way, lambda record, c: _stem(record) in _stems_of_another_way(c)),
    Rule("handed on", _handed_on, _hands_on),
    Rule("in place", _in_place_after),
    Rule("recomputed", _recomputed),
    Rule("unused", _unused),
    Rule("several outputs", lambda row, context: False, _module_order),
    Rule("own parameters", lambda row, context: False, _own_parameters),
]
