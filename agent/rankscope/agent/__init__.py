"""In-process side of rankscope: the calls that a training or inference script makes.

from rankscope.agent import PrecisionDebugger, seed_all
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.agent.debugger import PrecisionDebugger
    from rankscope.agent.seeding import seed_all

__all__ = ["PrecisionDebugger", "seed_all"]


def __getattr__(name: str) -> Any:
    """Bring torch in with the names that need it: `rankscope deliver` runs without."""
    if name == "PrecisionDebugger":
        from rankscope.agent.debugger import PrecisionDebugger

        return PrecisionDebugger
    if name == "seed_all":
        from rankscope.agent.seeding import seed_all

        return seed_all
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
