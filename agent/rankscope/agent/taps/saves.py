"""debugger.save(): single values and, when they arrive, their gradients.

`{name}.{n}.debug` holds the value, `{name}_grad.{n}.debug` the same shape with null for every leaf;
each gradient that arrives adds itself there. No gradient is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rankscope.agent import recorder as rec
from rankscope.agent.session import Session

_LEAVES = (torch.Tensor, int, float, str)


def is_savable(value: Any) -> bool:
    """Whether it is a tensor, int, float or str, or lists, tuples and dicts with string keys of
    these.
    """
    if isinstance(value, list | tuple):
        return all(map(is_savable, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(is_savable, value.values()))
    return isinstance(value, _LEAVES)


class Saves:
    """Writes what save() is given, as records of the session's current step."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def save(self, value: Any, name: str, with_gradients: bool) -> None:
        session = self._session
        number = session.next_call(name)
        with torch._C.DisableTorchFunction():
            self._write(f"{name}.{number}.debug", rec.FORWARD, value)
            if with_gradients:
                record = f"{name}_grad.{number}.debug"
                self._write(record, rec.BACKWARD, _only(value, None, None))
                self._await(record, value, lambda leaf: leaf)

    def _await(self, record: str, value: Any, place: Callable[[Any], Any]) -> None:
        """Hook the tensors in `value`; `place` puts a leaf where `value` stands in the whole."""
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                hook = self._hook(record, place, self._session.step)
                value.register_hook(hook)  # type: ignore[no-untyped-call]
            return
        if isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                self._await(record, item, _placing(place, value, key))

    def _hook(
        self, record: str, place: Callable[[Any], Any], step: int
    ) -> Callable[[torch.Tensor], None]:
        session = self._session

        def arrived(gradient: torch.Tensor) -> None:
            if session.step != step or not session.recording_step:
                return
            try:
                with torch._C.DisableTorchFunction():
                    self._write(record, rec.BACKWARD, place(gradient))
            except Exception as error:
                session.fault(f"the gradient of {record}", error)

        return arrived

    def _write(self, record: str, direction: int, value: Any) -> None:
        session = self._session
        name = session.recorder.name_id(record)
        session.event(name, rec.OUTPUT, rec.SAVE, direction, 0, 0, (("value", value),))


def _placing(outer: Callable[[Any], Any], container: Any, key: Any) -> Callable[[Any], Any]:
    nulls = _only(container, None, None)  # a copy of the shape: the tensors are not kept

    def place(leaf: Any) -> Any:
        return outer(_only(nulls, key, leaf))

    return place


def _only(value: Any, key: Any, leaf: Any) -> Any:
    """The shape of `value` with null for every leaf, and `leaf` at `key` of its top level."""
    if isinstance(value, dict):
        return {k: leaf if k == key else _only(item, None, None) for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [leaf if i == key else _only(item, None, None) for i, item in enumerate(value)]
    return None
