"""Removing tensors that no record refers to.

A collector holds a shared lock on the folder as long as it may store: without one, and without a
process that lives, everything goes at once. Beside them only what was not asked for in the last
`UNUSED_SECONDS` goes: a tensor may be stored before the rows that name it, and agents name what
they brought in the last ten minutes without bringing it again.
"""

import fcntl
import os
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rankscope.collector.blobs.packs import Packs
from rankscope.collector.blobs.store import BlobReader

UNUSED_SECONDS = 3600.0


class Freed(NamedTuple):
    """How many tensors and bytes went; `waiting` of them are bytes that may go later."""

    tensors: int
    bytes: int
    waiting: int


def remove_unreferenced(
    side_path: Path, referenced: Collection[bytes], is_live: bool, dry_run: bool = False
) -> Freed:
    """Remove what is not among `referenced`; `is_live`: a process of the run may still capture."""
    root = side_path / "blobs"
    if not root.is_dir():
        return Freed(0, 0, 0)
    with _alone(root) as alone:
        is_quiet = alone and not is_live
        blobs = BlobReader(side_path)
        sizes = blobs.sizes()
        dead = sizes.keys() - set(referenced)
        latest = time.time() - (0.0 if is_quiet else UNUSED_SECONDS)
        going = {d for d in dead if _is_older(blobs.path(d), latest)}
        packs = Packs(root / "packs", f"rm{uuid.uuid4().hex}")
        if is_quiet:
            going |= {d for d in dead if d in packs}
        if not dry_run:
            for digest in going:
                blobs.path(digest).unlink(missing_ok=True)
            if is_quiet:
                packs.rewrite(lambda digest: digest not in dead)
    freed = sum(sizes[digest] for digest in going)
    return Freed(len(going), freed, sum(sizes[digest] for digest in dead) - freed)


def _is_older(path: Path, latest: float) -> bool:
    try:
        return path.stat().st_mtime <= latest
    except FileNotFoundError:
        return False


@contextmanager
def _alone(root: Path) -> Iterator[bool]:
    """Whether no collector has the folder open; none can while the context lasts."""
    fd = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _locks(fd)
    finally:
        os.close(fd)


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
