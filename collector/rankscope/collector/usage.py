"""What a run takes on the disk, and which steps, processes and kinds of records hold tensors."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from .blobs.store import BlobReader
from .query import Run

_HELD = """
with held as (
  select r.step, r.rank, coalesce(p.folder, p.process, r.process) as folder, r.kind, r.digest,
    b.bytes
  from records r join stored b using (digest) left join processes p using (process)
), owners as (
  select digest, count(distinct {by}) as owners from held group by digest
), distinct_held as (select distinct {by}, digest, bytes from held)
select {by}, logical.tensors, logical.bytes as logical, d.stored, d.alone
from (select {by}, count(*) as tensors, sum(bytes)::bigint as bytes from held group by {by}) logical
join (
  select {by}, sum(bytes)::bigint as stored,
    coalesce(sum(bytes) filter (owners = 1), 0)::bigint as alone
  from distinct_held join owners using (digest) group by {by}
) d using ({by}) order by {by}
"""

_UNREFERENCED = """
select coalesce(sum(bytes), 0)::bigint as bytes from stored
where digest not in (select digest from all_records where digest is not null)
"""


@dataclass(frozen=True)
class Usage:
    """Bytes. `groups` has a list for each of step, folder and kind, each row with `tensors`
    (how many), `logical` (were each stored by itself), `stored` (equal ones once) and `alone`
    (what only this row holds: freed when it goes).
    """

    tables: int
    documents: int
    tensors: int
    unreferenced: int
    spool: int
    groups: dict[str, list[dict[str, Any]]]

    @property
    def total(self) -> int:
        return self.tables + self.documents + self.tensors + self.spool


def usage(run: Run) -> Usage:
    """Measure a run, also while it is recorded."""
    sizes = BlobReader(run.store).sizes()
    digests = [digest.hex() for digest in sizes]
    stored = pa.table({"digest": digests, "bytes": pa.array(sizes.values(), pa.int64())})
    with run.connection() as connection:
        connection.register("stored", stored)
        groups = {
            by: connection.sql(_HELD.format(by=by)).to_arrow_table().to_pylist()
            for by in ("step", "folder", "kind")
        }
        free = connection.sql(_UNREFERENCED).to_arrow_table()["bytes"][0].as_py()
    blobs = _inodes([run.store / "blobs"])
    return Usage(
        tables=sum(_inodes([run.store / "tables"]).values()),
        documents=sum(n for key, n in _inodes([run.path]).items() if key not in blobs),
        tensors=sum(blobs.values()),
        unreferenced=free,
        spool=sum(_inodes([run.store / "spool"]).values()),
        groups=groups,
    )


def _inodes(folders: Iterable[Path]) -> dict[tuple[int, int], int]:
    """Bytes on the disk by file, each counted once however many names it has."""
    found = {}
    for folder in folders:
        for at, _, names in os.walk(folder):
            for name in names:
                try:
                    seen = os.lstat(os.path.join(at, name))
                except FileNotFoundError:
                    continue
                found[seen.st_dev, seen.st_ino] = seen.st_blocks * 512
    return found
