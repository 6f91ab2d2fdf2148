"""Functions that no torch function mode sees, watched by wrappers in their place: a user's own, and
those of torch_npu and mindspeed.

A user's function is wrapped from `register` to `restore`, so that names bound in between are seen
too; while nothing is recorded the wrapper costs a look at two flags. The functions of libraries are
wrapped between `start` and `stop` only.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from rankscope.agent.apis import Api
from rankscope.agent.errors import UsageError
from rankscope.agent.log import log
from rankscope.agent.session import Session
from rankscope.agent.taps.functions import ApiCall

#: Prefixes of the table whose functions are wrapped, and the library that must have been imported.
LIBRARIES = {"NPU": "torch_npu", "MindSpeed": "mindspeed"}

_tracing = torch._C._get_tracing_state
_compiling = torch.compiler.is_compiling
_MISSING = object()


class Wrappers:
    """Wrappers put in place of attributes of modules and classes, each with what stood there."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._call = ApiCall(session)
        self._placed: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    def put(self, owner: Any, name: str, api: Api) -> None:
        """Wrap `owner.name`; nothing happens where a wrapper of ours stands. Raises AttributeError
        or TypeError when the owner has no such attribute or cannot be changed.
        """
        static = inspect.getattr_static(owner, name)
        placed = self._placed.get((id(owner), name))
        if placed is not None and placed[2] is static:
            return
        wrapper: Any = self._wrap(getattr(owner, name), api)
        if isinstance(static, staticmethod):
            wrapper = staticmethod(wrapper)
        elif isinstance(static, classmethod) or not callable(static):
            raise TypeError(f"{name} is a {type(static).__name__}")
        setattr(owner, name, wrapper)
        self._placed[(id(owner), name)] = (owner, static, wrapper)

    def take_off(self, owner: Any, name: str) -> None:
        """Put back what stood at `owner.name`, unless somebody has replaced our wrapper."""
        placed = self._placed.pop((id(owner), name), None)
        if placed is not None and inspect.getattr_static(owner, name, _MISSING) is placed[2]:
            setattr(owner, name, placed[1])

    def clear(self) -> None:
        for (_, name), (owner, _, _) in list(self._placed.items()):
            self.take_off(owner, name)

    def _wrap(self, function: Callable[..., Any], api: Api) -> Callable[..., Any]:
        session, local, call = self._session, self._session.local, self._call

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not session.watching or local.api_open or _tracing() is not None or _compiling():
                return function(*args, **kwargs)
            return call(api, function, args, kwargs, sys._getframe(1), (args, kwargs))

        return watched


class CustomApis:
    """The functions that a user registered, by calls or by a file of names."""

    def __init__(self, session: Session, listed: Mapping[str, tuple[str, ...]]) -> None:
        self._wrappers = Wrappers(session)
        self._listed = listed  # path of a module -> names of its functions
        self._said: set[str] = set()

    def register(self, owner: Any, name: Any, prefix: Any = None) -> None:
        """Watch `owner.name`; its records begin with `prefix`, by default the module's name."""
        if not isinstance(name, str) or not isinstance(prefix, str | None):
            raise UsageError(
                f"register_custom_api({owner!r}, {name!r}, {prefix!r}): the name must be a string, "
                "the prefix a string or None"
            )
        prefix = prefix or getattr(owner, "__name__", None) or "Custom"
        try:
            self._wrappers.put(owner, name, Api(str(prefix), name))
        except (AttributeError, TypeError) as error:
            raise UsageError(
                f"register_custom_api({prefix}, {name!r}): cannot be watched: {error}; "
                "give a module or class and the name of a function in it"
            ) from error

    def restore(self, owner: Any, name: str) -> None:
        """Watch `owner.name` no longer; what is not watched is left alone."""
        self._wrappers.take_off(owner, name)

    def register_listed(self, imports: bool) -> None:
        """Watch the functions of the file whose modules are there; with `imports`, import the
        others and say what cannot be had.
        """
        for path, names in self._listed.items():
            try:
                module = sys.modules.get(path)
                if module is None and imports:
                    module = importlib.import_module(path)
            except Exception as error:
                self._say(f"custom_wrap_ops: {path} cannot be imported: {error!r}")
                continue
            for name in names if module is not None else ():
                self._register(module, path, name, imports)

    def _register(self, module: ModuleType | None, path: str, name: str, says: bool) -> None:
        try:
            self._wrappers.put(module, name, Api(path, name))
        except (AttributeError, TypeError) as error:
            if says:
                self._say(f"custom_wrap_ops: {path}.{name} cannot be watched: {error}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log("warning", text)

    def clear(self) -> None:
        """Put everything back."""
        self._wrappers.clear()


class LibraryTap:
    """Wraps the listed functions of the libraries that the script has imported."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wrappers = Wrappers(session)

    def start(self) -> None:
        for prefix, library in LIBRARIES.items():
            if library in sys.modules:
                for owner, name, api in self._session.apis.places(prefix):
                    self._wrappers.put(owner, name, api)

    def stop(self) -> None:
        self._wrappers.clear()
