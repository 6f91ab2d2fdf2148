"""The debugger's own methods on a recording that stays in memory."""

from rankscope.agent.debugger import PrecisionDebugger


def debugger_of(recorded):
    """A PrecisionDebugger around a `Recorded`; it is not the one of the process."""
    debugger = object.__new__(PrecisionDebugger)
    debugger._recording = recorded._recording
    return debugger
