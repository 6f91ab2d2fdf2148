"""What the finisher is asked to do, in order."""

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.collector.steps import Seal


@dataclass(frozen=True)
class Part:
    """Where one process's part of a step is written, and what its header says."""

    folder: str
    task: str
    level: str
    summary_mode: str
    precision: str
    extra_info: bool


@dataclass(frozen=True)
class RenderStep:
    """Write the layout of these processes' parts of a step."""

    step: int
    parts: Mapping[str, Part]


@dataclass(frozen=True)
class RenameFolder:
    """A folder has a new name in every step."""

    old: str
    new: str


@dataclass(frozen=True)
class RemoveFolders:
    """Folders leave the layout in every step."""

    folders: tuple[str, ...]


@dataclass(frozen=True)
class SealStep:
    """Replace the files of a step by one, with the ranks known now."""

    seal: Seal
    ranks: Mapping[str, int]


@dataclass(frozen=True)
class SayFarewell:
    """Everything of a process that left stands; (step, folder) of what was to be written."""

    process: str
    folders: tuple[tuple[int, str], ...]


Job = RenderStep | RenameFolder | RemoveFolders | SealStep | SayFarewell
