"""`rankscope rm RUN`."""

from typing import Annotated

import typer

from ..export import Selection
from ..query import Run, RunNotFoundError, open_run
from ..removal import Plan, plan, remove, remove_run
from ..store.errors import StoreError
from .du import size
from .ls import spans
from .query import fail


def rm(
    run: Annotated[str, typer.Argument(help="RUN, RUN.rankscope, or a store with one run.")],
    steps: Annotated[
        str | None, typer.Option(help="Only these steps, such as 3-5 or 0,2,7-9.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a run, or steps of it, and the tensors that no record refers to any more."""
    try:
        opened = open_run(run)
        wanted = Selection.parse(steps, "--steps") if steps is not None else None
        if wanted is None:
            _remove_run(opened, dry_run, yes)
        else:
            found = plan(opened, wanted)
            _remove_steps(opened, found, steps or "", dry_run, yes)
    except (RunNotFoundError, StoreError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot remove from {run}: {error}")


def _remove_run(run: Run, dry_run: bool, yes: bool) -> None:
    if live := plan(run).live:
        fail(f"{run.path}: {len(live)} processes still record; --steps removes what is complete")
    freed = size(remove_run(run, dry_run=True))
    if dry_run:
        typer.echo(f"would remove {run.path} and {run.store}: {freed}")
        return
    _confirm(f"remove {run.path} and {run.store}, {freed}", yes)
    remove_run(run)
    typer.echo(f"removed {run.path}: {freed} freed")


def _remove_steps(run: Run, found: Plan, steps: str, dry_run: bool, yes: bool) -> None:
    if found.open:
        typer.echo(f"not complete yet, kept: steps {spans(found.open)}", err=True)
    if not found.steps:
        typer.echo(f"no complete step among {steps}; looking for tensors nothing refers to")
    would = remove(run, found, dry_run=True)
    what = f"steps {spans(found.steps)}: " if found.steps else ""
    text = f"{what}{would.tensors} tensors, {size(would.bytes)}"
    if dry_run:
        typer.echo(f"would remove {text}{_waiting(would.waiting)}")
        return
    _confirm(f"remove {text}", yes)
    freed = remove(run, found)
    typer.echo(
        f"removed {what}{freed.tensors} tensors, {size(freed.bytes)} freed{_waiting(freed.waiting)}"
    )


def _waiting(count: int) -> str:
    if not count:
        return ""
    return f"; {size(count)} more may go later: the run is open, and they were used of late"


def _confirm(text: str, yes: bool) -> None:
    if not yes and not typer.confirm(f"{text}?"):
        raise typer.Exit(1)
