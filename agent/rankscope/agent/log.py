"""Lines for the user: few, prefixed, on standard error, through the standard logging tree."""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("rankscope")


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever sys.stderr is at that moment; a closed one is no error."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        if self.stream is not None and not self.stream.closed:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def log(level: str, text: str) -> None:
    """One line. Goes to the "rankscope" logger; without a handler of the user's, to
    standard error.
    """
    if not _logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("rankscope: %(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False
    _logger.log(getattr(logging, level.upper(), logging.INFO), "%s", text)
