"""What `compare` and `check` find."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class First:
    """Where it starts."""

    step: int
    ranks: list[int]
    name: str
    argument: str
    why: str

    def document(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)


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

    def first(self) -> First:
        """As `compare` says it."""
        return First(self.step, self.ranks, self.name, self.argument, self.why)

    def document(self) -> dict[str, Any]:
        """All that `--json` prints of it."""
        return {"kind": self.kind, **self.first().document()}
