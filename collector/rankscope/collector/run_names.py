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
_MARK_DIGITS = 16


def folder_name(run: str) -> str:
    """A name for the folder of a run: itself when it is plain, else `+` and the name with +XX for
    what is not (as URLs have %XX), or, when that is too long, its begin and a hash. Different runs
    get different names; `run_of` and `run.json` beside the run tell the name again.
    """
    reserved = _DEVICES.fullmatch(run) or run.endswith((".rankscope", "."))
    if _PLAIN.fullmatch(run) and not reserved and len(run) <= MOST_BYTES:
        return run
    # Not %XX itself: the libraries below take paths for URLs, and %2E%2E for the folder above.
    name = "+" + quote(run.encode(errors="surrogatepass"), safe="_.:@-").replace("~", "%7E")
    if name.endswith((".rankscope", ".")):
        head, _, tail = name.rpartition(".")
        name = f"{head}%2E{tail}"
    name = name.replace("%", "+")
    return name if len(name) <= MOST_BYTES else marked(name, run)


def marked(name: str, run: str) -> str:
    """The begin of the name with a hash of the run's at its end, which no other run has."""
    mark = hashlib.sha256(run.encode(errors="surrogatepass")).hexdigest()[:_MARK_DIGITS]
    return f"+={name[: MOST_BYTES - _MARK_DIGITS - 3]}={mark}"


def run_of(folder: str) -> str | None:
    """The run of a folder's name; None for one that was marked: run.json tells that."""
    if folder.startswith("+="):
        return None
    if not folder.startswith("+"):
        return folder
    return unquote(folder[1:].replace("+", "%"), errors="surrogatepass")


def known_name(side_path: Path) -> str | None:
    """The name of a run as it came, where its folder does not tell it; None without a note."""
    try:
        return str(json.loads((side_path / "run.json").read_text())["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
