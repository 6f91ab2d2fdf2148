"""The `rankscope` command: a table of commands, each imported only when it is called.

Importing this module needs typer and nothing else, so commands that need no tables (`deliver`,
`doctor`, `run`) work in images without pyarrow. A command is a typer function that bears the
command's name (dashes as underscores), in the module named here.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

#: command -> (module, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("rankscope.collector.commands.serve", "Collect from agents into a store."),
    "query": (
        "rankscope.collector.commands.query",
        "Ask a run's tables with SQL, also while it is recorded.",
    ),
    "ls": (
        "rankscope.collector.commands.ls",
        "Show a run's processes and steps, and what is missing.",
    ),
    "export": (
        "rankscope.collector.commands.export",
        "Write msProbe's layout, or tensors, from a run's tables.",
    ),
    "compare": (
        "rankscope.collector.commands.compare",
        "Say where two runs or dumps begin to differ.",
    ),
    "check": (
        "rankscope.collector.commands.check",
        "Look for NaN, infinities and ranks that disagree in a run.",
    ),
    "du": ("rankscope.collector.commands.du", "Say what of a run holds how much on the disk."),
    "rm": ("rankscope.collector.commands.rm", "Remove a run, or steps of it."),
    "run": ("rankscope.agent.launch", "Run a command with every torch process in it recorded."),
    "status": (
        "rankscope.agent.status",
        "Say who is connected to a collector, and how far behind.",
    ),
    "doctor": ("rankscope.agent.doctor", "Say what is wrong with a set-up, and what to do."),
    "deliver": ("rankscope.agent.deliver", "Send what ended processes left in their spools."),
}

#: Shown below the options; the other commands have theirs in what they say of themselves.
EXAMPLES = {
    "query": 'Example: rankscope query RUN "select rank, count(*) from records group by rank"',
    "ls": "Example: rankscope ls /data/runs/night",
    "export": "Example: rankscope export /data/runs/night --to dump --step 3-5 --rank 0-7",
    "compare": "Example: rankscope compare /data/runs/good /data/runs/night --step 0-10",
    "check": "Example: rankscope check /data/runs/night --json",
    "du": "Example: rankscope du /data/runs/night",
    "rm": "Example: rankscope rm /data/runs/night --steps 3-5 --dry-run",
    "deliver": "Example: rankscope deliver /var/tmp/spool --collector storage7:4317",
}


def main() -> None:
    """Entry point of the console script."""
    words = _completed_words() or sys.argv
    if len(words) > 1 and words[1] in COMMANDS:
        build({words[1]: load(words[1])})()
    else:
        build({name: _stub(help_line) for name, (_, help_line) in COMMANDS.items()})()


def _completed_words() -> list[str]:
    """The command line that a shell wants completed, if that is what this call is for."""
    if "_RANKSCOPE_COMPLETE" not in os.environ:
        return []
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    words = typed.split()
    return words if len(words) > 2 or typed[-1:].isspace() else words[:1]


def build(functions: dict[str, Callable[..., Any]]) -> typer.Typer:
    """A typer application of the given commands."""
    app = typer.Typer(
        name="rankscope",
        help="Watch every rank of a torch job, step by step.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # keeps sub-command style with a single command
    for name, function in functions.items():
        app.command(name, epilog=EXAMPLES.get(name))(function)
    return app


def load(name: str) -> Callable[..., Any]:
    """The function of one command; says which extra to install when a library is missing."""
    module, _ = COMMANDS[name]
    try:
        return getattr(importlib.import_module(module), name.replace("-", "_"))  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("rankscope"):
            raise
        raise SystemExit(
            f"rankscope {name}: the library {error.name!r} is missing; "
            "install it with: pip install 'rankscope[collector]'"
        ) from None


def _stub(help_line: str) -> Callable[[], None]:
    """Stands for a command in the overview, where nothing is imported."""

    def command() -> None:
        pass

    command.__doc__ = help_line
    return command


if __name__ == "__main__":
    main()
