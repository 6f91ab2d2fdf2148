"""Settings of the transport, and the folder its spool lies in."""

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rankscope.agent.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """How records get to a collector. Fields that `agent.Config` has too keep their names."""

    dump_path: Path
    """Absolute; the embedded collector's RUN. Only names the spool when `collector` is set."""
    collector: tuple[str, ...] = ()
    """Addresses in the order to try; empty: a collector is started on this host for `dump_path`."""
    token_file: Path | None = None
    """Its first line is shown to the collector."""
    tls_ca: Path | None = None
    """PEM of whoever signs collectors' certificates; with it or `tls_cert` TLS is spoken."""
    tls_cert: Path | None = None
    """PEM shown to collectors that ask for one; needs `tls_key`."""
    tls_key: Path | None = None
    spool_path: Path | None = None
    """Holds a folder per destination; None: RUN.rankscope/spool or the user's state folder."""
    spool_limit_bytes: int = 2 << 30
    """Most that this process keeps on disk; over it batches are dropped whole and counted."""
    on_full: str = "drop"
    """"drop", or "block": wait up to `block_seconds` for space, then drop."""
    block_seconds: float = 5.0
    flush_seconds: float = 0.25
    """Longest time between two takes; a wake makes it shorter."""
    exit_seconds: float = 5.0
    """Longest wait in `close` unless its caller says otherwise."""

    segment_bytes: int = 64 << 20
    memory_limit_bytes: int = 64 << 20
    """Limit of the spool in memory, used where no folder can be written."""
    in_flight_bytes: int = 8 << 20
    """Most that is sent and not acknowledged; a larger batch goes alone. An ack waits for a commit
    (0.3 s), so that 1 MiB would deliver 3 MB/s; it lies in the spool, not in memory."""
    max_batch_bytes: int = 15 << 20
    """Larger batches cannot be sent and are dropped; below gRPC's message limit of 16 MiB."""
    settle_seconds: float = 0.05
    """Wakes closer together than this share one batch."""
    heartbeat_seconds: float = 10.0
    ack_timeout_seconds: float = 30.0
    """A stream is given up when nothing is heard for this long while an answer is due."""
    connect_notice_seconds: float = 2.0
    """A collector silent for this long is mentioned once."""
    next_address_seconds: float = 0.5
    """With several addresses, one silent for this long makes way for the next; twice that in each
    further round."""
    unreachable_exit_seconds: float = 1.0
    """Longest wait in `close` when no collector ever answered and none is starting."""
    backoff_seconds: float = 0.1
    max_backoff_seconds: float = 1.0
    leftovers_seconds: float = 15.0
    """How often spools of dead processes are looked for."""

    def __post_init__(self) -> None:
        if self.on_full not in ("drop", "block"):
            raise ConfigError(f"on_full: {self.on_full!r} is not allowed; allowed: drop, block")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key: one without the other; allowed: both or none")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise ConfigError(f"{field.name}: {value!r} is not allowed; allowed: 0 or more")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "TransportConfig":
        """From checked values (`vars(agent.Config)`); names that are not ours are ignored."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "TransportConfig":
        """Defaults and RANKSCOPE_ variables; a ConfigError names the variable that is wrong."""
        from rankscope.agent.config import Config

        return cls.from_mapping(vars(Config.load(environ=environ)))

    @property
    def sidecar_path(self) -> Path:
        """RUN.rankscope, the sibling of RUN that holds all but the layout."""
        return sidecar_of(self.dump_path)

    def spool_folder(self, environ: Mapping[str, str] = os.environ) -> Path:
        """Folder of this destination's spools: what lies in it may be sent to its collector."""
        if self.spool_path is not None:
            return self.spool_path / self._destination()
        if not self.collector:
            return self.sidecar_path / "spool"
        return self.fallback_folder(environ)

    def fallback_folder(self, environ: Mapping[str, str] = os.environ) -> Path:
        """The user's own place for spools on this host, when nothing better is known or usable."""
        state = environ.get("XDG_STATE_HOME", "")
        if os.path.isabs(state):
            return Path(state) / "rankscope" / "spool" / self._destination()
        # Not ~/.local/state: on clusters the home folder is usually a network file system.
        name = f"rankscope-spool-{os.getuid()}"
        return Path(tempfile.gettempdir()) / name / self._destination()

    def _destination(self) -> str:
        """A folder name that is equal for processes whose records go to the same place."""
        text = ",".join(self.collector) or os.fspath(self.dump_path)
        readable = re.sub(r"[^A-Za-z0-9.-]+", "_", text)[-60:].strip("_.")
        return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def sidecar_of(run_path: Path) -> Path:
    """RUN.rankscope beside RUN."""
    return run_path.with_name(run_path.name + ".rankscope")
