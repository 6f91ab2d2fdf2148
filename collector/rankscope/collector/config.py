"""Settings of a collector."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

_FLAGS = {"true": True, "1": True, "false": False, "0": False}
LAYOUTS = ("eager", "on_demand")
TENSORS = ("auto", "stream")


class ConfigError(ValueError):
    """A setting has a value that is not allowed."""


@dataclass(frozen=True)
class Config:
    """How a collector commits, seals, renders and limits itself."""

    commit_interval_seconds: float = 0.25
    """Batches wait this long at most before they are committed together."""
    commit_rows: int = 200_000
    """A commit begins early when this many events wait."""
    seal_after_seconds: float = 30.0
    """A step is sealed without the late ones this long after the first process ended it."""
    lost_after_seconds: float = 5.0
    """A process whose stream broke counts as lost after this long without a new stream."""
    restart_grace_seconds: float = 30.0
    """After a restart, processes of before have this long to come back until they count as lost."""
    close_seconds: float = 8.0
    """A collector that is told to end writes dump.json and seals steps for this long; what is left
    is done at its next start."""
    pause_render_seconds: float = 5.0
    """The layout of an open step that was paused is written at most this often."""
    layout: str = "eager"
    """"eager": dump.json as soon as a process ended a step; "on_demand": only when asked for."""
    split_replicas: bool = False
    """Groups that number their ranks independently are replicas, with ranks of their own."""
    layout_max_processes: int = 64
    """A run with more processes than this is not rendered eagerly."""
    max_message_bytes: int = 16 << 20
    """Larger messages are refused."""
    max_stream_bytes: int = 16 << 20
    """A stream is not read further while this much of it waits for its commit."""
    max_memory_bytes: int = 512 << 20
    """No stream is read further while this much of all of them waits for its commit."""
    max_streams: int = 1024
    """Further streams are told to come again later."""
    max_streams_per_peer: int = 768
    """The same for the streams that come from one address."""
    hello_seconds: float = 10.0
    """A stream that has not said who it is for this long is ended."""
    max_open_runs: int = 256
    """Processes of further runs are told to come again later."""
    max_processes: int = 20_000
    """Further processes of a run are refused."""

    quota_bytes: int = 0
    """Nothing more is taken in for a run whose tables take so much disk; 0: no limit."""
    quota_rows: int = 0
    """Nothing more is taken in for a run that has so many events; 0: no limit."""
    tensors: str = "auto"
    """"auto": whole tensors of processes on this host are read from their spool, others are sent
    over the stream; "stream": all are sent."""
    tensor_quota_bytes: int = 0
    """Processes capture no new tensors once those of the run take so much disk; 0: no limit."""

    def __post_init__(self) -> None:
        for name, allowed in (("layout", LAYOUTS), ("tensors", TENSORS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}: {getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )
        for field in fields(self):
            value = getattr(self, field.name)
            if "quota" in field.name and value == 0:
                continue
            if not isinstance(value, str | bool) and not value > 0:
                raise ConfigError(f"{field.name}: {value!r} is not greater than 0")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Config":
        """Each field from RANKSCOPE_SERVE_<FIELD IN CAPITALS> where set, else its default."""
        values: dict[str, object] = {}
        for field in fields(cls):
            name = f"RANKSCOPE_SERVE_{field.name.upper()}"
            if text := environ.get(name):
                if isinstance(field.default, bool):
                    if text not in _FLAGS:
                        raise ConfigError(f"{name}: {text!r} is not one of {', '.join(_FLAGS)}")
                    values[field.name] = _FLAGS[text]
                    continue
                try:
                    values[field.name] = type(field.default)(text)  # type: ignore[misc]
                except ValueError:
                    raise ConfigError(f"{name}: {text!r} is not a number") from None
        return cls(**values)  # type: ignore[arg-type]
