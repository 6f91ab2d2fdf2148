"""What one check found."""

from collections.abc import Iterable
from dataclasses import dataclass

#: From the best to the worst; the position is the exit status.
LEVELS = ("ok", "warning", "fault")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    level: str
    """"ok", "warning" (it works, with less than could be) or "fault" (it does not work)."""
    what: str
    """What was seen."""
    remedy: str = ""
    """What to do; empty where nothing is to be done."""


def worst(findings: Iterable[Finding]) -> int:
    """Position in LEVELS of the worst one."""
    return max((LEVELS.index(finding.level) for finding in findings), default=0)


def ok(name: str, what: str) -> Finding:
    return Finding(name, "ok", what)


def warning(name: str, what: str, remedy: str) -> Finding:
    return Finding(name, "warning", what, remedy)


def fault(name: str, what: str, remedy: str) -> Finding:
    return Finding(name, "fault", what, remedy)
