"""In-process side of rankscope: the calls that a training or inference script makes.

from rankscope.agent import PrecisionDebugger, seed_all
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.agent.debugger import PrecisionDebugger, module_dump, module_dump_end
    from rankscope.agent.randomness import random_save
    from rankscope.agent.seeding import seed_all

__all__ = ["PrecisionDebugger", "module_dump", "module_dump_end", "random_save", "seed_all"]

_HOMES = {
    "PrecisionDebugger": "debugger",
    "module_dump": "debugger",
    "module_dump_end": "debugger",
    "random_save": "randomness",
    "seed_all": "seeding",
}


def __getattr__(name: str) -> Any:
    """Bring torch in with the names that need it: `rankscope deliver` runs without."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
