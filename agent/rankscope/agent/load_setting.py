"""What config.json's key "load" asks for. No torch: settings are read where there is none."""

import re
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"(Module\..+)\.forward\.(\d+)")


@dataclass(frozen=True)
class Load:
    """What is replaced, and by the dump in which folder."""

    path: Path
    modules: frozenset[str]
    """Names of forward records, `Module.{name}.{Class}.forward.{n}`."""
    steps: frozenset[int] | None
    ranks: frozenset[int] | None
    record: bool
    """Record as well (dump_after_load)."""


def is_name(text: str) -> bool:
    """Whether it has the form of a module's forward record."""
    return NAME.fullmatch(text) is not None
