"""`rankscope export RUN --to DIR`."""

from pathlib import Path
from typing import Annotated

import typer

from .. import export as exporting
from ..query import RunNotFoundError, open_run
from .query import fail


def export(
    run: Annotated[str, typer.Argument(help="RUN, RUN.rankscope, or a store with one run.")],
    to: Annotated[Path, typer.Option(help="A new or empty folder.")],
    step: Annotated[str | None, typer.Option(help="Steps, such as 3-5 or 0,2,7-9.")] = None,
    rank: Annotated[str | None, typer.Option(help="Ranks, such as 0-7.")] = None,
    instance: Annotated[
        str | None, typer.Option(help="A launch other than the newest, as `ls --all` names it.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Only what ran after that many elastic restarts.")
    ] = None,
) -> None:
    """Write msProbe's layout (dump.json and its companions) from a run's tables."""
    try:
        steps = exporting.Selection.parse(step, "--step")
        ranks = exporting.Selection.parse(rank, "--rank")
        folders = exporting.export(open_run(run), to, steps, ranks, instance, attempt)
        written = sum(1 for _ in folders)
    except (RunNotFoundError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write {to}: {error.strerror}")
    if not written:
        fail(f"nothing to export from {run} with --step {step or 'all'} --rank {rank or 'all'}")
    typer.echo(f"{written} folders written below {to}")
