"""Checks of what is installed. Nothing but gRPC is imported: torch takes seconds."""

import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rankscope.agent.doctor.finding import Finding, fault, ok, warning
from rankscope.agent.transport.embedded import missing_libraries

AGENT = Path(__file__).parent.parent


def versions() -> Iterator[Finding]:
    """Each library that rankscope names, held against the oldest version that it works with."""
    yield ok("python", f"{platform.python_version()} ({sys.executable})")
    yield ok("rankscope", importlib.metadata.version("rankscope"))
    for name, floor, extra in _requirements():
        if extra == "collector":
            continue
        yield _library(name, floor, extra)


def _requirements() -> Iterator[tuple[str, str, str]]:
    """(library, oldest version, extra) of the installed distribution."""
    for line in importlib.metadata.requires("rankscope") or []:
        found = re.match(r"([\w.-]+)\s*(?:>=\s*([\w.]+))?", line)
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        if found:
            yield found[1], found[2] or "0", extra[1] if extra else ""


def _library(name: str, floor: str, extra: str) -> Finding:
    installed = _version(name)
    if installed is None:
        if extra == "agent":
            return warning(
                name,
                "not installed: nothing can be recorded here",
                "install torch where models run; a storage node needs none",
            )
        return fault(name, "not installed", f"pip install '{name}>={floor}'")
    if _numbers(installed) < _numbers(floor):
        return fault(
            name, f"{installed}, needed is {floor} or newer", f"pip install '{name}>={floor}'"
        )
    return ok(name, installed)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: 2.13.0+cpu as (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else (0,)


def contract() -> Finding:
    """Whether gRPC and the generated code load together."""
    try:
        from rankscope.v1 import collector_pb2_grpc
    except Exception as error:  # protobuf and grpcio raise their own kinds
        return fault(
            "contract",
            f"gRPC and protobuf do not load: {type(error).__name__}: {error}",
            "pip install --upgrade 'grpcio>=1.71.2' 'protobuf>=5.29'",
        )
    return ok("contract", f"gRPC and protobuf load ({collector_pb2_grpc.__name__})")


def collector() -> Finding:
    """Whether this installation can run a collector."""
    missing = missing_libraries()
    if not missing:
        return ok("collector", "its libraries are installed: one can be started on this host")
    return warning(
        "collector",
        f"none can be started here: {', '.join(missing)} missing",
        "pip install 'rankscope[collector]', or let RANKSCOPE_COLLECTOR=HOST:PORT name one",
    )


def compiled() -> Iterator[Finding]:
    """Whether the kernel and the compiled loops were built, and load."""
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    kernel = AGENT / "statistics" / f"librankscope_kernel.{suffix}"
    yield _compiled("kernel", kernel, "statistics are computed with numpy, several times slower")
    loops = AGENT / "native" / "_walk.abi3.so"
    yield _compiled("loops", loops, "records are walked in Python, a third slower")


def _compiled(name: str, library: Path, otherwise: str) -> Finding:
    remedy = "install the wheel for this platform, or install from source where a C compiler is"
    if not library.exists():
        return warning(name, f"not built: {otherwise}", remedy)
    try:
        if library.name.startswith("_walk"):
            loader = importlib.machinery.ExtensionFileLoader("_walk", str(library))
            spec = importlib.util.spec_from_file_location("_walk", library, loader=loader)
            assert spec is not None
            importlib.util.module_from_spec(spec)
        else:
            ctypes.CDLL(str(library))
    except (OSError, ImportError) as error:
        return warning(name, f"{library} does not load ({error}): {otherwise}", remedy)
    return ok(name, f"compiled ({library.name})")
