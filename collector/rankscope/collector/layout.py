"""The folders msProbe users know: RUN/step{N}/rank{R}/ with dump.json and its companions.

RUN holds step folders and nothing else, a step folder rank folders and nothing else: msProbe's
tools refuse any other entry. So whatever is unfinished lies aside, in RUN.rankscope/tmp/ of the
same file system, and is renamed in place.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

DOCUMENTS = ("stack.json", "construct.json", "dump.json", "debug.json")  # in the order written

_FOLDER = re.compile(
    r"(?P<kind>rank|proc)(?P<number>[0-9]{1,10})(?P<suffix>\.[A-Za-z0-9_][A-Za-z0-9_.-]{0,99})?"
)
_STEP = re.compile(r"step([0-9]{1,18})")


def checked_folder(name: str) -> str:
    """The name if it is a plain rank{R} or proc{pid}, perhaps with a .suffix; else ValueError."""
    if not _FOLDER.fullmatch(name):
        raise ValueError(
            f"folder name {name!r}: expected rank<number> or proc<number>, then nothing or "
            "a dot and up to 100 letters, digits, '_', '.' or '-'"
        )
    return name


def folder_order(name: str) -> tuple[int, int, str]:
    """Sorts folders: ranks first, by number."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return (2, 0, name)
    return (match["kind"] == "proc", int(match["number"]), match["suffix"] or "")


class Layout:
    """The step folders of one run; safe to use from several threads and processes at once.

    `aside` is where unfinished and removed things lie (default RUN.rankscope/tmp), on the same file
    system. Folder names are checked, whoever they come from.
    """

    def __init__(self, run_path: Path, aside: Path | None = None) -> None:
        self.run_path = Path(os.path.abspath(run_path))
        self.aside = aside or self.run_path.with_name(self.run_path.name + ".rankscope") / "tmp"

    def folder(self, step: int, folder: str) -> Path:
        """Where the documents of a step and folder stand, whether it exists or not."""
        if step < 0:
            raise ValueError(f"step {step}: expected 0 or more")
        return self.run_path / f"step{step}" / checked_folder(folder)

    def write(self, step: int, folder: str, documents: Mapping[str, bytes]) -> Path:
        """Put documents in place of those that stand there; returns the folder.

        Readers see each file whole, old or new; dump.json comes last, so the others stand when it
        does. Not synced to disk: the tables are the truth.
        """
        unknown = sorted(set(documents) - set(DOCUMENTS))
        if unknown:
            raise ValueError(f"document {unknown[0]!r}: expected one of {', '.join(DOCUMENTS)}")
        target = self.folder(step, folder)
        for name in DOCUMENTS:
            if name in documents:
                self.place(target / name, partial(_write, documents[name]))
        return target

    def place(self, target: Path, make: Callable[[Path], object]) -> None:
        """Put a file that `make(path)` makes in place of what stands at `target`, at once."""
        aside = self._new_aside("new")
        try:
            make(aside)
            _move(aside, target)
        finally:
            aside.unlink(missing_ok=True)  # also two links to one file are left by a rename

    def place_folder(self, target: Path, make: Callable[[Path], object]) -> bool:
        """Put a folder that `make(path)` fills at `target`, at once; False when one with files
        stands there.
        """
        aside = self._new_aside("new")
        aside.mkdir()
        try:
            make(aside)
            _move(aside, target)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    def rename(self, old: str, new: str) -> None:
        """Give a folder its new name in every step; what stands under the new name is replaced."""
        checked_folder(new)
        for step in self._steps_with([old]):
            source, target = self.folder(step, old), self.folder(step, new)
            self._set_aside(target)
            os.rename(source, target)

    def remove(self, folders: Iterable[str], from_step: int | None = None) -> None:
        """Take folders out of every step, or of those from `from_step` on; empty steps go too."""
        names = list(folders)
        for step in self._steps_with(names):
            if from_step is not None and step < from_step:
                continue
            for name in names:
                self._set_aside(self.folder(step, name))
            try:
                (self.run_path / f"step{step}").rmdir()
            except OSError:
                pass  # others still have a folder there

    def folders(self) -> dict[int, list[str]]:
        """The folders of each step, both in order; entries with other names are left out."""
        found: dict[int, list[str]] = {}
        for step_path in self.run_path.iterdir() if self.run_path.is_dir() else ():
            match = _STEP.fullmatch(step_path.name)
            if match and step_path.is_dir():
                names = [entry.name for entry in step_path.iterdir()]
                found[int(match[1])] = sorted(filter(_FOLDER.fullmatch, names), key=folder_order)
        return dict(sorted(found.items()))

    def _steps_with(self, names: list[str]) -> list[int]:
        wanted = {checked_folder(name) for name in names}
        return [step for step, folders in self.folders().items() if wanted & set(folders)]

    def _set_aside(self, path: Path) -> None:
        """Remove a folder in one move, so that nobody sees half of it."""
        aside = self._new_aside(path.name)
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return
        shutil.rmtree(aside, ignore_errors=True)

    def _new_aside(self, name: str) -> Path:
        self.aside.mkdir(parents=True, exist_ok=True)
        return self.aside / f"{uuid.uuid4().hex}.{name}"


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _move(source: Path, target: Path) -> None:
    """Move a file or folder, into a folder that is made if need be; once more while that is taken
    away as empty by a `remove`.
    """
    for attempts_left in reversed(range(10)):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return os.replace(source, target)
        except FileNotFoundError:
            if not attempts_left:
                raise
