"""Looking at one run: is it consistent over its ranks, and are its numbers sane?"""

from dataclasses import dataclass
from typing import Any

from . import consistency, sanity
from .finding import Finding
from .leaves import leaves
from .sides import Side


@dataclass(frozen=True)
class Checked:
    """`findings` are faults, in the order of the run; `notices` are only unusual."""

    side: Side
    findings: list[Finding]
    notices: list[Finding]

    @property
    def first(self) -> Finding | None:
        """Where it starts."""
        return self.findings[0] if self.findings else None

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "first": self.first.first().document() if self.first else None,
            "findings": [finding.document() for finding in self.findings],
            "notices": [finding.document() for finding in self.notices],
        }


def check(side: Side) -> Checked:
    """Look at all steps and ranks of a side."""
    rows = leaves(side.table)
    found = [
        *sanity.not_finite(rows),
        *consistency.collectives(rows),
        *consistency.replicated(rows, side.processes),
    ]
    order = sorted(found, key=lambda one: (one.step, one.position))
    notices = sorted(sanity.unusual(rows), key=lambda one: (one.step, one.position))
    return Checked(side, order, notices)
