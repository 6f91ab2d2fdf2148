"""Where msProbe is: the command that MSPROBE names, one beside this interpreter, or on the path."""

import os
import shutil
import sys
from pathlib import Path

_BESIDE = Path(sys.executable).with_name("msprobe")

COMMAND = os.environ.get("MSPROBE") or (
    str(_BESIDE) if _BESIDE.exists() else shutil.which("msprobe")
)
#: The interpreter that has it.
PYTHON = str(Path(COMMAND).with_name("python")) if COMMAND else None
