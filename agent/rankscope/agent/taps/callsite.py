"""How a Python function of torch was called: which arguments by position, which by name, which left
out.

F.relu hands its override all parameters by name, whatever the caller wrote; a record shows what was
written. The caller's frame stands at its call instruction, which says how many arguments were
positional and which names were given. Where it doesn't (`f(*args)`, a call from C), arguments equal
to their defaults are taken as left out.
"""

from __future__ import annotations

import dis
import inspect
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

_POSITIONAL_CALLS = frozenset(("CALL", "CALL_FUNCTION", "CALL_METHOD"))
_KEYWORD_CALLS = frozenset(("CALL_KW", "CALL_FUNCTION_KW"))
_MISSING = object()

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class CallShape:
    """Of one call instruction; the object of a method call is not counted."""

    positional: int
    keywords: tuple[str, ...]


@dataclass(frozen=True)
class _Signature:
    names: tuple[str, ...]
    positional: int
    defaults: dict[str, Any]
    is_forwarder: bool  # def f(*args, **kwargs)


_shapes: dict[tuple[CodeType, int], CallShape | None] = {}
_signatures: dict[FunctionType, _Signature] = {}


def own_frame(function: FunctionType, start: FrameType | None) -> FrameType | None:
    """The frame in which `function` itself runs, at most three callers up from `start`."""
    code = function.__code__
    for _ in range(4):
        if start is None:
            return None
        if start.f_code is code:
            return start
        start = start.f_back
    return None


def written_arguments(
    function: FunctionType, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """The call's arguments as the caller of `frame` wrote them; `args` and `kwargs` are what the
    override got.
    """
    signature = _signatures.get(function) or _read_signature(function)
    if signature.is_forwarder:
        names = frame.f_code.co_varnames
        return frame.f_locals[names[0]], frame.f_locals[names[1]]
    values = dict(zip(signature.names, args, strict=False))
    values.update(kwargs)
    if len(values) < len(args) + len(kwargs):
        return args, kwargs
    caller = frame.f_back
    shape = call_shape(caller.f_code, caller.f_lasti) if caller is not None else None
    for positional in (shape.positional, shape.positional + 1) if shape is not None else ():
        assert shape is not None
        written = _match(signature, values, positional, shape.keywords)
        if written is not None:
            return written
    return _without_defaults(signature, args, kwargs)


def _match(
    signature: _Signature, values: dict[str, Any], positional: int, keywords: tuple[str, ...]
) -> Arguments | None:
    """The arguments in this form, when every parameter it leaves out has its default."""
    if positional > signature.positional:
        return None
    names = signature.names
    given = set(names[:positional]).union(keywords)
    if len(given) != positional + len(keywords) or not given <= values.keys():
        return None
    for name, value in values.items():
        if name not in given and not _is_default(value, signature.defaults.get(name, _MISSING)):
            return None
    return tuple(values[n] for n in names[:positional]), {n: values[n] for n in keywords}


def _without_defaults(
    signature: _Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    defaults = signature.defaults
    kept = {
        name: value
        for name, value in kwargs.items()
        if not _is_default(value, defaults.get(name, _MISSING))
    }
    return args, kept


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) in (int, float, bool, str) and value == default)


def call_shape(code: CodeType, instruction: int) -> CallShape | None:
    """Shape of the call at or before byte offset `instruction`; None when it is not a plain
    call.
    """
    key = (code, instruction)
    if key not in _shapes:
        _shapes[key] = _read_shape(code, instruction)
    return _shapes[key]


def _read_shape(code: CodeType, instruction: int) -> CallShape | None:
    before = [i for i in dis.get_instructions(code) if i.offset <= instruction]
    before = [i for i in before if i.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG")][-2:]
    if not before:
        return None
    previous, call = before[0], before[-1]
    count = call.arg or 0
    if call.opname in _KEYWORD_CALLS:
        names = previous.argval
        if previous.opname != "LOAD_CONST" or not isinstance(names, tuple):
            return None
        return CallShape(count - len(names), names)
    if call.opname not in _POSITIONAL_CALLS:
        return None
    if previous.opname == "KW_NAMES":
        names = code.co_consts[previous.arg or 0]
        return CallShape(count - len(names), names)
    return CallShape(count, ())


def _read_signature(function: FunctionType) -> _Signature:
    code = function.__code__
    positional, total = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[:total]
    defaults = dict(
        zip(reversed(names[:positional]), reversed(function.__defaults__ or ()), strict=False)
    )
    defaults.update(function.__kwdefaults__ or {})
    forwards = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    is_forwarder = not total and code.co_flags & forwards == forwards
    signature = _signatures[function] = _Signature(names, positional, defaults, is_forwarder)
    return signature
