"""The commit log of a Delta table on disk: what delta-rs leaves to us, fsync and repair."""

import json
import logging
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope.collector.store.errors import StoreDamaged
from rankscope.collector.store.files import fsync

_LAST = "_last_checkpoint"
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint.*\.parquet")
_ENTRY = re.compile(r"(\d{20})\.json")

_log = logging.getLogger(__name__)


class TableLog:
    """The `_delta_log` folder. Not safe for several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._synced = -1

    def entry(self, version: int) -> Path:
        return self.folder / f"{version:020d}.json"

    def sync(self, version: int) -> None:
        """Makes every entry up to `version` durable, also those of other writers."""
        if version <= self._synced:
            return
        if self._synced < 0 and (checkpoint := self.newest_checkpoint()) >= 0:
            self.sync_checkpoint(checkpoint)
            self._synced = checkpoint
        for entry in map(self.entry, range(self._synced + 1, version + 1)):
            if entry.exists():  # another writer may have cleaned up since we looked
                fsync(entry)
        fsync(self.folder)
        self._synced = version

    def sync_checkpoint(self, version: int) -> None:
        """Makes the checkpoint of `version` durable and then what points to it."""
        for path in self._checkpoints().get(version, []):
            fsync(path)
        if (self.folder / _LAST).exists():
            fsync(self.folder / _LAST)
        fsync(self.folder)

    def newest_checkpoint(self) -> int:
        """Version of the newest checkpoint, -1 when there is none."""
        return max(self._checkpoints(), default=-1)

    def repair(self) -> None:
        """Takes away what a power loss left torn at the end of the log, before anybody loads it.

        Only what was never made durable can be torn, so nothing acknowledged is lost. Raises
        StoreDamaged when the entries that a broken checkpoint stands for are gone.
        """
        while (newest := self.newest_checkpoint()) >= 0:
            broken = [path for path in self._checkpoints()[newest] if not _is_parquet(path)]
            if not broken:
                break
            self._remove_checkpoint(newest, broken[0])
        versions = sorted(self._entries(), reverse=True)
        for version in versions:
            if version <= newest or _is_entry(self.entry(version)):
                break
            torn = self.entry(version)
            _log.warning("%s is torn and set aside; it was never acknowledged", torn)
            torn.rename(torn.with_name(torn.name + ".torn"))

    def _remove_checkpoint(self, version: int, broken: Path) -> None:
        checkpoints = self._checkpoints()
        older = max((other for other in checkpoints if other < version), default=-1)
        missing = set(range(older + 1, version + 1)) - self._entries()
        if missing:
            raise StoreDamaged(f"{broken} is broken and log entries {sorted(missing)} are gone")
        _log.warning("%s is broken and removed; the log entries are still there", broken)
        (self.folder / _LAST).unlink(missing_ok=True)
        for path in checkpoints[version]:
            path.unlink()

    def _checkpoints(self) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for path in self.folder.glob("*.checkpoint*.parquet"):
            if match := _CHECKPOINT.fullmatch(path.name):
                found.setdefault(int(match[1]), []).append(path)
        return found

    def _entries(self) -> set[int]:
        names = (_ENTRY.fullmatch(path.name) for path in self.folder.glob("*.json"))
        return {int(match[1]) for match in names if match}


def _is_parquet(path: Path) -> bool:
    try:
        pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError):
        return False
    return True


def _is_entry(path: Path) -> bool:
    try:
        lines = path.read_bytes().splitlines()
        return bool(lines) and all(isinstance(json.loads(line), dict) for line in lines)
    except ValueError:
        return False
