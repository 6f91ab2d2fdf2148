"""Call stacks as small integers: walked at every record, turned into text once per distinct
stack.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from collections.abc import Hashable
from pathlib import Path
from types import CodeType, FrameType

from rankscope.agent.native import walk as _compiled

_OURS = str(Path(__file__).parent) + "/"


def positions_in_python(start: FrameType) -> Hashable:
    """Where a frame and its callers are: the identity of its code and its last instruction, for
    each. Hashing the code itself would take its constants and names in.
    """
    key: list[int] = []
    append = key.append
    frame: FrameType | None = start
    while frame is not None:
        append(id(frame.f_code))
        append(frame.f_lasti)
        frame = frame.f_back
    return tuple(key)


_positions = positions_in_python if _compiled is None else _compiled.positions


class StackTable:
    """Interns stacks. `capture` is on the hot path; `frames` reads source text and is called when
    batches are made.
    """

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}
        self._frames: dict[int, list[str]] = {}
        # By identity; code that is known is kept alive, so that its identity stays its own.
        self._lines: dict[int, tuple[CodeType, dict[int, str | None]]] = {}

    def capture(self, frame: FrameType | None = None) -> int:
        """Id of the stack from `frame` (the caller's when None) outwards, frames of the agent left
        out.
        """
        if frame is None:
            frame = sys._getframe(1)
        key = _positions(frame)
        found = self._ids.get(key)
        return found if found is not None else self._intern(key, frame)

    def frames(self, stack: int) -> list[str]:
        """Text of a stack that `capture` gave: one string a frame, as stack.json shows it."""
        return self._frames[stack]

    def _intern(self, key: Hashable, start: FrameType) -> int:
        frames: list[str] = []
        frame: FrameType | None = start
        while frame is not None:
            text = self._line(frame.f_code, frame.f_lasti)
            if text is not None:
                frames.append(text)
            frame = frame.f_back
        digest = hashlib.blake2b("\0".join(frames).encode(), digest_size=8).digest()
        stack = int.from_bytes(digest, "little", signed=True) or 1
        self._ids[key] = stack
        self._frames[stack] = frames
        return stack

    def _line(self, code: CodeType, instruction: int) -> str | None:
        """One frame as text, or None for ours and where the source cannot be read."""
        _, lines = self._lines.setdefault(id(code), (code, {}))
        if instruction not in lines:
            lines[instruction] = _text(code, instruction)
        return lines[instruction]


def _text(code: CodeType, instruction: int) -> str | None:
    if code.co_filename.startswith(_OURS):
        return None
    number = _line_number(code, instruction)
    source = linecache.getline(code.co_filename, number).strip()
    if not source:
        return None
    return f"File {code.co_filename}, line {number}, in {code.co_name}, \n {source}"


def _line_number(code: CodeType, instruction: int) -> int:
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
