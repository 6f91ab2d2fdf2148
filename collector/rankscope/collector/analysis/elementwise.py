"""Comparing whole tensors element by element, over several processes.

The figures are those of msProbe's table: NaN and infinities that both sides have at a place count
as equal there; where the golden element is 0, the machine epsilon is added to both.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from ..blobs.store import BlobReader
from .sides import Side
from .tensors import Unreadable, read_pt

#: Fewer pairs than this are not worth other processes.
_FEW = 400
_BATCH = 64


class Errors(NamedTuple):
    """Of a pair of tensors; NaN where a figure has no meaning. `why` says why there are none."""

    cosine: float
    distance: float
    max_absolute: float
    max_relative: float
    within_thousandth: float
    within_5_thousandths: float
    largest: float  # largest absolute element of either side
    why: str = ""


EQUAL = Errors(1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0)


def errors(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Errors:
    """Compare A with B, which is the golden one."""
    if a.shape != b.shape:
        return _none("shape unmatched")
    if np.iscomplexobj(a) != np.iscomplexobj(b):
        return _none("complex and real")
    x, y = _computed(a), _computed(b)
    bad_x, bad_y = ~np.isfinite(x), ~np.isfinite(y)
    if bad_x.any() or bad_y.any():
        same = (bad_x == bad_y) & ((x == y) | (np.isnan(x) & np.isnan(y)) | ~bad_x)
        if not same.all():
            return _none("NaN or infinity on one side")
        x, y = np.where(bad_x, 0, x), np.where(bad_y, 0, y)
    if not x.size:
        return EQUAL
    difference = np.abs(x - y)
    epsilon = np.finfo(y.dtype).eps
    zero = y == 0
    relative = np.abs(np.where(zero, x + epsilon - epsilon, x - y) / np.where(zero, epsilon, y))
    largest = float(max(np.abs(x).max(), np.abs(y).max()))
    max_absolute, max_relative = float(difference.max()), float(relative.max())
    if x.size == 1:
        nan = float("nan")
        return Errors(nan, nan, max_absolute, max_relative, nan, nan, largest, "unsupported")
    return Errors(
        _cosine(x, y),
        float(np.sqrt(np.sum(np.abs(difference.astype(np.float64)) ** 2))),
        max_absolute,
        max_relative,
        float(np.mean(relative < 0.001)),
        float(np.mean(relative < 0.005)),
        largest,
    )


def _computed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """In the type that is computed in: float32 for 16 bits and less, float64 for whole numbers."""
    flat = np.ascontiguousarray(array).ravel()
    if flat.dtype == np.float16:
        return flat.astype(np.float32)
    return flat if flat.dtype.kind in "fc" else flat.astype(np.float64)


def _cosine(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> float:
    x, y = (v.astype(np.complex128 if v.dtype.kind == "c" else np.float64) for v in (x, y))
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    if norms == 0:
        return 1.0 if not x.any() and not y.any() else float("nan")
    return float(np.real(np.vdot(y, x)) / norms)


def _none(why: str) -> Errors:
    nan = float("nan")
    return Errors(nan, nan, nan, nan, nan, nan, nan, why)


# ---------------------------------------------------------------------------- many pairs of files


class Source(NamedTuple):
    """Where a tensor may stand: a file of the layout, and by digest in a store."""

    file: str
    digest: str | None
    store: str | None


def sources(side: Side, rows: Sequence[int]) -> list[Source]:
    """Of rows of a side's table."""
    columns = side.table.select(["step", "place", "data_name", "digest"]).take(list(rows))
    store = None if side.store is None else str(side.store)
    return [
        Source(str(side.tensor_file(step, place, name)), digest, store)
        for step, place, name, digest in zip(
            *(column.to_pylist() for column in columns.columns), strict=True
        )
    ]


def compare_tensors(
    a: Side, b: Side, pairs: Iterable[tuple[int, int]], progress: Progress | None = None
) -> dict[tuple[int, int], Errors]:
    """Errors of each pair of rows, of which both sides captured the tensor."""
    wanted = list(pairs)
    both = list(
        zip(sources(a, [x for x, _ in wanted]), sources(b, [y for _, y in wanted]), strict=True)
    )
    found: list[Errors] = []
    task = progress.add_task("tensors", total=len(both)) if progress else None
    batches = [both[i : i + _BATCH] for i in range(0, len(both), _BATCH)]
    for done in _results(batches, len(both)):
        found.extend(done)
        if progress and task is not None:
            progress.update(task, advance=len(done))
    return dict(zip(wanted, found, strict=True))


def _results(
    batches: Sequence[Sequence[tuple[Source, Source]]], total: int
) -> Iterable[list[Errors]]:
    workers = min(os.cpu_count() or 1, len(batches))
    if total < _FEW or workers < 2:
        yield from map(_batch, batches)
        return
    # Threads of Arrow and DuckDB do not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_batch, batches)


def _batch(pairs: Sequence[tuple[Source, Source]]) -> list[Errors]:
    readers: dict[str, BlobReader] = {}
    return [_pair(one, other, readers) for one, other in pairs]


def _pair(one: Source, other: Source, readers: dict[str, BlobReader]) -> Errors:
    if one.digest is not None and one.digest == other.digest:
        return EQUAL
    try:
        return errors(_read(one, readers), _read(other, readers))
    except (Unreadable, KeyError, OSError) as error:
        return _none(f"not read: {error}")


def _read(source: Source, readers: Mapping[str, BlobReader] | dict[str, BlobReader]) -> Any:
    if source.digest is not None and source.store is not None:
        if source.store not in readers:
            readers[source.store] = BlobReader(Path(source.store))  # type: ignore[index]
        reader, digest = readers[source.store], bytes.fromhex(source.digest)
        if (large := reader.path(digest)).exists():
            return read_pt(large)
        try:
            return read_pt(reader.container(digest))
        except KeyError:
            pass  # the layout may still have it
    return read_pt(Path(source.file))
