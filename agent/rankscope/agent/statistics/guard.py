"""Calling torch operators unseen: no autograd, no autocast, no function transform, no mode of the
user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_PREFIXES = (
    "Autograd",
    "Autocast",
    "Python",
    "FuncTorch",
    "ADInplace",
    "Functionalize",
    "PreDispatch",
)
_ALIASES = ("FuncTorchBatchedDecomposition", "AutogradFunctionality")


def _hidden_keys() -> torch._C.DispatchKeySet:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    for name, key in torch._C.DispatchKey.__members__.items():
        if name.startswith(_PREFIXES) and name not in _ALIASES:
            keys = keys | torch._C.DispatchKeySet(key)
    return keys


_HIDDEN = _hidden_keys()


@contextmanager
def unseen() -> Iterator[None]:
    """Operators called inside go straight to the device's kernels, on this thread."""
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_HIDDEN):
        yield
