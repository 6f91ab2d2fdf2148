"""Shims on the operators of torch.Tensor, so that `x + 1`, `1 + x` and `x.add(1)` can be told
apart.

An operator looks its method up in a slot of the type, so a shim changes no dispatch: it leaves the
written name in the thread's state, calls the original and clears the name. The original reaches the
function tap as Tensor.add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rankscope.agent.apis import Api, ApiTable
from rankscope.agent.session import Session

#: Operators that arrive under another name. Those the table of APIs does not list are left
#: unrecorded, as by msProbe.
_RENAMED = (
    "__add__ __radd__ __iadd__ __sub__ __isub__ __mul__ __rmul__ __imul__ __div__ __idiv__ "
    "__truediv__ __itruediv__ __ifloordiv__ __mod__ __imod__ __matmul__ __ge__ __gt__ __le__ "
    "__lt__ __ne__ __ror__ __rxor__ __rand__ __neg__ __abs__ __nonzero__"
).split()

# `2 / x` calls __rtruediv__, which is the same object as the listed __rdiv__; its body is what gets
# recorded.
_TRANSPARENT = "__rtruediv__"


def apis(table: ApiTable) -> dict[str, Api]:
    """Operator name -> Api, for the renamed operators that the table lists."""
    listed = {api.name: api for _, api in table.resolve("Tensor")}
    return {name: listed[name] for name in _RENAMED if name in listed}


class Shims:
    """The shims of one function tap; `install` and `remove` may be called repeatedly."""

    def __init__(self, session: Session, by_operator: Mapping[str, Api]) -> None:
        self._session = session
        self._installed: dict[str, Any] = {}
        self._shims = {
            name: self._shim(name, getattr(torch.Tensor, name))
            for name in _RENAMED
            if hasattr(torch.Tensor, name)
        }
        open_division = getattr(torch.Tensor.__rtruediv__, "__wrapped__", None)
        if open_division is not None:
            self._shims[_TRANSPARENT] = open_division

    def install(self) -> None:
        for name, shim in self._shims.items():
            if name not in self._installed:
                self._installed[name] = torch.Tensor.__dict__.get(name)
                setattr(torch.Tensor, name, shim)

    def remove(self) -> None:
        """Put back what was there; a shim that somebody has replaced in the meantime stays
        replaced.
        """
        for name, original in self._installed.items():
            if torch.Tensor.__dict__.get(name) is not self._shims[name]:
                continue
            if original is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)
        self._installed.clear()

    def _shim(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        local, session = self._session.local, self._session

        def shim(*args: Any, **kwargs: Any) -> Any:
            if local.api_open or not session.watching:
                return original(*args, **kwargs)
            local.dunder = name
            try:
                return original(*args, **kwargs)
            finally:
                local.dunder = None

        shim.__name__ = shim.__qualname__ = name
        return shim
