"""An open file whose number a script may have closed and used again."""

import os


class Descriptor:
    """Closes, and says it is open, only as long as the number stands for the file it was made of:
    a script that closes all descriptors it does not know may open files of its own under ours.
    """

    def __init__(self, number: int = -1) -> None:
        self.number = number
        self._file = self._stands_for() if number >= 0 else None

    @property
    def is_open(self) -> bool:
        return self.number >= 0 and self._stands_for() == self._file

    def close(self) -> None:
        """Safe to call twice."""
        if self.is_open:
            os.close(self.number)
        self.number = -1

    def _stands_for(self) -> tuple[int, int] | None:
        try:
            status = os.fstat(self.number)
        except OSError:
            return None
        return status.st_dev, status.st_ino
