"""Reading live data files while others may replace them."""

from collections.abc import Callable, Collection
from typing import TypeVar

import pyarrow as pa

from rankscope.collector.store.errors import StoreDamaged, StoreGone
from rankscope.collector.store.files import read_file
from rankscope.collector.store.tables import Table

_Result = TypeVar("_Result")


def read_live(table: Table, name: str, columns: Collection[str] | None = None) -> pa.Table:
    """The rows of a file; FileNotFoundError when it was replaced, StoreDamaged when unreadable."""
    try:
        return read_file(table.root, name, table.schema, columns)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise StoreDamaged(f"{table.root / name}: {error}") from error


def retry_once(read: Callable[[], _Result]) -> _Result:
    """Calls again when files vanished: another collector replaced them and their grace is over."""
    try:
        return read()
    except FileNotFoundError:
        pass
    try:
        return read()
    except FileNotFoundError as error:
        raise StoreGone(f"a data file is missing: {error}") from error
