"""What values of config.json may be. A check returns the value in the form the agent uses, or
raises ValueError; settings.py says which key has which.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope.agent.load_setting import Load, is_name

#: Extras of apis.yaml.
EXTRAS = (
    "operators",
    "views",
    "writes",
    "rms_norm",
    "rnn",
    "grouped_mm",
    "fft",
    "special",
    "aten",
    "functional_collectives",
)
PARTS = frozenset({"forward", "backward", "input", "output"})
LARGEST_INDEX = 1_000_000


def show(value: Any) -> str:
    """A value as a message shows it: short, and the way the user wrote it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | frozenset):
        value = sorted(value) if isinstance(value, frozenset) else list(value)
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def choice(*names: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return check


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError
    return value


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError
    return tuple(value)


def anything(value: Any) -> Any:
    return value


def indices(value: Any) -> frozenset[int] | None:
    """[1, "3-5"] as {1, 3, 4, 5}; an empty list as None, which means all."""
    if not isinstance(value, list | tuple):
        raise ValueError("not a list")
    found: set[int] = set()
    for item in value:
        first, last = _bounds(item)
        found.update(range(first, last + 1))
    return frozenset(found) or None


def _bounds(item: Any) -> tuple[int, int]:
    if isinstance(item, int) and not isinstance(item, bool):
        first = last = item
    elif isinstance(item, str) and (match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item)):
        first, last = int(match[1]), int(match[2] or match[1])
    else:
        raise ValueError(f"{show(item)} is neither a number nor a range")
    if not 0 <= first <= LARGEST_INDEX or not 0 <= last <= LARGEST_INDEX:
        raise ValueError(f"{show(item)} is outside 0 to {LARGEST_INDEX}")
    if first > last:
        raise ValueError(f"the range {show(item)} is reversed")
    return first, last


def risk_level(value: Any) -> str:
    return "ALL" if value is None or value == "" else choice("CORE", "FOCUS", "ALL")(value)


def data_mode(value: Any) -> frozenset[str]:
    """Completed: directions alone keep both sides, sides alone keep both directions."""
    words = set(texts(value))
    if words == {"all"}:
        return PARTS
    if not words <= PARTS:
        raise ValueError
    for pair in ({"forward", "backward"}, {"input", "output"}):
        if not words & pair:
            words |= pair
    return frozenset(words)


def scope(value: Any) -> tuple[str, ...]:
    names = texts(value)
    if len(names) not in (0, 2):
        raise ValueError(f"{len(names)} names")
    return names


def slices(value: Any) -> tuple[dict[str, int], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError
    for item in value:
        if not isinstance(item, dict) or not {"dim", "begin", "end"} <= set(item):
            raise ValueError
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in item.values()):
            raise ValueError
    return tuple(value)


def patterns(value: Any) -> tuple[str, ...]:
    found = texts(value)
    for entry in found:
        pattern = re.fullmatch(r"name-regex\((.*)\)", entry, re.DOTALL)
        try:
            re.compile(pattern[1] if pattern else "")
        except re.error as error:
            raise ValueError(f"{show(entry)}: {error}") from None
    return found


def extras(value: Any) -> tuple[str, ...]:
    found = texts(value)
    if not set(found) <= set(EXTRAS):
        raise ValueError
    return found


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    return value


def load(value: Any) -> Load:
    given = mapping(value)
    path, modules, record = given.get("path"), given.get("modules"), given.get("dump_after_load")
    if not isinstance(path, str) or not Path(path).is_dir():
        raise ValueError(f"path: {show(path)} is no folder")
    names = modules if isinstance(modules, list) else []
    wrong = [name for name in names if not isinstance(name, str) or not is_name(name)]
    if not names or wrong:
        shown = show(wrong[0] if wrong else modules)
        raise ValueError(f"modules: {shown} is no list of Module.{{name}}.{{Class}}.forward.N")
    if not isinstance(record, bool | None):
        raise ValueError(f"dump_after_load: {show(record)} is not true or false")
    chosen = {}
    for key in ("step", "rank"):
        try:
            chosen[key] = indices([] if given.get(key) is None else given[key])
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return Load(
        Path(path).absolute(), frozenset(names), chosen["step"], chosen["rank"], bool(record)
    )


def addresses(value: Any) -> tuple[str, ...]:
    """ "a:1, b:2" or ["a:1", "b:2"] as ("a:1", "b:2")."""
    items = value.split(",") if isinstance(value, str) and value.strip() else value or ()
    found = tuple(item.strip() for item in texts(items))
    for item in found:
        if re.fullmatch(r"unix:/[^\0]+", item):
            continue
        match = re.fullmatch(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})", item)
        if not match or not 1 <= int(match[1]) <= 65535:
            raise ValueError(f"{show(item)} is no address")
    return found


def run_name(value: Any) -> str:
    name = text(value)
    if "/" in name or name in (".", "..") or name.endswith(".rankscope") or len(name) > 200:
        raise ValueError
    return name


def number(kind: type, smallest: float, largest: float = math.inf) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        wanted = int if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ValueError
        if not smallest <= value <= largest or value == math.inf:
            raise ValueError
        return kind(value)

    return check
