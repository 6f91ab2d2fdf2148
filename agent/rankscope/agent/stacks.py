"""Call stacks as small integers: walked at every record, turned into text once per distinct
stack.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType

_OURS = str(Path(__file__).parent) + "/"

StackKey = tuple[object, ...]


class StackTable:
    """Interns stacks. `capture` is on the hot path; `frames` reads source text and is called when
    batches are made.
    """

    def __init__(self) -> None:
        self._ids: dict[StackKey, int] = {}
        self._frames: dict[int, list[str]] = {}
        self._lines: dict[tuple[CodeType, int], str | None] = {}

    def capture(self, frame: FrameType | None = None) -> int:
        """Id of the stack from `frame` (the caller's when None) outwards, frames of the agent left
        out.
        """
        key: list[object] = []
        append = key.append
        if frame is None:
            frame = sys._getframe(1)
        while frame is not None:
            append(frame.f_code)
            append(frame.f_lasti)
            frame = frame.f_back
        found = self._ids.get(interned := tuple(key))
        return found if found is not None else self._intern(interned)

    def frames(self, stack: int) -> list[str]:
        """Text of a stack that `capture` gave: one string a frame, as stack.json shows it."""
        return self._frames[stack]

    def _intern(self, key: StackKey) -> int:
        frames = [
            text
            for code, instruction in zip(key[::2], key[1::2], strict=True)
            if (text := self._line(code, instruction)) is not None  # type: ignore[arg-type]
        ]
        digest = hashlib.blake2b("\0".join(frames).encode(), digest_size=8).digest()
        stack = int.from_bytes(digest, "little", signed=True) or 1
        self._ids[key] = stack
        self._frames[stack] = frames
        return stack

    def _line(self, code: CodeType, instruction: int) -> str | None:
        """One frame as text, or None for ours and where the source cannot be read."""
        where = (code, instruction)
        if where not in self._lines:
            if code.co_filename.startswith(_OURS):
                return None
            number = _line_number(code, instruction)
            source = linecache.getline(code.co_filename, number).strip()
            self._lines[where] = (
                f"File {code.co_filename}, line {number}, in {code.co_name}, \n {source}"
                if source
                else None
            )
        return self._lines[where]


def _line_number(code: CodeType, instruction: int) -> int:
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
