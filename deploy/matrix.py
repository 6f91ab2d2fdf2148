"""Which Pythons and protobufs rankscope works with: installs it in each and tries it.

    python deploy/matrix.py --work /tmp/matrix              every Python 3.10 to 3.13 that is here
    python deploy/matrix.py --torch 'torch==2.4.*' --python 3.11    and records two steps

For each Python one empty environment gets the wheel, then each protobuf in turn. A last row builds
from source where there is no compiler. Needs a package index; torch is installed only when asked
for, or taken from --site. Prints the table of docs/compatibility.md; status 1 when a row fails.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PROTOBUFS = ("5.29.*", "6.*", "7.*")

BARE = """
import rankscope.agent
from rankscope.v1 import collector_pb2 as pb, collector_pb2_grpc
batch = pb.Batch(columns=pb.Columns(names=["Functional.relu.0.forward"], event_step=b"12345678"))
assert pb.Batch.FromString(batch.SerializeToString()) == batch
"""

RECORD = """
import json, pathlib, torch
from rankscope.agent import PrecisionDebugger
debugger = PrecisionDebugger(dump_path="dump", level="mix")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
for _ in range(2):
    debugger.start(model)
    model(torch.ones(2, 4)).sum().backward()
    debugger.stop()
    debugger.step()
"""

READ = """
import json, pathlib
for step in (0, 1):
    data = json.loads(pathlib.Path(f"dump/step{step}/rank0/dump.json").read_text())["data"]
    assert data["Functional.linear.0.forward"]["output"][0]["shape"] == [2, 4], data
    assert "Module.0.Linear.backward.0" in data, list(data)
"""


def main() -> int:
    options = _options()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    wheel, source = _distributions(options.work / "dist")
    print("| Python | protobuf | grpcio | torch | installed from | result |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    failed = False
    for wanted in options.python:
        for line, good in _rows(wanted, wheel, source, options):
            print(line, flush=True)
            failed |= not good
    return int(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("matrix_output"), help="emptied first")
    parser.add_argument("--python", action="append", help="such as 3.11; may be repeated")
    parser.add_argument("--protobuf", action="append", help="such as 6.*; may be repeated")
    parser.add_argument("--torch", help="requirement to install, such as torch==2.4.*")
    parser.add_argument("--site", help="site-packages of the same Python that has torch")
    options = parser.parse_args()
    options.python = options.python or PYTHONS
    options.protobuf = options.protobuf or PROTOBUFS
    options.work = options.work.resolve()
    return options


def _distributions(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution, which `build` makes the wheel from."""
    _run([sys.executable, "-m", "build", "--outdir", folder, ROOT])
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def _rows(
    wanted: str, wheel: Path, source: Path, options: argparse.Namespace
) -> Iterator[tuple[str, bool]]:
    interpreter = _interpreter(wanted)
    if interpreter is None:
        yield f"| {wanted} | | | | | not here |", True
        return
    place = options.work / wanted
    _run([interpreter, "-m", "venv", place])
    python = place / "bin/python"
    records = bool(options.torch or options.site)
    extra = "[collector]" if records else ""
    more = [options.torch] if options.torch else []
    try:
        _pip(python, f"{wheel}{extra}", *more)
    except RuntimeError as error:
        yield f"| {wanted} | | | | wheel | {_short(error)} |", False
        return
    if options.site:
        site = next((place / "lib").glob("python*/site-packages"))
        (site / "shared.pth").write_text(options.site)  # after what is installed here
    for protobuf in options.protobuf:
        yield _row(python, "wheel", [f"protobuf=={protobuf}"], records, os.environ)
    bare = {k: v for k, v in os.environ.items() if k != "CC"} | {"PATH": str(place / "bin")}
    _pip(python, "--force-reinstall", "--no-deps", str(source), environ=bare)
    yield _row(python, "source, no compiler", [], records, bare)


def _row(
    python: Path,
    origin: str,
    packages: list[str],
    records: bool,
    environ: "os._Environ[str] | dict[str, str]",
) -> tuple[str, bool]:
    seen = {"python": "?", "protobuf": "?", "grpcio": "?", "torch": "none"}
    result, good = "works", True
    try:
        if packages:
            _pip(python, *packages)
        seen |= _try(python, records, origin, dict(environ))
    except RuntimeError as error:
        result, good = _short(error), False
    torch = seen["torch"] if records else "none"
    versions = f"{seen['python']} | {seen['protobuf']} | {seen['grpcio']} | {torch}"
    return f"| {versions} | {origin} | {result} |", good


def _try(python: Path, records: bool, origin: str, environ: dict[str, str]) -> dict[str, str]:
    """Use what is installed; the versions that `doctor` saw."""
    command = python.with_name("rankscope")
    place = python.parent.parent / "try"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    _run([python, "-W", "error", "-c", BARE], place, environ)
    _run([command, "--help"], place, environ)
    if "nothing to deliver" not in _run([command, "deliver", place], place, environ):
        raise RuntimeError("deliver")
    said = json.loads(_run([command, "doctor", "--json"], place, environ, allowed=(0, 1)))
    found = {finding["name"]: finding for finding in said["findings"]}
    built = "warning" if "no compiler" in origin else "ok"
    if (found["kernel"]["level"], found["loops"]["level"]) != (built, built):
        raise RuntimeError(f"compiled parts: {found['kernel']['what']}, {found['loops']['what']}")
    if records:
        _run([python, "-c", RECORD], place, environ | {"RANK": "0", "WORLD_SIZE": "1"})
        _run([python, "-c", READ], place, environ)
    return {
        name: found[name]["what"].split(" ")[0]
        for name in ("python", "protobuf", "grpcio", "torch")
    }


def _interpreter(wanted: str) -> str | None:
    """A Python of that version: on PATH, or among pyenv's."""
    own = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(own.glob(f"{wanted}.*/bin/python"))
    for candidate in (*map(str, installed), shutil.which(f"python{wanted}")):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None


def _pip(python: Path, *arguments: str, environ: dict[str, str] | None = None) -> None:
    _run([python, "-m", "pip", "install", "--quiet", *arguments], environ=environ)


def _run(
    command: list[object],
    place: Path | None = None,
    environ: dict[str, str] | None = None,
    allowed: tuple[int, ...] = (0,),
) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=place, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode not in allowed:
        raise RuntimeError(f"{' '.join(words[:4])}: {done.stderr or done.stdout}")
    return done.stdout


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].replace("|", "/")[:100]


if __name__ == "__main__":
    sys.exit(main())
