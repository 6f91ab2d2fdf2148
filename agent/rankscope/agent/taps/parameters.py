"""Gradients of parameters, seen after they were accumulated into `.grad`.

One hook a parameter of a module, put on when that first runs while recording and taken off by
`stop()`; a parameter that two modules share is in the records of both.
The record `Module.{name}.{Class}.parameters_grad.{k}` holds each parameter's running gradient; k
counts the arrivals of the parameter that arrived first in this step.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rankscope.agent import recorder as rec
from rankscope.agent.session import Session

_clock = time.perf_counter


class ParameterGradients:
    """Hooks the parameters of modules that run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hooks: dict[
            tuple[int, str, str], tuple[weakref.ref[torch.Tensor], RemovableHandle]
        ] = {}  # by parameter, module stem and name in it
        self._arrivals: Counter[tuple[str, str]] = Counter()
        self._first: dict[str, str] = {}  # module stem -> the parameter that arrived first
        self._step = -1
        self._wanted = session.keeps_backward

    def watch(self, stem: str, module: nn.Module) -> None:
        """Hook the module's own parameters that want gradients; known ones are left alone. Sharding
        wrappers swap a module's parameters, so the ones that it has now are looked at.
        """
        if not self._wanted:
            return
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or not parameter.is_leaf:
                continue
            key = (id(parameter), stem, name)
            known = self._hooks.get(key)
            if known is None or known[0]() is not parameter:
                hook = _Hook(self, stem, name)
                register = parameter.register_post_accumulate_grad_hook
                handle = register(hook)  # type: ignore[no-untyped-call]
                self._hooks[key] = (weakref.ref(parameter), handle)

    def stop(self) -> None:
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def arrived(self, stem: str, name: str, parameter: torch.Tensor) -> None:
        session = self._session
        if not session.running:
            return
        if self._step != session.step:
            self._step = session.step
            self._arrivals.clear()
            self._first.clear()
        first = self._first.setdefault(stem, name)
        self._arrivals[(stem, name)] += 1
        number = self._arrivals[(stem, first)] - 1
        record = session.recorder.name_id(f"{stem}.parameters_grad.{number}")
        if not session.keeps_gradient(stem, record):
            return
        parts = ((name, [parameter.grad]),)
        session.event(record, rec.OUTPUT, rec.PARAMETERS_GRAD, rec.BACKWARD, 0, 0, parts)


class _Hook:
    def __init__(self, owner: ParameterGradients, stem: str, name: str) -> None:
        self._owner, self._stem, self._name = owner, stem, name

    def __call__(self, parameter: torch.Tensor) -> None:
        began = _clock()
        try:
            with torch._C.DisableTorchFunction():
                self._owner.arrived(self._stem, self._name, parameter)
        except Exception as error:
            self._owner._session.fault(f"the gradient of {self._stem}.{self._name}", error)
        self._owner._session.agent_seconds += _clock() - began
