"""Calls of torch.distributed, watched by wrappers that are there only while recording.

A collective writes into its arguments, so the record's output is the arguments after the call:
positional ones, then the values of keyword arguments. An asynchronous call's output is taken when
its Work's `wait` returns, on the thread that waits and before the caller can touch the buffers.
Buffers that the call is about to fill are null in its input.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rankscope.agent import recorder as rec
from rankscope.agent.apis import Api
from rankscope.agent.ignore import Ignored
from rankscope.agent.session import Session


@dataclass
class _Call:
    """A recorded call whose output is still to come."""

    name: int
    parent: int
    stack: int
    kept: bool
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ignored: Ignored
    works: dict[int, Any] = field(default_factory=dict)


class DistributedTap:
    """Wraps the functions of the table's Distributed prefix, `Work.wait` and the construction of
    `P2POp`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._patched: list[tuple[Any, str, Any, Any]] = []
        self._pending: dict[int, _Call] = {}  # by id of the Work, which the call keeps alive
        self._apis = list(session.apis.resolve("Distributed")) if dist.is_available() else []

    def start(self) -> None:
        if self._patched or not self._apis:
            return
        for function, api in self._apis:
            self._patch(dist, api.name, self._wrap(api, function))
        self._patch(dist.Work, "wait", self._waiting(dist.Work.wait))
        for method in ("__new__", "__init__"):
            self._patch(dist.P2POp, method, _unwrapping(getattr(dist.P2POp, method)))

    def stop(self) -> None:
        """Take the wrappers off; calls that nobody waited for get the output they have now, if they
        are done.
        """
        for call in {id(call): call for call in self._pending.values()}.values():
            if all(_is_done(work) for work in call.works.values()):
                self._output(call)
        self._pending.clear()
        for owner, name, original, replacement in reversed(self._patched):
            if owner.__dict__.get(name) is replacement or isinstance(
                owner.__dict__.get(name), staticmethod
            ):
                setattr(owner, name, original)
        self._patched.clear()

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        original = inspect.getattr_static(owner, name)
        if isinstance(original, staticmethod):
            replacement = staticmethod(replacement)
        setattr(owner, name, replacement)
        self._patched.append((owner, name, original, replacement))

    def _wrap(self, api: Api, function: Callable[..., Any]) -> Callable[..., Any]:
        session, local = self._session, self._session.local
        ignored = session.ignore.of(api).named(function)

        @functools.wraps(function)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if local.api_open or not session.watching:
                return function(*args, **kwargs)
            call = self._input(api, ignored, args, kwargs)
            local.api_open = True
            try:
                result = function(*args, **kwargs)
            finally:
                local.api_open = False
            if call is not None:
                self._returned(call, result)
            return result

        return collective

    # ----------------------------------------------------------------------------------- recording

    def _input(
        self,
        api: Api,
        ignored: Ignored,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Call | None:
        session = self._session
        try:
            with torch._C.DisableTorchFunction():
                name, _ = session.api_names(api.stem)
                parent, kept = session.parent(), session.keeps(name)
                stack = session.stack() if kept else 0
                if kept and session.keeps_input:
                    seen_args, seen_kwargs = ignored.hide_inputs(args, kwargs)
                    parts = (
                        ("input_args", tuple(map(_hide_receives, seen_args))),
                        ("input_kwargs", {k: _hide_receives(v) for k, v in seen_kwargs.items()}),
                    )
                    session.event(name, rec.INPUT, rec.API, rec.FORWARD, parent, stack, parts)
                kept = kept and session.keeps_output
                return _Call(name, parent, stack, kept, session.step, args, kwargs, ignored)
        except Exception as error:
            session.fault(f"the input of {api.stem}", error)
            return None

    def _returned(self, call: _Call, result: Any) -> None:
        works = [work for work in _works(result) if hasattr(type(work), "wait")]
        session = self._session
        if works and session.running:
            call.works = {id(work): work for work in works}
            for key in call.works:
                self._pending[key] = call
        else:
            self._output(call)
        has_output = call.kept and not works
        session.complete_api(call.name, rec.FORWARD, call.parent, call.stack, has_output)

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            call = self._pending.pop(id(work), None)
            if call is not None:
                call.works.pop(id(work), None)
                if not call.works:
                    self._output(call)
            return result

        return wait

    def _output(self, call: _Call) -> None:
        session = self._session
        if not call.kept or session.step != call.step or not session.recording_step:
            return
        try:
            with torch._C.DisableTorchFunction():
                values = [*call.args, *call.kwargs.values()]
                parts = (("output", call.ignored.hide_outputs(values)),)
                session.event(
                    call.name, rec.OUTPUT, rec.API, rec.FORWARD, call.parent, call.stack, parts
                )
        except Exception as error:
            session.fault("the output of a collective", error)


def _hide_receives(value: Any) -> Any:
    """In a batch of point-to-point operations: the buffers of the receiving ones hold
    nothing yet.
    """
    if not isinstance(value, list) or not all(isinstance(x, dist.P2POp) for x in value):
        return value
    from rankscope.agent.encoding import encode

    shown = []
    for operation in value:
        fields = encode(operation)
        assert isinstance(fields, dict)
        if "recv" in fields["op"]:
            fields["tensor"] = None
        shown.append(fields)
    return shown


def _works(result: Any) -> Iterator[Any]:
    for item in result if isinstance(result, list) else [result]:
        if isinstance(item, dist.Work):
            yield item


def _is_done(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False


def _unwrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch compares a P2POp's `op` by identity with isend and irecv, so it must never hold a
    wrapper of ours.
    """

    @functools.wraps(original)
    def method(self: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, getattr(op, "__wrapped__", op), *args, **kwargs)

    return method
