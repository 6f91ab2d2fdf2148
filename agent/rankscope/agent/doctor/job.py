"""Checks of what the job says: its configuration, its variables and the rank they give."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankscope.agent.checks import show
from rankscope.agent.config import Config
from rankscope.agent.doctor.finding import Finding, fault, ok, warning
from rankscope.agent.errors import ConfigError, NotAvailableError
from rankscope.agent.identity import LAUNCHERS, find_rank
from rankscope.agent.settings import KEYS, SECTION_KEYS, SETTINGS, TASKS, Key

#: Variables of ours that are no settings of config.json.
VARIABLES = (
    "RANKSCOPE_RANK_ID",
    "RANKSCOPE_PARENT",
    "RANKSCOPE_AUTO",
    "RANKSCOPE_CONFIG",
    "RANKSCOPE_STEP_ON",
    "RANKSCOPE_BUILD_KERNEL",
)


def settings(path: Path | None, environ: Mapping[str, str]) -> tuple[Config, list[Finding]]:
    """The configuration a job would have, and a fault if it would have none; then what is left of
    it without the file, and without the environment."""
    found: list[Finding] = []
    for file, variables in ((path, environ), (None, environ)):
        try:
            return Config.load(file, environ=variables), found
        except ConfigError as error:
            remedy = "correct it: PrecisionDebugger() would raise this"
            found = found or [fault("settings", str(error), remedy)]
    return Config.load(environ={}), found


def config_file(path: Path) -> Iterator[Finding]:
    """Each key of a config.json: right, wrong, ignored, or not in this version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        yield fault("config", f"{path}: {error}", "see docs/configuration.md for the form")
        return
    if not isinstance(content, dict):
        yield fault("config", f"{path}: not an object", "write an object: {...}")
        return
    task = content.get("task") or "statistics"
    known = {key.name: key for key in KEYS}
    for name, value in content.items():
        if name in known:
            yield _key(known[name], name, value)
        elif name == "rankscope":
            yield from _section(name, value, SETTINGS, strict=True)
        elif name == task:
            keys = [key for key in SECTION_KEYS if not key.tasks or task in key.tasks]
            yield from _section(name, value, keys)
        elif name in TASKS:
            yield ok(name, f"not read: the task is {task}")
        else:
            yield _unknown(name, [*known, *TASKS, "rankscope"])


def _section(
    name: str, value: Any, keys: Iterable[Key], *, strict: bool = False
) -> Iterator[Finding]:
    if value is None:
        return
    if not isinstance(value, dict):
        yield fault(name, f"{show(value)} is not allowed", "write an object: {...}")
        return
    known = {key.name: key for key in keys}
    for inner, inner_value in value.items():
        if inner in known:
            yield _key(known[inner], f"{name}.{inner}", inner_value)
        else:
            yield _unknown(f"{name}.{inner}", [f"{name}.{other}" for other in known], strict)


def _key(key: Key, name: str, value: Any) -> Finding:
    if value is None and not key.null_means_something:
        return ok(name, f"null: the default {show(key.default)}")
    try:
        key.read(value, name)
    except NotAvailableError as error:
        return fault(name, str(error), "leave it out, or choose what is available")
    except ConfigError as error:
        return fault(name, str(error), f"write one of: {key.allowed}")
    return ok(name, f"{show(value)}: {key.help}")


def _unknown(name: str, known: Iterable[str], strict: bool = False) -> Finding:
    close = difflib.get_close_matches(name, list(known), n=1)
    remedy = f"did you mean {close[0]}?" if close else "leave it out"
    if strict:
        return fault(name, "there is no such setting", remedy)
    return warning(name, "no key of msProbe or rankscope: it is ignored", remedy)


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Names that begin like ours and mean nothing."""
    known = [*VARIABLES, *(key.variable for key in SETTINGS if key.variable)]
    for name in sorted(environ):
        if not name.startswith("RANKSCOPE_") or name.startswith("RANKSCOPE_SERVE_"):
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"unset {name}"
            yield warning(name, "no variable of rankscope: it does nothing", remedy)


def rank(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Which rank a process with these variables would have, and whether they agree."""
    names = ["RANKSCOPE_RANK_ID", *(name for ranks, _, _ in LAUNCHERS for name in ranks)]
    numbers = {name: environ[name].strip() for name in names if environ.get(name, "").strip()}
    wrong = [name for name, text in numbers.items() if not (text.isascii() and text.isdigit())]
    for name in wrong:
        what = f"{numbers.pop(name)!r} is no rank"
        yield fault(name, what, f"set {name} to a whole number, or unset it")
    claim = find_rank(None, None, {n: v for n, v in environ.items() if n not in wrong})
    if claim is None:
        yield ok("rank", "no variable tells one: the process group does, else proc<pid>")
        return
    chosen = f"rank {claim.rank} (from {claim.source})"
    others = [f"{name}={text}" for name, text in numbers.items() if int(text) != claim.rank]
    if claim.world_size and claim.rank >= claim.world_size:
        what = f"{chosen} in a world of {claim.world_size}"
        yield fault("rank", what, "set rank and world size by one launcher")
    elif others:
        what = f"{chosen}, but {', '.join(others)}"
        yield warning("rank", what, "unset what is not meant, or set RANKSCOPE_RANK_ID")
    else:
        world = f" of {claim.world_size}" if claim.world_size else ""
        yield ok("rank", f"{chosen}{world}")
