"""Calls of torch functions, seen by a TorchFunctionMode at the bottom of the mode stack.

A watched function becomes a record, and what it calls is hidden: torch takes the mode off the stack
while its handler runs. An unwatched C function passes straight through. An unwatched *Python*
function is transparent, as if it were not there: a copy of its body, in which the question "is
there an override?" answers no, runs with the mode on again.

Operators arrive under the name of the method they end in (`x + 1` and `x.add(1)` are both
Tensor.add); the shims of `operators` leave the name that was written.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from rankscope.agent import recorder as rec
from rankscope.agent.apis import Api
from rankscope.agent.ignore import Ignored
from rankscope.agent.session import Session
from rankscope.agent.taps import kernel_choice, mode_stack, openbody, operators
from rankscope.agent.taps.api_backward import watch_backward
from rankscope.agent.taps.callsite import Arguments, own_frame, written_arguments

#: What torch's way into the mode and back takes, which no clock of ours sees.
DISPATCH_SECONDS = 2e-6

_clock = time.perf_counter
_tracing = torch._C._get_tracing_state
_graph_task = torch._C._current_graph_task_id


class FunctionTap(TorchFunctionMode):
    """Records the calls of watched functions on every thread it is pushed on."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._local = session.local
        self._apis = session.apis.functions()
        self._namespaces = session.namespaces
        self._by_operator = operators.apis(session.apis)
        self._call = ApiCall(session)
        self._shims = operators.Shims(session, self._by_operator)

    def start(self) -> None:
        """Watch this thread, and operators on all threads."""
        openbody.install()
        kernel_choice.install(self)
        self._shims.install()
        self.enter_thread()

    def stop(self) -> None:
        self.leave_thread()
        self._shims.remove()
        kernel_choice.remove(self)

    def enter_thread(self) -> None:
        # While the handler runs the mode is off the stack, and torch puts it back afterwards.
        if not self._local.api_open:
            mode_stack.insert_at_bottom(self)
        self._local.has_mode = True

    def leave_thread(self) -> bool:
        """False when the mode was not on this thread's stack."""
        self._local.has_mode = False
        return mode_stack.remove(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        local = self._local
        written, local.dunder = local.dunder, None
        if not self._session.watching or local.api_open or _tracing() is not None:
            return func(*args, **kwargs)
        api = self._apis.get(func) if written is None else self._by_operator.get(written)
        if api is not None:
            frame = sys._getframe(1)
            if type(func) is FunctionType:
                own = own_frame(func, frame)
                if own is not None and own.f_back is not None:
                    return self._call(
                        api,
                        func,
                        args,
                        kwargs,
                        own.f_back,
                        written_arguments(func, own, args, kwargs),
                    )
            return self._call(api, func, args, kwargs, frame, (args, kwargs))
        if type(func) is FunctionType:
            body = openbody.open_body(func)
            if body is not None and not any(map(_overrides, types)):
                return self._transparent(body, args, kwargs)
        elif self._namespaces and isinstance(func, OpOverload | OpOverloadPacket):
            api = self._operator(func)
            if api is not None:
                return self._call(api, func, args, kwargs, sys._getframe(1), (args, kwargs))
        return func(*args, **kwargs)

    def _operator(self, func: Any) -> Api | None:
        """The Api of an operator of a watched namespace of torch.ops."""
        packet = func.overloadpacket if isinstance(func, OpOverload) else func
        namespace, _, name = packet._qualified_op_name.partition("::")
        prefix = self._namespaces.get(namespace)
        if prefix is not None:
            self._apis[func] = Api(prefix, name)
        return self._apis.get(func)

    def _transparent(
        self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        mode_stack.insert_at_bottom(self)
        try:
            return body(*args, **kwargs)
        finally:
            mode_stack.remove(self)


class ApiCall:
    """One call of a watched function: inputs before, the call itself, outputs after, the backward
    hook.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder = session.recorder

    def __call__(
        self,
        api: Api,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        written: Arguments,
    ) -> Any:
        """`frame` is the caller's, `written` are the arguments as it wrote them."""
        session = self._session
        began = _clock()
        try:
            if _graph_task() >= 0:
                session.enter_forward()
            forward, backward = session.api_names(api.stem)
            shown = session.shown(api)
            kept = shown is not None and session.keeps(forward)
            stack = session.stack(frame) if kept else 0
            if kept and shown is not None and session.keeps_input:
                inputs = shown.hide_inputs(*written)
                parts = (("input_args", inputs[0]), ("input_kwargs", inputs[1]))
                session.event(
                    forward, rec.INPUT, rec.API, rec.FORWARD, session.parent(), stack, parts
                )
        except Exception as error:
            session.fault(f"the input of {api.stem}", error)
            return func(*args, **kwargs)
        local = session.local
        local.api_open = True
        session.agent_seconds += _clock() - began
        try:
            output = func(*args, **kwargs)
        finally:
            local.api_open = False
        began = _clock()
        try:
            self._after(api, forward, backward, shown, kept, stack, written, output)
        except Exception as error:
            session.fault(f"the output of {api.stem}", error)
        session.agent_seconds += _clock() - began + DISPATCH_SECONDS
        return output

    def _after(
        self,
        api: Api,
        forward: int,
        backward: int,
        shown: Ignored | None,
        kept: bool,
        stack: int,
        written: Arguments,
        output: Any,
    ) -> None:
        session = self._session
        parent = session.parent()
        kept = kept and session.keeps_output
        if kept and shown is not None:
            result = as_output(output)
            parts = (("output", shown.hide_outputs(result)),)
            session.event(forward, rec.OUTPUT, rec.API, rec.FORWARD, parent, stack, parts)
        if torch.is_grad_enabled():
            watch_backward(session, api, shown is not None, backward, parent, *written, output)
        session.complete_api(forward, rec.FORWARD, parent, stack, kept)


@functools.cache
def _overrides(kind: type) -> bool:
    """Whether a tensor class of the user's answers for torch functions itself."""
    own = getattr(getattr(kind, "__torch_function__", None), "__func__", None)
    return own is not None and own is not torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def as_output(output: Any) -> Any:
    """The value of a record's `output` field: a tuple as it is, anything else in a one-element
    list.
    """
    return output if isinstance(output, tuple) else [output]
