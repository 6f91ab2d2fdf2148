"""`scope` and `list`: which records are written, decided once a name where the name decides.

A list entry keeps the records whose name contains it, or whose name its `name-regex(...)` finds; at
level mix it also keeps all that runs inside a module that it names. A scope keeps what lies between
two records: a module opens it when it begins and closes it when it ends, an API opens it before and
closes it after its own record. With both, both must hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rankscope.agent.config import Config

_REGEX = re.compile(r"name-regex\((.*)\)", re.DOTALL)


def matcher(entry: str) -> Callable[[str], object]:
    """The test that one entry of a list puts to a record name; re.error when it cannot be read."""
    pattern = _REGEX.fullmatch(entry)
    return re.compile(pattern[1]).search if pattern else lambda name: entry in name


class Selection:
    """Decides about name ids. `modules` are the ids of the module records that are open on the
    thread, outermost first.
    """

    def __init__(self, config: Config, name_id: Callable[[str], int], names: Sequence[str]) -> None:
        self._names = names
        self._first, self._last = map(name_id, config.scope) if config.scope else (0, 0)
        self._open = not self._first
        self._opens_windows = config.level == "mix"
        self._entries = [(entry, matcher(entry)) for entry in config.list]
        self._matches: dict[int, bool] = {}
        self._unused = set(config.list)
        self._scope_missed = bool(config.scope)
        self._went_backward: set[str] = set()  # stems of modules with a backward record that counts

    def keeps(self, name: int, modules: Sequence[int]) -> bool:
        """Whether a call's record is written."""
        if name == self._first:
            self._open_scope()
        kept = self._open and self._is_listed(name, modules)
        if name == self._last:
            self._open = False
        return kept

    def enters(self, name: int, modules: Sequence[int]) -> bool:
        """A module record begins: whether its first part is written."""
        if name == self._first:
            self._open_scope()
        kept = self._open and self._is_listed(name, modules)
        if kept:
            stem, backward, _ = self._names[name].rpartition(".backward.")
            if backward:
                self._went_backward.add(stem)
        return kept

    def keeps_gradient(self, stem: str, name: int) -> bool:
        """Whether the gradients of a module's parameters are written: those of a module whose
        backward record counts, whenever they arrive, and those that the list names.
        """
        if stem in self._went_backward:
            return True
        return self._open and bool(self._entries) and self._match(name)

    def leaves(self, name: int, modules: Sequence[int]) -> bool:
        """A module record ends: whether its last part is written."""
        kept = self._open and self._is_listed(name, modules)
        if name == self._last:
            self._open = False
        return kept

    def end_step(self) -> list[str]:
        """The step is over. Returns what no record so far has used: entries of the list, the first
        name of the scope.
        """
        self._open = not self._first
        self._went_backward.clear()
        if self._scope_missed:
            return [f"scope {self._names[self._first]!r}"]
        return [f"list entry {entry!r}" for entry, _ in self._entries if entry in self._unused]

    def _open_scope(self) -> None:
        self._open = True
        self._scope_missed = False

    def _is_listed(self, name: int, modules: Sequence[int]) -> bool:
        if not self._entries or self._match(name):
            return True
        return self._opens_windows and any(map(self._match, modules))

    def _match(self, name: int) -> bool:
        found = self._matches.get(name)
        if found is None:
            text = self._names[name]
            used = [entry for entry, matches in self._entries if matches(text)]
            self._unused.difference_update(used)
            found = self._matches[name] = bool(used)
        return found
