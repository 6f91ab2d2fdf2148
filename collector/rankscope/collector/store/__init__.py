"""The tables of a run on disk: Delta Lake whose Parquet files we write and make durable ourselves.

`RunStore` writes and reads, `open_readonly` gives a reader beside running collectors.
"""

from rankscope.collector.store.errors import (
    StoreDamaged,
    StoreError,
    StoreGone,
    StoreUnavailable,
)
from rankscope.collector.store.reader import RunReader, open_readonly, side_path, tables_path
from rankscope.collector.store.store import RunStore

__all__ = [
    "RunReader",
    "RunStore",
    "StoreDamaged",
    "StoreError",
    "StoreGone",
    "StoreUnavailable",
    "open_readonly",
    "side_path",
    "tables_path",
]
