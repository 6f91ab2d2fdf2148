"""Names that come over the network, as names of folders: safe, and the way back."""

import hashlib
import json
import re
from pathlib import Path
from urllib.parse import quote, unquote

#: Longest folder name, so that `.rankscope` and what is written aside still fit in 255 bytes.
MOST_BYTES = 128

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+=-]*")
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_SAFE = "_.:@+=-"
_MARK_DIGITS = 16


def folder_name(run: str) -> str:
    """A name for the folder of a run: itself when it is plain, else with %XX for what is not (as in
    URLs), and cut, with a hash at its end, when that is too long. Different runs get different
    names; `run_of` and `run.json` beside the run tell the name again.
    """
    name = quote(run.encode(errors="surrogatepass"), safe=_SAFE).replace("~", "%7E")
    if name.endswith((".rankscope", ".")):
        head, _, tail = name.rpartition(".")
        name = f"{head}%2E{tail}"
    if not _PLAIN.fullmatch(name[:1]) or _DEVICES.fullmatch(name):
        name = name if name.startswith("%") else f"%{ord(name[0]):02X}{name[1:]}"
    return name if len(name) <= MOST_BYTES else marked(name, run)


def marked(name: str, run: str) -> str:
    """The name with a hash of the run's at its end, which no other run has."""
    mark = hashlib.sha256(run.encode(errors="surrogatepass")).hexdigest()[:_MARK_DIGITS]
    cut = re.sub(r"%.?$", "", name[: MOST_BYTES - _MARK_DIGITS - 1])
    return f"{cut}~{mark}"


def run_of(folder: str) -> str | None:
    """The run of a folder's name; None for one that was marked: run.json tells that."""
    return None if "~" in folder else unquote(folder, errors="surrogatepass")


def known_name(side_path: Path) -> str | None:
    """The name of a run as it came, where its folder does not tell it; None without a note."""
    try:
        return str(json.loads((side_path / "run.json").read_text())["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
