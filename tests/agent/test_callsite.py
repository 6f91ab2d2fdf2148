"""Reading call sites, under every interpreter of this machine that we support."""

import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.agent.taps.callsite import CallShape, call_shape

TESTS = Path(__file__).parent.parent
CHECKS = TESTS / "support" / "callsite_checks.py"
CALLSITE = TESTS.parent / "agent" / "rankscope" / "agent" / "taps" / "callsite.py"


def interpreters():
    """This one, and the newest patch of each other version that pyenv has."""
    found = {sys.version_info[:2]: Path(sys.executable)}
    for path in sorted((Path.home() / ".pyenv" / "versions").glob("3.*/bin/python")):
        version = tuple(int(part) for part in path.parts[-3].split(".")[:2])
        if version >= (3, 10):
            found.setdefault(version, path)
    return sorted(found.items())


@pytest.mark.parametrize(
    "python", [pytest.param(path, id=".".join(map(str, v))) for v, path in interpreters()]
)
def test_arguments_are_those_that_were_written(python):
    done = subprocess.run([python, CHECKS, CALLSITE], capture_output=True, text=True)
    assert done.stdout == "all calls read\n", done.stdout + done.stderr


def test_what_is_no_call_has_no_shape():
    code = compile("a + b", "", "eval")
    assert all(call_shape(code, at) is None for at in range(0, len(code.co_code), 2))
    call = compile("a(b, c=1)", "", "eval")
    shapes = {call_shape(call, at) for at in range(0, len(call.co_code), 2)}
    assert CallShape(1, ("c",)) in shapes
