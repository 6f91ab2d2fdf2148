"""What a run's threads count, for metrics and `rankscope status`; and the quotas of a run."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from rankscope.collector.config import Config


@dataclass
class Counts:
    """Since the run was opened. Each is written by one thread; any may read."""

    batches: int = 0
    events: int = 0
    rows: int = 0
    bytes: int = 0
    acks: int = 0
    refused: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Events that agents say they dropped, by process."""
    commits: int = 0
    commit_seconds: float = 0.0
    events_before: int = 0
    """In the tables when the run was opened."""
    disk_bytes: int = 0
    """Of the tables when they were last measured."""
    bytes_measured: int = 0
    """`bytes` at that time."""

    def measure(self, tables: Path) -> None:
        """Look at the disk. Blocks."""
        received = self.bytes
        self.disk_bytes, self.bytes_measured = disk_bytes(tables), received


def over_quota(config: Config, counts: Counts) -> str | None:
    """Why nothing more is taken in, or None. What came since the last measurement counts as it came
    over the wire."""
    events = counts.events_before + counts.events
    if config.quota_rows and events >= config.quota_rows:
        return f"the run has {events} events, its quota is {config.quota_rows} (quota_rows)"
    used = counts.disk_bytes + counts.bytes - counts.bytes_measured
    if config.quota_bytes and used >= config.quota_bytes:
        return f"the run takes {used} bytes, its quota is {config.quota_bytes} (quota_bytes)"
    return None


def disk_bytes(folder: Path) -> int:
    """Of all files below a folder; files that go away meanwhile do not count."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total


def stored_events(tables: Path) -> int:
    """Events in the tables of a run, by their log; 0 where there are none yet."""
    path = tables / "nodes"
    if not (path / "_delta_log").is_dir():
        return 0
    actions = pa.table(DeltaTable(path).get_add_actions(flatten=True))
    counts = actions["num_records"].to_pylist() if actions.num_rows else []
    return sum(int(count or 0) for count in counts)
