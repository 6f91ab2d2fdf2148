"""`rankscope export RUN --to DIR`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

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
    name: Annotated[
        str | None, typer.Option(help="Records, such as 'Module.layers.0.*'; a shell pattern.")
    ] = None,
    format: Annotated[
        str, typer.Option(help="msprobe, or safetensors: only the captured tensors.")
    ] = "msprobe",
) -> None:
    """Write msProbe's layout (dump.json and its companions) from a run's tables."""
    try:
        parts = exporting.Parts(name, format)
        steps = exporting.Selection.parse(step, "--step")
        ranks = exporting.Selection.parse(rank, "--rank")
        opened = open_run(run)
        with _bar() as progress:
            folders = exporting.export(opened, to, steps, ranks, instance, attempt, parts, progress)
            written = sum(1 for _ in folders)
    except (RunNotFoundError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write {to}: {error.strerror}")
    if not written:
        chosen = f"--step {step or 'all'} --rank {rank or 'all'} --name {name or 'all'}"
        fail(f"nothing to export from {run} with {chosen}")
    typer.echo(f"{written} folders written below {to}")


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar over steps on standard error; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("steps", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
