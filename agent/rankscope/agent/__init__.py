"""In-process side of rankscope: the calls that a training or inference script makes.

from rankscope.agent import PrecisionDebugger, seed_all
"""

from rankscope.agent.debugger import PrecisionDebugger
from rankscope.agent.seeding import seed_all

__all__ = ["PrecisionDebugger", "seed_all"]
