"""The backward record of a watched function: what its autograd node received and gave.

One hook on the node of the first tensor in the output. The record holds what that node saw, so for
a composite function it is the last node only, as with msProbe. Hooks die with the graph and keep no
tensor alive.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from rankscope.agent import recorder as rec
from rankscope.agent.apis import Api
from rankscope.agent.session import Session

_clock = time.perf_counter

Gradients = tuple[torch.Tensor | None, ...]


def watch_backward(
    session: Session,
    api: Api,
    kept: bool,
    name: int,
    forward_parent: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Await the gradient of `output`, when it will have one; grad mode is on. A record that is not
    `kept` only takes its place in the call tree.
    """
    tensor = first_tensor(output)
    if tensor is None:
        return
    with torch._C.DisableTorchFunction():  # a tensor class of the user's is not asked
        node = tensor.grad_fn if tensor.requires_grad else None
    if node is None or (api.is_dropout and _dropout_probability(args, kwargs) == 0):
        return
    step = session.step

    def record(inputs: Gradients, outputs: Gradients) -> None:
        # stop() does not end it, step() does.
        if session.step != step or not session.recording_step:
            return
        began = _clock()
        try:
            with torch._C.DisableTorchFunction():
                session.before_node(node_sequence)
                parent = session.backward_parent(forward_parent)
                parts = session.backward_parts(outputs, inputs) if kept else ()
                if parts and session.keeps(name):
                    session.event(name, rec.OUTPUT, rec.API, rec.BACKWARD, parent, 0, parts)
                else:
                    parts = ()
                session.complete_api(name, rec.BACKWARD, parent, 0, bool(parts))
        except Exception as error:
            session.fault(f"the backward of {api.stem}", error)
        session.agent_seconds += _clock() - began

    node_sequence = node._sequence_nr()
    node.register_hook(record)


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in a value: first element of lists and tuples, first tensor of dicts."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple) and value:
        return first_tensor(value[0])
    if isinstance(value, dict):
        return next((x for x in value.values() if isinstance(x, torch.Tensor)), None)
    return None


def _dropout_probability(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("p", 0.5)
