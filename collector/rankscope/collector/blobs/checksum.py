"""CRC-32 as zip archives have it, by the fastest implementation that is there."""

import zlib
from collections.abc import Callable
from typing import Any

try:  # several times faster on x86 and ARM
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # pragma: no cover - platforms without a wheel
    _crc32 = zlib.crc32

#: crc32(data, start=0); does not hold the interpreter's lock over large data.
crc32: Callable[..., int] = _crc32
Buffer = Any
