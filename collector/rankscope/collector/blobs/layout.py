"""The files of `dump_tensor_data`: links to large blobs, .pt files made from the small ones."""

import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rankscope.collector.blobs import safetensors
from rankscope.collector.blobs.store import BlobReader
from rankscope.collector.layout import Layout

log = logging.getLogger(__name__)

FOLDER = "dump_tensor_data"
_MOST_REMEMBERED = 100_000


class TensorFiles:
    """Writes them for one layout; one thread at a time."""

    def __init__(self, blobs: BlobReader, layout: Layout) -> None:
        self._blobs, self._layout = blobs, layout
        self._written: OrderedDict[bytes, Path] = OrderedDict()  # small ones, to link to

    def write(self, step: int, folder: str, records: pa.Table) -> None:
        """Make every file that the rows name; those that stand there already stay.

        Each appears whole. A tensor that is not in the store is left out, which is logged.
        """
        wanted = named(records)
        if not wanted:
            return
        target = self._layout.folder(step, folder) / FOLDER
        if not target.exists() and self._write_new(target, wanted):
            return
        target.mkdir(parents=True, exist_ok=True)
        present = set(os.listdir(target))
        lacking = 0
        for name, digest in wanted.items():
            if name in present and self._stands(target / name, digest):
                continue
            try:
                self._put(digest, target / name)
            except KeyError:
                lacking += 1
        _say_lacking(target, lacking)

    def write_together(self, step: int, folder: str, records: pa.Table) -> bool:
        """Write all tensors that the rows name into one file; False when there are none."""
        wanted = {name.removesuffix(".pt"): digest for name, digest in named(records).items()}
        if not wanted:
            return False
        target = self._layout.folder(step, folder) / "tensors.safetensors"
        left_out: list[str] = []

        def make(path: Path) -> None:
            left_out[:] = safetensors.write(path, self._blobs, wanted)

        self._layout.place(target, make)
        if left_out:
            log.warning(
                "%s: %d tensors are not in it (not stored, or of a type the format lacks): %s",
                *(target, len(left_out), ", ".join(left_out[:5])),
            )
        return True

    def _write_new(self, target: Path, wanted: Mapping[str, bytes]) -> bool:
        """Make a folder aside and move it in place: half the work. False when one came."""
        lacking = 0
        small: dict[bytes, Path] = {}

        def make(aside: Path) -> None:
            nonlocal lacking
            for name, digest in wanted.items():
                try:
                    self._make(digest, aside / name, small)
                except KeyError:
                    lacking += 1

        if not self._layout.place_folder(target, make):
            return False
        for digest, path in small.items():
            self._remember(digest, target / path.name)
        _say_lacking(target, lacking)
        return True

    def _make(self, digest: bytes, path: Path, small: dict[bytes, Path]) -> None:
        """A file where nobody looks yet. `small` are those of this folder that were written."""
        large = self._blobs.path(digest)
        for source in (large, small.get(digest), self._written.get(digest)):
            try:
                if source is not None:
                    return os.link(source, path)
            except OSError:  # no links here, too many of them, or no such file
                continue
        if large.exists():
            shutil.copyfile(large, path)
        else:
            path.write_bytes(self._blobs.container(digest))
            small[digest] = path

    def _remember(self, digest: bytes, path: Path) -> None:
        self._written[digest] = path
        if len(self._written) > _MOST_REMEMBERED:
            self._written.popitem(last=False)

    def _stands(self, path: Path, digest: bytes) -> bool:
        large = self._blobs.path(digest)
        if large.exists():
            seen, blob = path.stat(), large.stat()
            return os.path.samestat(seen, blob) or seen.st_size == blob.st_size
        try:
            return path.read_bytes() == self._blobs.container(digest)
        except KeyError:
            return True

    def _put(self, digest: bytes, target: Path) -> None:
        large = self._blobs.path(digest)
        is_large = large.exists()
        source = large if is_large else self._written.get(digest)
        if source is not None and self._link(source, target):
            return
        if is_large:
            self._layout.place(target, partial(shutil.copyfile, large))
            return
        content = self._blobs.container(digest)
        self._layout.place(target, lambda path: path.write_bytes(content))
        self._remember(digest, target)

    def _link(self, source: Path, target: Path) -> bool:
        try:
            os.link(source, target)
        except FileExistsError:
            self._layout.place(target, partial(os.link, source))
        except OSError:  # no links here, too many of them, or the file is gone
            return False
        return True


def _say_lacking(target: Path, count: int) -> None:
    if count:
        log.error("%s: %d tensors are not in the store", target, count)


def named(records: pa.Table) -> dict[str, bytes]:
    """File name -> digest of the captured tensors; of a name that comes twice the last counts."""
    rows = records.select(["seq", "leaf", "data_name", "digest"])
    rows = rows.filter(pc.is_valid(rows["data_name"]))
    rows = rows.filter(pc.is_valid(rows["digest"]))
    rows = rows.sort_by([("seq", "ascending"), ("leaf", "ascending")])
    names, digests = rows["data_name"].to_pylist(), rows["digest"].to_pylist()
    return {n: bytes.fromhex(d) for n, d in zip(names, digests, strict=True)}
