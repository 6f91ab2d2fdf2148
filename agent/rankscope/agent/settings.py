"""Every key of config.json as tables: msProbe's keys, its task sections, ours under "rankscope".

A new setting is one row here and one row in docs/configuration.md (a test compares the two). A
row's `check` is one of checks.py; the message of a value that is not allowed is composed once, in
`Key.read`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rankscope.agent.checks import (
    EXTRAS,
    LARGEST_INDEX,
    addresses,
    choice,
    data_mode,
    extras,
    flag,
    indices,
    load,
    number,
    patterns,
    risk_level,
    run_name,
    scope,
    show,
    slices,
    text,
    texts,
)
from rankscope.agent.errors import ConfigError, NotAvailableError

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
