"""Python functions of torch made transparent: their own body, without the question whether somebody
overrides them.

Calling such a function again from a mode's handler would ask that question and land in the handler
again. So a copy of its code object is called in which the names `has_torch_function*` are replaced
by one that always answers False; globals, defaults and closure are the function's own. The new name
is looked up in `builtins` (or, where the code says `torch.overrides.has_torch_function`, there), so
no module of torch changes.
"""

from __future__ import annotations

import builtins
from types import FunctionType
from typing import Any

import torch.overrides

_NEVER = "_rankscope_no_override"
_bodies: dict[FunctionType, FunctionType | None] = {}


def install() -> None:
    """Make the replaced name known. It stays: a body may still be running when recording stops."""
    for owner in (builtins, torch.overrides):
        if not hasattr(owner, _NEVER):
            setattr(owner, _NEVER, _no_override)


def open_body(function: FunctionType) -> FunctionType | None:
    """The transparent copy, or None when the function does not ask for overrides itself."""
    if function not in _bodies:
        _bodies[function] = _copy(function)
    return _bodies[function]


def _no_override(*_: Any) -> bool:
    return False


def _copy(function: FunctionType) -> FunctionType | None:
    inner = getattr(function, "__wrapped__", None)
    if isinstance(inner, FunctionType):  # the question is asked by a decorator
        return _copy(inner) or inner
    code = function.__code__
    names = tuple(_NEVER if n.startswith("has_torch_function") else n for n in code.co_names)
    if names == code.co_names:
        return None
    copy = FunctionType(
        code.replace(co_names=names),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
