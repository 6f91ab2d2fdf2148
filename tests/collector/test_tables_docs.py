"""The pages of docs/ that describe tables and commands say what there is."""

import re
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from rankscope.collector import cli, schema
from rankscope.collector.commands.du import du
from rankscope.collector.commands.export import export
from rankscope.collector.commands.ls import ls
from rankscope.collector.commands.query import query
from rankscope.collector.commands.rm import rm

DOCS = Path(__file__).parents[2] / "docs"


def section(page, heading):
    text = (DOCS / page).read_text()
    return re.split(r"^## ", text.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]


@pytest.mark.parametrize("table", schema.TABLES)
def test_every_column_has_its_row_in_order(table):
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section("tables.md", table), re.MULTILINE)
    assert [name for name, _ in rows] == schema.TABLES[table].names


COMMANDS = {"query": query, "ls": ls, "export": export, "du": du, "rm": rm}


@pytest.mark.parametrize(("name", "function"), COMMANDS.items())
def test_every_option_is_described(name, function):
    group = get_command(cli.build({name: function}))
    command = group.commands[name]
    text = section("commands.md", f"rankscope {name}")
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    described = re.findall(r"^\| `(--[a-z-]+)[^`]*` \| (.+) \|$", text, re.MULTILINE)
    assert sorted(described) == sorted((option.opts[0], option.help) for option in options)
    assert isinstance(group, typer.core.TyperGroup)
