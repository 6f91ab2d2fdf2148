"""What can go wrong in a store, split by who can act."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError


class StoreError(Exception):
    """The store cannot do what was asked; the message names the file or table and why."""


class StoreUnavailable(StoreError):
    """The disk refused (full, failing): nothing was acknowledged, the call may be repeated."""


class StoreGone(StoreError):
    """The run's tables were deleted, or never were there."""


class StoreDamaged(StoreError):
    """A file of the store is not readable and is named."""


class CommitConflict(StoreError):
    """Another commit came in between: look at the table again, then repeat."""


@contextmanager
def foreign_errors(path: Path) -> Iterator[None]:
    """Maps errors of the system, Arrow and delta-rs about the table or file at `path`."""
    try:
        yield
    except CommitFailedError as error:
        raise CommitConflict(f"{path}: {error}") from error
    except (OSError, DeltaError) as error:
        gone = isinstance(error, FileNotFoundError | TableNotFoundError)
        if gone or not path.parent.exists():
            raise StoreGone(f"{path}: {error}") from error
        raise StoreUnavailable(f"{path}: {error}") from error
    except BaseException as error:
        # delta-rs panics (after a fork, say) arrive as a BaseException without a public name.
        if type(error).__name__ != "PanicException":
            raise
        raise StoreUnavailable(f"{path}: {error}") from error
