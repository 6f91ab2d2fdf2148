"""Every key of config.json as tables: msProbe's keys, its task sections, ours under "rankscope".

A new setting is one row here and one row in docs/configuration.md (a test compares the two). A
row's `check` returns the value in the form the agent uses or raises ValueError; the message is
composed once, in `Key.read`.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.agent.errors import ConfigError, NotAvailableError
from rankscope.agent.load_setting import Load, is_name

TASKS = (
    "statistics",
    "tensor",
    "structure",
    "acc_check",
    "overflow_check",
    "nan_check",
    "diff_check",
    "exception_dump",
)
LEVELS = ("L0", "L1", "mix", "debug", "L2")
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
LARGEST_SAMPLES = 1024


@dataclass(frozen=True)
class Key:
    """One key of config.json: its default, what is allowed and how a value is checked."""

    name: str
    default: Any
    check: Callable[[Any], Any]
    allowed: str
    help: str
    variable: str = ""  # environment variable that wins over the file
    tasks: tuple[str, ...] = ()  # section keys: the tasks that have it; empty: all
    null_means_something: bool = False  # null is handed to `check`; elsewhere it means "not set"

    def read(self, value: Any, where: str) -> Any:
        """Check a value found at `where` ("level in /path/config.json")."""
        try:
            checked = self.check(value)
        except ValueError as error:
            detail = f" ({error})" if str(error) else ""
            raise ConfigError(
                f"{where}: {show(value)} is not allowed{detail}; allowed: {self.allowed}"
            ) from None
        available = AVAILABLE.get(self.name)
        if available is not None and checked not in available:
            choices = ", ".join(show(choice) for choice in available)
            raise NotAvailableError(
                f"{where}: {show(value)} is not available in this version; available: {choices}"
            )
        return checked


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


_INDICES = f'a list of numbers or ranges such as [0, "3-5"], 0 to {LARGEST_INDEX}; [] is all'
_FLAG = "true, false"
_TEXTS = "a list of strings"

#: Keys at the top of config.json, as msProbe has them.
KEYS = (
    Key("task", "statistics", choice(*TASKS), ", ".join(TASKS), "what is recorded"),
    Key("dump_path", "./dump_path", text, "a path", "folder that will hold step{N}/"),
    Key("rank", [], indices, _INDICES, "ranks that record"),
    Key("step", [], indices, _INDICES, "steps that are recorded"),
    Key("level", "L1", choice(*LEVELS), ", ".join(LEVELS), "modules (L0), APIs (L1) or both (mix)"),
    Key("extra_info", True, flag, _FLAG, "write stack.json and construct.json"),
    Key("async_dump", False, flag, _FLAG, "accepted; recording never waits anyway"),
    Key("precision", "low", choice("low", "high"), "low, high", "high: no Mean and Norm of floats"),
    Key(
        "risk_level",
        "FOCUS",
        risk_level,
        'CORE, FOCUS, ALL (null and "" are ALL)',
        "which APIs are recorded when neither scope nor list is set",
        null_means_something=True,
    ),
    Key("dump_enable", None, flag, _FLAG, "switch recording by editing the file"),
    Key("custom_op_namespaces", ["_C_ascend"], texts, _TEXTS, "torch.ops namespaces to watch"),
    Key(
        "load",
        None,
        load,
        "an object {path, modules, step, rank, dump_after_load}",
        "replace module inputs by those of an earlier dump",
    ),
)

#: Keys inside the section named after the task: {"task": "statistics", "statistics": {...}}.
SECTION_KEYS = (
    Key("scope", [], scope, "[] or a list of two record names", "first and last record to keep"),
    Key(
        "list",
        [],
        patterns,
        _TEXTS,
        "keep records whose name contains one of these, or is found by a name-regex(...)",
    ),
    Key(
        "data_mode",
        ["all"],
        data_mode,
        '["all"] or a list of forward, backward, input, output',
        "directions and sides to keep",
    ),
    Key(
        "summary_mode",
        "statistics",
        choice("statistics", "md5", "xor"),
        "statistics, md5, xor",
        "values or checksums of tensors",
    ),
    Key("tensor_list", [], texts, _TEXTS, "records that save tensors too", tasks=("statistics",)),
    Key("slice", [], slices, "a list of {dim, begin, end, size}", "cut tensors before measuring"),
    Key("request_id", None, text, "a string", "requests of an inference engine to keep"),
    Key(
        "bench_path", None, text, "a path", "an earlier md5 dump to compare with", tasks=("tensor",)
    ),
)

#: Our settings, inside the key "rankscope", which msProbe ignores. Any other name is an error.
SETTINGS = (
    Key(
        "collector",
        [],
        addresses,
        '"host:port" or "unix:/path", a list of them, or [] to start a collector on this host',
        "where records go; several: the next is tried when one fails",
        variable="RANKSCOPE_COLLECTOR",
    ),
    Key(
        "run",
        None,
        run_name,
        'a folder name without "/", up to 200 characters, not ending in ".rankscope"',
        "name of the run; by default made from the job's launcher",
        variable="RANKSCOPE_RUN",
    ),
    Key(
        "token_file",
        None,
        text,
        "a path",
        "file whose first line is the token that the collector asks for",
        variable="RANKSCOPE_TOKEN_FILE",
    ),
    Key(
        "tls_ca",
        None,
        text,
        "a path",
        "PEM of who signs collectors' certificates; with it TLS is spoken",
        variable="RANKSCOPE_TLS_CA",
    ),
    Key(
        "tls_cert",
        None,
        text,
        "a path",
        "PEM of this agent's own certificate, for a collector that asks for one; needs tls_key",
        variable="RANKSCOPE_TLS_CERT",
    ),
    Key(
        "tls_key",
        None,
        text,
        "a path",
        "PEM of the key of tls_cert",
        variable="RANKSCOPE_TLS_KEY",
    ),
    Key(
        "spool_path",
        None,
        text,
        "a path on a local disk",
        "folder for what is not acknowledged yet; by default beside the run",
        variable="RANKSCOPE_SPOOL",
    ),
    Key(
        "spool_limit_bytes",
        2 << 30,
        number(int, 1 << 20),
        "a whole number from 1048576",
        "most that a process keeps on disk",
    ),
    Key("on_full", "drop", choice("drop", "block"), "drop, block", "what a full spool does"),
    Key(
        "block_seconds",
        5.0,
        number(float, 0),
        "a number from 0",
        "with on_full block: longest wait for space; then the batch is dropped and counted",
    ),
    Key(
        "tensor_memory_bytes",
        512 << 20,
        number(int, 1 << 20),
        "a whole number from 1048576",
        "memory for copies of whole tensors until they are written; when it is full, recording "
        "waits for the disk",
    ),
    Key(
        "tensor_quota_bytes",
        None,
        number(int, 1),
        "a whole number from 1",
        "most bytes of distinct tensors that a process captures; further ones are left out and "
        "counted",
    ),
    Key(
        "flush_seconds",
        0.25,
        number(float, 0.01),
        "a number from 0.01",
        "longest time a record stays in memory before it is spooled",
    ),
    Key(
        "exit_seconds",
        5.0,
        number(float, 0),
        "a number from 0",
        "longest wait at exit for the collector to have everything",
    ),
    Key(
        "overhead_budget",
        None,
        number(float, 0.001, 1000),
        "a number from 0.001 to 1000, a share of the step time",
        "record less, so that the agent takes no larger share",
    ),
    Key(
        "samples",
        0,
        number(int, 0, LARGEST_SAMPLES),
        f"a whole number from 0 to {LARGEST_SAMPLES}",
        "so many elements of each tensor are recorded, equally spaced",
    ),
    Key("std", False, flag, _FLAG, "record the standard deviation of each tensor"),
    Key("object_names", False, flag, _FLAG, "record which object a module is, and its call"),
    Key("apis", None, text, "a path", "own table of watched functions, in the form of apis.yaml"),
    Key(
        "extras",
        [],
        extras,
        f"a list of {', '.join(EXTRAS)}",
        "what msProbe never records and is watched all the same",
    ),
    Key(
        "ignore",
        None,
        text,
        "a path",
        "own rules for inputs and outputs that are null, in the form of ignore.yaml",
    ),
    Key(
        "custom_wrap_ops",
        None,
        text,
        "a path",
        "functions to watch: {module path: [names]}, as msProbe's custom_wrap_ops.yaml",
    ),
)

#: What works in this version, in checked form, where that is less than what may be asked for.
#: Later work widens or removes a row; a key without a row works with every allowed value.
AVAILABLE: dict[str, tuple[Any, ...]] = {
    "task": ("statistics", "tensor", "structure", "acc_check", "overflow_check", "nan_check"),
    "level": ("L0", "L1", "mix", "debug"),
    "request_id": (None,),
    "bench_path": (None,),
}
