"""`rankscope check RUN`."""

import json as jsonlib
from typing import Annotated

import typer
from rich.console import Console

from ..analysis.check import check as checked
from ..analysis.screen import show_check
from ..analysis.sides import AnalysisError, open_side
from ..export import Selection
from .query import fail


def check(
    run: Annotated[str, typer.Argument(help="A run, or a dump directory.")],
    step: Annotated[str | None, typer.Option(help="Steps, such as 3-5 or 0,2,7-9.")] = None,
    rank: Annotated[str | None, typer.Option(help="Ranks, such as 0-7.")] = None,
    json: Annotated[bool, typer.Option("--json", help="All findings as JSON.")] = False,
) -> None:
    """Look for NaN, infinities and ranks that disagree. Exit status: 0 clean, 1 findings, 2 not
    checked."""
    try:
        steps, ranks = Selection.parse(step, "--step"), Selection.parse(rank, "--rank")
        result = checked(open_side(run, steps, ranks))
    except (AnalysisError, ValueError, OSError) as error:
        fail(str(error))
    if json:
        typer.echo(jsonlib.dumps(result.document(), indent=2))
    else:
        show_check(Console(markup=False, emoji=False, highlight=False), result)
    raise typer.Exit(1 if result.findings else 0)
