"""token_range of start(): recording follows the number of the model's calls."""

from __future__ import annotations

from typing import Any

from torch import nn

from rankscope.agent.errors import UsageError
from rankscope.agent.session import Session


def check_token_range(model: Any, token_range: Any) -> None:
    """Raises UsageError unless it is two ints, 0 <= first <= last, with a model to count."""
    if model is None:
        raise UsageError("start(token_range=...) needs the model whose calls are counted")
    numbers = list(token_range) if isinstance(token_range, list | tuple) else []
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
    if len(numbers) != 2 or not whole or not 0 <= numbers[0] <= numbers[1]:
        raise UsageError(
            f"start(token_range={token_range!r}): must be [first, last] with 0 <= first <= last"
        )


class TokenRange:
    """Counts the root model's calls from 0. Recording is on from call `first` up to the start of
    the call after `last`, and before call 0 begins.
    """

    def __init__(self, session: Session, model: Any, first: int, last: int) -> None:
        self._session, self._first, self._last = session, first, last
        self._calls = 0
        root: nn.Module = model[0] if isinstance(model, list | tuple) else model
        self._handle = root.register_forward_pre_hook(self._count)

    def remove(self) -> None:
        self._handle.remove()

    def _count(self, *_: Any) -> None:
        self._session.run(self._first <= self._calls <= self._last)
        self._calls += 1
