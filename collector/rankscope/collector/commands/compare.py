"""`rankscope compare A B`."""

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import Progress

from ..analysis.compare import Comparison, Options
from ..analysis.compare import compare as compared
from ..analysis.outputs import write_reports
from ..analysis.screen import show_comparison
from ..analysis.sides import AnalysisError, open_side
from ..export import Selection
from .query import fail

_SIDE = "RUN, RUN.rankscope, a dump path, a step or rank folder, or a dump.json."


def compare(
    a: Annotated[str, typer.Argument(help=f"What is looked at: {_SIDE}")],
    b: Annotated[str, typer.Argument(help="What it is held against.")],
    step: Annotated[str | None, typer.Option(help="Steps, such as 3-5 or 0,2,7-9.")] = None,
    rank: Annotated[str | None, typer.Option(help="Ranks, such as 0-7.")] = None,
    map_ranks: Annotated[
        str | None, typer.Option(help="Ranks of A and of B that belong together: 0:0,1:4.")
    ] = None,
    map_names: Annotated[
        Path | None, typer.Option(help="YAML: parts of A's names to the same parts in B.")
    ] = None,
    fuzzy: Annotated[
        bool, typer.Option("--fuzzy", help="Pair API calls by order and short name.")
    ] = False,
    equal_nan: Annotated[bool, typer.Option(help="Whether NaN on both sides is equal.")] = True,
    tolerances: Annotated[
        Path | None, typer.Option(help="YAML: record patterns to the error that passes.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="A folder for compare.csv, compare.xlsx and compare.html.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The first divergence as JSON.")] = False,
) -> None:
    """Say where two runs or dumps begin to differ. Exit status: 0 equal, 1 different, 2 neither."""
    written: list[str] = []
    try:
        steps, ranks = Selection.parse(step, "--step"), Selection.parse(rank, "--rank")
        options = Options(_ranks(map_ranks), _names(map_names), fuzzy, equal_nan)
        allowed = _numbers(tolerances)
        other = open_side(b, steps, ranks if map_ranks is None else Selection())
        with _progress(json) as progress:
            result = compared(open_side(a, steps, ranks), other, options, progress)
        if output is not None:
            written = write_reports(result, output, allowed)
    except (AnalysisError, ValueError, OSError, yaml.YAMLError) as error:
        fail(str(error))
    if json:
        typer.echo(jsonlib.dumps(document(result), indent=2))
    else:
        show_comparison(Console(markup=False, emoji=False, highlight=False), result)
        for line in written:
            typer.echo(line)
    raise typer.Exit(0 if result.first is None else 1)


def document(result: Comparison) -> dict[str, Any]:
    """What `--json` prints."""
    return {"first": None if result.first is None else result.first.document()}


def _progress(quiet: bool) -> Progress:
    """On standard error, and only where somebody looks."""
    console = Console(stderr=True)
    return Progress(console=console, disable=quiet or not console.is_terminal, transient=True)


def _numbers(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict) or not all(
        isinstance(value, int | float) for value in content.values()
    ):
        raise ValueError(f"--tolerances {path}: expected a mapping of patterns to numbers")
    return {str(key): float(value) for key, value in content.items()}


def _ranks(text: str | None) -> dict[int, int] | None:
    if text is None:
        return None
    pairs = [item.split(":") for item in text.split(",")]
    try:
        return {int(one): int(other) for one, other in pairs}
    except ValueError:
        raise ValueError(f"--map-ranks {text!r}: expected pairs such as 0:0,1:4") from None


def _names(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
        raise ValueError(f"--map-names {path}: expected a mapping of names to names")
    return {str(key): value for key, value in content.items()}
