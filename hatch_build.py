"""Compiles the statistics kernel and the loops of the hot path into the wheel, or beside their
sources for an editable install.

Without a C compiler, or with RANKSCOPE_BUILD_KERNEL=0, the wheel stays pure Python and the agent
computes statistics with numpy. Without Python's headers only the loops are missing. Nothing is ever
compiled in a user's job.
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

AGENT = Path("rankscope/agent")
KERNEL = AGENT / "statistics/kernel.c"
LIBRARY = "librankscope_kernel" + {"darwin": ".dylib"}.get(sys.platform, ".so")
WALK = AGENT / "native/walk.c"
EXTENSION = "_walk.abi3.so"
FLAGS = [
    *("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math"),
]


class CustomBuildHook(BuildHookInterface[Any]):
    """Called by hatchling before it collects files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        agent = Path(self.root) / "agent"
        kernel = compile_kernel((agent / KERNEL).parent)
        walk = compile_walk((agent / WALK).parent)
        if kernel is None:
            self.app.display_warning("no kernel compiled: statistics will be computed with numpy")
        if walk is None:
            self.app.display_warning("no loops compiled: records will be walked in Python")
        built = [library for library in (kernel, walk) if library is not None]
        if not built:
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        # walk.c keeps to the limited API of 3.10; the kernel knows nothing of Python.
        python = "cp310-abi3" if walk is not None else "py3-none"
        build_data["tag"] = f"{python}-{platform}"
        if version != "editable":
            for library in built:
                build_data["force_include"][str(library)] = str(library.relative_to(agent))


def compile_kernel(folder: Path) -> Path | None:
    """Compile kernel.c in `folder`; None, and no old library left, when that is not possible."""
    return _compile(folder / KERNEL.name, LIBRARY, ["-lm"])


def compile_walk(folder: Path) -> Path | None:
    """The same for walk.c, a Python extension."""
    options = [f"-I{sysconfig.get_path('include')}"]
    if sys.platform == "darwin":
        options += ["-undefined", "dynamic_lookup"]
    return _compile(folder / WALK.name, EXTENSION, options)


def _compile(source: Path, library: str, options: list[str]) -> Path | None:
    target = source.with_name(library)
    compiler = _compiler()
    if compiler is None:
        target.unlink(missing_ok=True)
        return None
    building = target.with_name(f"{target.name}.{os.getpid()}")
    command = [*compiler, *FLAGS, "-o", str(building), str(source), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(f"{' '.join(command)} failed:\n{result.stderr}", file=sys.stderr)
        for useless in (building, target):
            useless.unlink(missing_ok=True)
        return None
    building.replace(target)
    return target


def _compiler() -> list[str] | None:
    if os.environ.get("RANKSCOPE_BUILD_KERNEL") == "0" or sys.platform == "win32":
        return None
    if named := os.environ.get("CC"):
        return named.split()
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
