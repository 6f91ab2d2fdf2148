"""The quickstart does what it says, and says the same in both languages."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"


def blocks(page, language):
    return re.findall(rf"```{language}\n(.+?)```", (DOCS / page).read_text(), re.S)


def test_both_languages_have_the_same_code():
    assert blocks("quickstart.md", "python") == blocks("zh/quickstart.md", "python")
    commands = [
        [
            line.partition("#")[0].strip()
            for block in blocks(page, "bash")
            for line in block.split("\n")
        ]
        for page in ("quickstart.md", "zh/quickstart.md")
    ]
    assert commands[0] == commands[1]


def test_the_script_records_and_the_commands_find_the_nan(tmp_path):
    (script,) = blocks("quickstart.md", "python")
    (tmp_path / "train.py").write_text(script)
    subprocess.run([sys.executable, "train.py"], check=True, cwd=tmp_path)
    (look,) = [block for block in blocks("quickstart.md", "bash") if "rankscope ls" in block]
    found = {}
    for line in look.splitlines():
        command = line.partition("#")[0].strip().replace("rankscope", "", 1)
        done = subprocess.run(
            f"'{sys.executable}' -m rankscope.collector.cli {command}",
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        found[command.split()[0]] = done
    assert {name: done.returncode for name, done in found.items()} == {
        "ls": 0,
        "check": 1,
        "query": 0,
    }
    assert "complete" in found["ls"].stdout
    assert "first finding: nan, step 2" in found["check"].stdout
    assert "Functional.linear.0.forward" in found["query"].stdout
