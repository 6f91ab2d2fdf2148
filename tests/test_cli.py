"""The one command: help with examples, completion, no colours where nobody sees them."""

import os
import subprocess
import sys

import pytest

from rankscope.collector.cli import COMMANDS

MAIN = "import sys; sys.argv[0] = 'rankscope'; from rankscope.collector.cli import main; main()"


def rankscope(*words, **environ):
    command = [sys.executable, "-c", MAIN, *words]
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_no_colours(command):
    done = rankscope(command, "--help", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert f"Example: rankscope {command} " in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("rankscope d", {"doctor", "deliver", "du"}), ("rankscope ls --j", {"--json"})],
)
def test_the_shell_completes_commands_and_options(typed, offered):
    words = len(typed.split()) - 1
    done = rankscope(_RANKSCOPE_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(words))
    assert set(done.stdout.split()) == offered, done.stderr
