"""The agent's configuration: config.json, our "rankscope" key in it, arguments and environment.

What wins, strongest first: constructor arguments (over msProbe's keys), environment variables (over
the "rankscope" key), the file, the default. `settings.py` holds the tables of keys.
"""

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.agent.checks import mapping, show
from rankscope.agent.errors import ConfigError
from rankscope.agent.load_setting import Load
from rankscope.agent.settings import KEYS, SECTION_KEYS, SETTINGS, Key

_FILES = ("token_file", "tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One checked configuration, made by `load`; nothing else reads config.json."""

    task: str
    """As dump.json names it: acc_check records what task tensor does."""
    level: str
    """As dump.json names it: task structure turns L1 into mix."""
    dump_path: Path
    """Absolute; may hold any characters, need not exist. A collector daemon ignores it."""
    ranks: frozenset[int] | None
    """Ranks that record; None: all."""
    steps: frozenset[int] | None
    """Steps that are recorded; None: all."""
    scope: tuple[str, ...]
    """Two record names, or empty: no scope."""
    list: tuple[str, ...]
    """Substrings of record names to keep; empty: all."""
    tensor_list: tuple[str, ...]
    data_mode: frozenset[str]
    """Subset of forward, backward, input, output; never without a direction and a side."""
    summary_mode: str
    precision: str
    risk_level: str
    """"CORE", "FOCUS" or "ALL"; applies only when scope and list are empty."""
    extra_info: bool
    async_dump: bool
    dump_enable: bool | None
    """None: the file is not watched."""
    custom_op_namespaces: tuple[str, ...]
    """Namespaces of torch.ops whose operators are watched."""
    replacing: Load | None
    """What modules are given in place of their inputs (key "load")."""
    slices: tuple[Mapping[str, int], ...]
    """How tensors are cut before they are measured: {dim, begin, end, size}; size is optional."""

    collector: tuple[str, ...]
    """Addresses "host:port" in the order to try; empty: start a collector on this host."""
    run: str | None
    """Exact run name; None: the collector names the run."""
    token_file: Path | None
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    spool_path: Path | None
    """Absolute; None: beside the run."""
    spool_limit_bytes: int
    on_full: str
    """"drop" or "block"."""
    block_seconds: float
    tensor_memory_bytes: int
    tensor_quota_bytes: int | None
    """Most that copies of whole tensors take until they are written."""
    flush_seconds: float
    exit_seconds: float

    apis: Path | None
    """Table of watched functions; None: the one that ships."""
    extras: tuple[str, ...]
    """Extras of that table that are switched on."""
    ignore: Path | None
    """Inputs and outputs that records show as null; None: the file that ships."""
    custom_wrap_ops: Mapping[str, tuple[str, ...]]
    """Path of a module -> names of functions in it that are watched."""

    overhead_budget: float | None
    """Most that the agent may take of the step time; None: no limit."""
    samples: int
    """Most elements of each tensor that are recorded; 0: none."""
    std: bool
    object_names: bool

    path: Path | None
    """The file that all this was read from."""
    raw: Mapping[str, Any]
    """The whole effective configuration as JSON values, keyed as in config.json, with defaults."""

    @classmethod
    def load(
        cls,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        step: Any = None,
        environ: Mapping[str, str] = os.environ,
    ) -> "Config":
        """Read and check everything; a ConfigError names key, value and what is allowed."""
        source, given = _read_file(config_path)
        if isinstance(dump_path, os.PathLike):
            dump_path = os.fspath(dump_path)
        arguments = {"task": task, "dump_path": dump_path, "level": level, "step": step}
        top = _read_keys(KEYS, given, source, arguments=arguments)
        name = top.values["task"]
        keys = [key for key in SECTION_KEYS if not key.tasks or name in key.tasks]
        section = _read_keys(keys, _section(given, name, source), source, prefix=f"{name}.")
        settings = _read_settings(given, source, environ)
        level = _effective_level(name, top.values["level"])
        raw = {**top.raw, "level": level, name: section.raw, "rankscope": settings.raw}
        path = None if config_path is None else Path(config_path).absolute()
        values = {**top.values, **section.values, **settings.values, "level": level, "path": path}
        values["task"] = "tensor" if name == "acc_check" else name
        if name in ("nan_check", "overflow_check"):  # they rest on the counts of NaN and infinity
            values["summary_mode"] = "statistics"
        return cls._from_values(values, raw)

    @classmethod
    def _from_values(cls, values: dict[str, Any], raw: dict[str, Any]) -> "Config":
        spool_path = values["spool_path"]
        values |= {
            "ranks": values["rank"],
            "steps": values["step"],
            "dump_path": _absolute(values["dump_path"], "dump_path"),
            "spool_path": None if spool_path is None else _absolute(spool_path, "spool_path"),
            "slices": values["slice"],
            "replacing": values["load"],
            **{n: _existing(values[n], f"rankscope.{n}") for n in _FILES},
            "apis": _existing(values["apis"], "rankscope.apis"),
            "ignore": _existing(values["ignore"], "rankscope.ignore"),
            "custom_wrap_ops": _custom_wrap_ops(values["custom_wrap_ops"]),
            "raw": raw,
        }
        values.setdefault("tensor_list", ())  # only the section of task statistics has it
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


@dataclass
class _Read:
    """Checked values, and the same as they were given, for `Config.raw`."""

    values: dict[str, Any]
    raw: dict[str, Any]


def _read_keys(
    keys: Iterable[Key],
    given: Mapping[str, Any],
    source: str,
    *,
    prefix: str = "",
    arguments: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> _Read:
    read = _Read({}, {})
    for key in keys:
        place = f"{prefix}{key.name} in {source}"
        value, where = _find(key, given, place, arguments or {}, environ or {})
        checked = None if value is None and not where else key.read(value, where)
        read.values[key.name] = checked
        read.raw[key.name] = checked if isinstance(checked, str | int | float) else value
    return read


def _find(
    key: Key,
    given: Mapping[str, Any],
    place: str,
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
) -> tuple[Any, str]:
    """The value that wins and where it stands; where is "" for a default that is null."""
    if arguments.get(key.name) is not None:
        return arguments[key.name], f"argument {key.name}"
    if key.variable and environ.get(key.variable):
        return environ[key.variable], f"environment variable {key.variable}"
    if given.get(key.name) is not None or (key.name in given and key.null_means_something):
        return given[key.name], place
    return key.default, "" if key.default is None else f"default of {key.name}"


def _read_settings(given: Mapping[str, Any], source: str, environ: Mapping[str, str]) -> _Read:
    settings = _section(given, "rankscope", source)
    known = [key.name for key in SETTINGS]
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(
                f"rankscope.{name} in {source}: there is no such setting{hint}; "
                f"allowed: {', '.join(known)}"
            )
    return _read_keys(SETTINGS, settings, source, prefix="rankscope.", environ=environ)


def _section(given: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    key = Key(name, {}, mapping, "an object", "")
    value = given.get(name)
    return {} if value is None else mapping(key.read(value, f"{name} in {source}"))


def _effective_level(task: str, level: str) -> str:
    """As msProbe: a structure has no meaning without modules, so L1 becomes mix."""
    return "mix" if task == "structure" and level == "L1" else level


def _absolute(path: str, key: str) -> Path:
    absolute = Path(os.path.abspath(path))
    if absolute.is_file():
        raise ConfigError(f"{key}: {show(path)} is a file; allowed: a folder or a free path")
    return absolute


def _existing(path: str | None, key: str) -> Path | None:
    """An absolute path of a file; ConfigError when it cannot be read."""
    if path is None:
        return None
    absolute = Path(os.path.abspath(path))
    if not absolute.is_file():
        raise ConfigError(f"{key}: {show(path)} is no file (seen from {os.getcwd()})")
    return absolute


def _custom_wrap_ops(path: str | None) -> dict[str, tuple[str, ...]]:
    """The names in a file in the form of msProbe's custom_wrap_ops.yaml."""
    found = _existing(path, "rankscope.custom_wrap_ops")
    if found is None:
        return {}
    import yaml

    allowed = "allowed: {module path: [names of functions]}"
    try:
        content = yaml.safe_load(found.read_text(encoding="utf-8")) or {}
        names = {module: tuple(listed) for module, listed in content.items()}
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{found}: cannot be read ({error}); {allowed}") from error
    for module, listed in names.items():
        for name in (*str(module).split("."), *listed):
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(f"{found}: {show(name)} in {module} is no name; {allowed}")
    return names


def _read_file(config_path: str | os.PathLike[str] | None) -> tuple[str, dict[str, Any]]:
    """Name of the source for messages, and the object in the file."""
    if config_path is None:
        return "config.json", {}
    if not isinstance(config_path, str | os.PathLike):
        raise ConfigError(f"config_path: {show(config_path)} is not allowed; allowed: a path")
    path = Path(config_path)
    if path.suffix != ".json":
        raise ConfigError(f"config_path: {show(str(path))} is not allowed; allowed: a *.json file")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"config_path: {show(str(path))} does not exist (seen from {os.getcwd()})"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"config_path: {show(str(path))} cannot be read: {error.strerror}"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds {show(content)}; allowed: an object {{...}}")
    return str(path), content
