"""A torch function mode at the bottom of this thread's mode stack.

A mode's `__exit__` pops whatever is on top, so a mode of ours on top of a user's would be popped in
place of it; at the bottom it is safe whichever ends first, and the user's mode sees a call before
ours does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.overrides import TorchFunctionMode

_length = torch._C._len_torch_function_stack
_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack


def insert_at_bottom(mode: TorchFunctionMode) -> None:
    """Put `mode` below all others; nothing happens when it is there."""
    if not _length():
        _push(mode)
        return
    above = _pop_all()
    if mode not in above:
        _push(mode)
    for other in above:
        _push(other)


def remove(mode: TorchFunctionMode) -> bool:
    """Take `mode` off, wherever it is; False when it is not on this thread's stack (its handler may
    be running).
    """
    if not _length():
        return False
    modes = _pop_all()
    for other in modes:
        if other is not mode:
            _push(other)
    return mode in modes


def pop_if_alone(modes: Sequence[TorchFunctionMode]) -> TorchFunctionMode | None:
    """Take the only mode of this thread's stack off, when it is one of `modes`."""
    if _length() != 1:
        return None
    mode: TorchFunctionMode = _pop()
    if mode in modes:
        return mode
    _push(mode)
    return None


def _pop_all() -> list[TorchFunctionMode]:
    """All modes, bottom first; the stack is empty afterwards."""
    modes = [_pop() for _ in range(_length())]
    modes.reverse()
    return modes
