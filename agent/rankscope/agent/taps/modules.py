"""Calls of modules: forward pre-hooks and hooks, and what they await for the backward pass.

The hooks are put on by `start(model)` and taken off by `stop()`. Ours are the last to be
registered, so they see what the user's own hooks made of inputs and outputs.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from rankscope.agent import recorder as rec
from rankscope.agent.session import Session
from rankscope.agent.taps.functions import FunctionTap, as_output
from rankscope.agent.taps.module_backward import Edge, ModuleBackward, Producer, gradient_edges
from rankscope.agent.taps.parameters import ParameterGradients

_clock = time.perf_counter
_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})

Model = nn.Module | list[nn.Module] | tuple[nn.Module, ...]


@dataclass
class _Call:
    """An open module call on one thread."""

    module: nn.Module
    forward: int
    backward: int
    parent: int
    stack: int  # 0 also where the record is not written
    began: tuple[int, int]
    raised_before: BaseException | None
    producers: dict[Node, Producer]  # of all calls inside the outermost one
    edges: list[Edge] = field(default_factory=list)
    brought_mode: bool = False  # this call put the function tap on its thread


class ModuleTap:
    """Records the modules below the models given to `start`."""

    def __init__(self, session: Session, functions: FunctionTap | None = None) -> None:
        self._session = session
        self._functions = functions
        self._backward = ModuleBackward(session)
        self._parameters = ParameterGradients(session)
        self._handles: list[RemovableHandle] = []
        self._hooked: set[tuple[int, type]] = set()
        self._dumped: list[RemovableHandle] = []
        self._dumped_stems: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def start(self, model: Model) -> None:
        """Hook the modules below `model`; those of earlier models stay hooked until `stop`."""
        for root in _roots(model):
            self._hook(root, _RootHooks(self))
        objects = self._session.recorder.objects
        for stem, module in named_modules(model):
            self._hook(module, _Hooks(self, stem))
            if objects is not None:
                objects.name(module)

    def _hook(self, module: nn.Module, hooks: _Hooks) -> None:
        if (key := (id(module), type(hooks))) not in self._hooked:
            self._hooked.add(key)
            self._handles += hooks.register(module)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._parameters.stop()
        # Calls that are open now will not be seen to end.
        self._session.local.frames.clear()
        self._session.local.modules.clear()

    def dump(self, module: nn.Module, name: str) -> bool:
        """Hook one module as `Module.{name}.{Class}` until `end_dump`; a module keeps the name of
        its first time. False when it is hooked as a part of a model.
        """
        if (id(module), _Hooks) in self._hooked:
            return False
        stem = f"Module.{name}.{type(module).__name__}"
        hooks = _DumpHooks(self, self._dumped_stems.setdefault(module, stem))
        self._dumped += hooks.register(module)
        return True

    def end_dump(self) -> None:
        for handle in self._dumped:
            handle.remove()
        self._dumped.clear()

    def end_step(self) -> None:
        """The step is over: passes that are still open write what they have."""
        self._backward.end_step()

    # --------------------------------------------------------------------------------------- hooks

    def enter_root(self, module: nn.Module) -> None:
        """A model is called: it has no record, but it bounds what the calls inside share."""
        self._open(_Call(module, 0, 0, 0, 0, (0, 0), None, {}))

    def leave_root(self, module: nn.Module) -> None:
        self._close(module)

    def _open(self, call: _Call) -> None:
        """Enter a call. A thread that was alive before the start is watched from its outermost call
        to the end of that.
        """
        local = self._session.local
        if self._functions is not None and not local.frames and not local.has_mode:
            self._functions.enter_thread()
            call.brought_mode = True
        local.frames.append(call)

    def before(self, stem: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        session = self._session
        session.enter_forward()
        number = session.next_call(stem)
        forward = session.recorder.name_id(f"{stem}.forward.{number}")
        backward = session.recorder.name_id(f"{stem}.backward.{number}")
        parent = session.parent()
        if session.recorder.objects is not None:
            session.recorder.objects.called(session.step, module, forward, backward)
        kept = session.enters(forward)
        stack = session.stack() if kept else 0
        session.parents[forward] = parent
        frames = session.local.frames
        producers = frames[-1].producers if frames else {}
        began, raised = self._backward.begin(), sys.exc_info()[1]
        call = _Call(module, forward, backward, parent, stack, began, raised, producers)
        self._open(call)
        session.local.modules.append(forward)
        if torch.is_grad_enabled():
            tensors = [*tensors_in(args), *tensors_in(kwargs)]
            call.edges = gradient_edges(t for t in tensors if t.requires_grad)
        if kept and session.keeps_input:
            parts = (("input_args", args), ("input_kwargs", kwargs))
            session.event(forward, rec.INPUT, rec.MODULE, rec.FORWARD, parent, stack, parts)
        session.begin_node(forward, rec.MODULE, rec.FORWARD, parent, stack)
        self._parameters.watch(stem, module)

    def after(self, module: nn.Module, output: Any) -> None:
        session = self._session
        call = self._close(module)
        if call is None:
            return
        kept = session.leaves(call.forward)
        error = sys.exc_info()[1]
        raised = output is None and error is not None and error is not call.raised_before
        # A recomputation that stops early is no failure: the record is complete, with nothing as
        # its output.
        if raised and type(error).__name__ != "_StopRecomputationError":
            session.flush_nodes()
            return
        if kept and session.keeps_output:
            own = module.named_parameters(recurse=False)
            parts = (("output", as_output(output)), ("parameters", dict(own)))
            session.event(
                call.forward, rec.OUTPUT, rec.MODULE, rec.FORWARD, call.parent, call.stack, parts
            )
        if torch.is_grad_enabled():
            outputs = [t for t in tensors_in(output) if t.requires_grad]
            if outputs and self._backward.await_call(
                call.backward, call.parent, call.began, call.edges, outputs, call.producers
            ):
                session.mirrors[call.forward] = call.backward
        session.flush_nodes()

    def _close(self, module: nn.Module) -> _Call | None:
        """The open call of `module`, with every call above it that never came to its end."""
        local = self._session.local
        for index in range(len(local.frames) - 1, -1, -1):
            if local.frames[index].module is module:
                call: _Call = local.frames[index]
                if local.frames[0].brought_mode and self._functions is not None and not index:
                    self._functions.leave_thread()
                del local.frames[index:]
                if call.forward in local.modules:  # a root has no record
                    del local.modules[local.modules.index(call.forward) :]
                return call
        return None


class _Hooks:
    """The two hooks of one module, guarded: a failure of ours never reaches the user's forward.

    When stop() is called from another hook of the same call, torch calls ours without the kwargs.
    """

    def __init__(self, tap: ModuleTap, stem: str) -> None:
        self._tap = tap
        self._stem = stem

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        before = module.register_forward_pre_hook(self.before, with_kwargs=True)
        after = module.register_forward_hook(self.after, with_kwargs=True, always_call=True)
        return [before, after]

    def before(self, module: nn.Module, args: Any, kwargs: Any = _NO_KWARGS) -> None:
        if is_compiling():  # asked first: Dynamo traces this hook, and ends here
            return
        session = self._tap._session
        if session.running and not session.muted:
            self.enter(module, args, kwargs)

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        began = _clock()
        try:
            with torch._C.DisableTorchFunction():
                self._tap.before(self._stem, module, args, kwargs)
        except Exception as error:
            self._tap._session.fault(f"the input of {self._stem}", error)
        self._tap._session.agent_seconds += _clock() - began

    def after(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        if is_compiling() or not self._tap._session.running:
            return
        began = _clock()
        try:
            with torch._C.DisableTorchFunction():
                self._tap.after(module, kwargs_and_output[-1])
        except Exception as error:
            self._tap._session.fault(f"the output of {self._stem}", error)
        self._tap._session.agent_seconds += _clock() - began


class _DumpHooks(_Hooks):
    """The hooks of a module given to module_dump()."""

    def before(self, module: nn.Module, args: Any, kwargs: Any = _NO_KWARGS) -> None:
        if not is_compiling() and self._tap._session.running:
            self.enter(module, args, kwargs)


class _RootHooks(_Hooks):
    """The hooks of a model given to start()."""

    def __init__(self, tap: ModuleTap) -> None:
        super().__init__(tap, "the model")

    def before(self, module: nn.Module, args: Any, kwargs: Any = _NO_KWARGS) -> None:
        if not is_compiling():
            self._tap.enter_root(module)

    def after(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        if not is_compiling():
            self._tap.leave_root(module)


def named_modules(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """(stem, module) of all modules below the model or models: `Module.{name}.{Class}`, with the
    model's position first when a list or tuple was given. FSDP's wrapper class and script modules
    are left out.
    """
    roots = {f"Module.{i}.": root for i, root in enumerate(_roots(model))}
    if isinstance(model, nn.Module):
        roots = {"Module.": model}
    for prefix, root in roots.items():
        for name, module in root.named_modules():
            kind = type(module).__name__
            if name and not isinstance(module, torch.jit.ScriptModule):
                if kind != "FullyShardedDataParallel":
                    yield f"{prefix}{name}.{kind}", module


def _roots(model: Model) -> Sequence[nn.Module]:
    return (model,) if isinstance(model, nn.Module) else model


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, in order; other containers are not
    entered.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
