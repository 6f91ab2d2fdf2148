"""Modules of torch choose a fused kernel only where nobody overrides torch functions; our mode must
not count, or recording would change results.

nn.TransformerEncoder, its layer and nn.MultiheadAttention ask `torch.overrides.has_torch_function`
by that name. Between `install` and `remove` the name holds a question that leaves our mode out.
Functions that dispatch on the answer hold the original under a name of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch.overrides

from rankscope.agent.taps import mode_stack

_original = torch.overrides.has_torch_function
_modes: list[torch.overrides.TorchFunctionMode] = []  # those that do not count


def install(mode: torch.overrides.TorchFunctionMode) -> None:
    """Leave `mode` out of the answer. Idempotent."""
    if mode not in _modes:
        _modes.append(mode)
    if torch.overrides.has_torch_function is _original:
        _let_scripts_compile()
        torch.overrides.has_torch_function = _has_other_override


def remove(mode: torch.overrides.TorchFunctionMode) -> None:
    """Idempotent."""
    if mode in _modes:
        _modes.remove(mode)
    if not _modes and torch.overrides.has_torch_function is _has_other_override:
        torch.overrides.has_torch_function = _original


def _has_other_override(args: Iterable[Any]) -> bool:
    mode = mode_stack.pop_if_alone(_modes)
    if mode is None:
        return _original(args)
    try:
        return _original(args)
    finally:
        mode_stack.insert_at_bottom(mode)


def _let_scripts_compile() -> None:
    """torch.jit.script knows the original as a builtin, and may be called while we record."""
    try:
        register = importlib.import_module("torch.jit._builtins")._register_builtin
    except (ImportError, AttributeError):
        return
    register(_has_other_override, "aten::has_torch_function")
