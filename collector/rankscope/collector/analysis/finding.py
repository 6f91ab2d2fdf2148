"""What `check` finds."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """`kind` is one of nan, inf, missing_collective, collective, replicated; or, for what is only
    unusual (`notice`), overflow, zeros, exploding, vanishing, outlier."""

    kind: str
    step: int
    ranks: list[int]
    name: str
    argument: str
    why: str
    notice: bool = False
    position: int = 0  # rows of that step and rank before it

    def first(self) -> dict[str, Any]:
        """As `compare --json` says it."""
        return {
            "step": self.step,
            "ranks": self.ranks,
            "name": self.name,
            "argument": self.argument,
            "why": self.why,
        }

    def document(self) -> dict[str, Any]:
        """All that `--json` prints of it."""
        return {"kind": self.kind, **self.first()}
