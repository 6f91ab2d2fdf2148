"""The compiled loops of the hot path (walk.c), where the installation has them.

`walk` is the extension module or None; outline.py, stacks.py and statistics/tensors.py say the same
in Python and use it where it is there.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, cast

import torch

_log = logging.getLogger("rankscope")


class Walk(Protocol):
    """The functions of walk.c; their docstrings say what they do."""

    scan: Callable[..., tuple[Any, ...]]
    measure: Callable[[list[Any], int, int, dict[torch.dtype, int]], int]
    positions: Callable[[FrameType], bytes]
    bind: Callable[..., None]
    use: Callable[[int, int, int, int], None]


def _load() -> Walk | None:
    try:
        return cast(Walk, importlib.import_module("._walk", __name__))
    except ImportError as error:
        _log.info("records are walked in Python: %s", error)
        return None


walk = _load()
