"""The border of a compiled region as a record, `Compiled.{function}.{n}`: what went in, what came
out, the gradients on both sides. What runs inside is not seen, which is said once a region.
"""

from __future__ import annotations

import inspect
import re
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from rankscope.agent import recorder as rec
from rankscope.agent.apis import Api
from rankscope.agent.log import log
from rankscope.agent.session import Session
from rankscope.agent.taps.api_backward import watch_backward
from rankscope.agent.taps.functions import as_output

# The frame that enters a region, and what it calls the function and its arguments.
_WRAPPER = "compile_wrapper"
_VARIABLES = ("fn", "args", "kwargs")


class OpenRegion(NamedTuple):
    """A region that was entered, with the arguments it was given."""

    api: Api
    forward: int
    backward: int
    stack: int
    kept: bool
    args: Any
    kwargs: Any


class Border:
    """Writes the records; Dynamo is off on the thread while it does."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._apis: dict[str, Api] = {}

    def enter(self, frame: FrameType | None) -> OpenRegion | None:
        """The outermost region on this thread is about to run, called by `frame`; None where it is
        no record.
        """
        session = self._session
        if frame is None or frame.f_code.co_name != _WRAPPER:
            return None
        if not session.watching or session.local.api_open:
            return None
        try:
            with torch._C.DisableTorchFunction():
                return self._begin(frame)
        except Exception as error:
            session.fault("the input of a compiled region", error)
            return None

    def leave(self, region: OpenRegion, frame: FrameType | None) -> None:
        """It has run; a region that raised has no output."""
        session = self._session
        found = frame.f_locals if frame is not None else {}
        if not session.watching or "result" not in found:
            return
        try:
            with torch._C.DisableTorchFunction():
                self._end(region, found["result"])
        except Exception as error:
            session.fault("the output of a compiled region", error)

    def _begin(self, frame: FrameType) -> OpenRegion:
        session = self._session
        function, args, kwargs = (frame.f_locals[name] for name in _VARIABLES)
        api = self._api(_name(function))
        forward, backward = session.api_names(api.stem)
        kept = session.keeps(forward)
        stack = session.stack(frame.f_back) if kept else 0
        if kept and session.keeps_input:
            parts = (("input_args", args), ("input_kwargs", kwargs))
            session.event(forward, rec.INPUT, rec.API, rec.FORWARD, session.parent(), stack, parts)
        return OpenRegion(api, forward, backward, stack, kept, args, kwargs)

    def _end(self, region: OpenRegion, result: Any) -> None:
        session = self._session
        parent = session.parent()
        kept = region.kept and session.keeps_output
        if kept:
            parts = (("output", as_output(result)),)
            session.event(
                region.forward, rec.OUTPUT, rec.API, rec.FORWARD, parent, region.stack, parts
            )
        if torch.is_grad_enabled():
            args, kwargs = region.args, region.kwargs
            watch_backward(session, region.api, True, region.backward, parent, args, kwargs, result)
        session.complete_api(region.forward, rec.FORWARD, parent, region.stack, kept)

    def _api(self, name: str) -> Api:
        api = self._apis.get(name)
        if api is None:
            api = self._apis[name] = Api("Compiled", name)
            log(
                "info",
                f"{api.stem}: torch.compile runs it, so its inputs, outputs and gradients are "
                "recorded and nothing inside it",
            )
        return api


def _name(function: Any) -> str:
    """A word for a compiled function, or the class of a compiled module."""
    # A compiled module is called through a function of Dynamo's that holds it or its method.
    wrapped = inspect.unwrap(function)
    for found in (wrapped, getattr(wrapped, "__self__", None)):
        if isinstance(found, nn.Module):
            return type(found).__name__
    name = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"\W", "", name) or "function"
