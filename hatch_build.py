"""Compiles the statistics kernel into the wheel, or beside its source for an editable install.

Without a C compiler, or with RANKSCOPE_BUILD_KERNEL=0, the wheel stays pure Python and the agent
computes statistics with numpy. Nothing is ever compiled in a user's job.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "rankscope/agent/statistics"
LIBRARY = "librankscope_kernel" + {"darwin": ".dylib"}.get(sys.platform, ".so")
FLAGS = [
    *("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math"),
]


class CustomBuildHook(BuildHookInterface[Any]):
    """Called by hatchling before it collects files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = compile_kernel(Path(self.root) / "agent" / PACKAGE)
        if library is None:
            self.app.display_warning("no kernel compiled: statistics will be computed with numpy")
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        if version != "editable":
            build_data["force_include"][str(library)] = f"{PACKAGE}/{LIBRARY}"


def compile_kernel(folder: Path) -> Path | None:
    """Compile kernel.c in `folder`; None, and no old library left, when that is not possible."""
    target = folder / LIBRARY
    target.unlink(missing_ok=True)
    compiler = _compiler()
    if compiler is None:
        return None
    building = target.with_name(f"{target.name}.{os.getpid()}")
    command = [*compiler, *FLAGS, "-o", str(building), str(folder / "kernel.c"), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(f"{' '.join(command)} failed:\n{result.stderr}", file=sys.stderr)
        building.unlink(missing_ok=True)
        return None
    building.replace(target)
    return target


def _compiler() -> list[str] | None:
    if os.environ.get("RANKSCOPE_BUILD_KERNEL") == "0" or sys.platform == "win32":
        return None
    if named := os.environ.get("CC"):
        return named.split()
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
