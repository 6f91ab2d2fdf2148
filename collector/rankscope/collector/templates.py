"""The leaf templates of all outlines of a batch, ready to be gathered into leaf columns."""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope.collector.columns import Rows, Texts
from rankscope.collector.outlines import TEMPLATES, ParsedOutline

_REMEMBERED_LEAVES = 10_000
_TEXTS = ("part", "path", "type", "dtype", "extra")


class Templates:
    """Leaf templates of several outlines, one after another. Outlines are counted from 1."""

    def __init__(self, outlines: tuple[ParsedOutline, ...]) -> None:
        table = pa.RecordBatch.from_pylist([], schema=TEMPLATES)
        if outlines:
            table = pa.concat_batches([outline.templates for outline in outlines])
        self.structures = Texts([outline.structure for outline in outlines])
        self.suffixes = table["file_suffix"]
        self._texts = {name: Texts(table[name].to_pylist()) for name in _TEXTS}
        self._arrays = {name: table[name] for name in ("shape", "requires_grad")}
        self._elements: Rows = table["elements"].fill_null(0).to_numpy()
        counts = pc.fill_null(pc.list_value_length(table["shape"]), 0)
        self.dimensions: Rows = counts.to_numpy(zero_copy_only=False).astype(np.int64)
        nothing = np.zeros(0, np.uint8)
        self._forms = np.concatenate([nothing, *(outline.forms for outline in outlines)])
        sizes = np.array([0, *(outline.leaves for outline in outlines)], np.int64)
        self.leaves: Rows = sizes  # of each outline, 0 for outline 0
        self.first: Rows = np.cumsum(sizes) - sizes  # position of each outline's first template

    def forms(self, positions: Rows) -> npt.NDArray[np.uint8]:
        return self._forms[positions]

    def elements(self, positions: Rows) -> Rows:
        """Elements of each tensor, 0 for other leaves."""
        return self._elements[positions]

    def arrow_columns(self, positions: Rows) -> dict[str, pa.Array]:
        """The columns of RECORDS that come straight from templates."""
        columns: dict[str, Any] = {
            name: texts.take(positions) for name, texts in self._texts.items()
        }
        rows = pa.array(positions)
        return columns | {name: array.take(rows) for name, array in self._arrays.items()}


def templates_of(outlines: tuple[ParsedOutline, ...]) -> Templates:
    """The templates of these outlines, remembered when they are not many.

    Training repeats itself, and so do the outlines of a batch, which are the same objects then.
    """
    if sum(outline.leaves for outline in outlines) > _REMEMBERED_LEAVES:
        return Templates(outlines)
    return _remembered(outlines)


_remembered = lru_cache(maxsize=64)(Templates)
