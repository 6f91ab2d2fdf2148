"""`rankscope run -- COMMAND`: the command with every Python process in it that runs a model
recorded, without a change in its scripts.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rankscope.agent.run import STARTUP


def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    config: Annotated[
        Path | None, typer.Option(help="A config.json in msProbe's form; default: all defaults.")
    ] = None,
    step_on: Annotated[
        str,
        typer.Option(
            help="What ends a step: optimizer, forward, or MODULE:FUNCTION of an importable module."
        ),
    ] = "optimizer",
) -> None:
    """Run a command with every torch process in it recorded.

    Example: rankscope run --config cfg.json -- torchrun --nproc-per-node 8 train.py
    """
    if config is not None and not config.is_file():
        _fail(f"--config {config}: no such file")
    program = shutil.which(command[0])
    if program is None:
        _fail(f"{command[0]}: no such command; write rankscope run [OPTIONS] -- COMMAND ...")
    environ = os.environ | {"RANKSCOPE_AUTO": "1", "RANKSCOPE_STEP_ON": step_on}
    if config is not None:
        environ["RANKSCOPE_CONFIG"] = str(config.resolve())
    path = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(path)
    sys.stdout.flush()
    os.execve(program, command, environ)


def _fail(text: str) -> NoReturn:
    typer.echo(f"rankscope run: {text}", err=True)
    raise typer.Exit(2)
