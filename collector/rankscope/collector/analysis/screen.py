"""What commands of the analysis print."""

from rich.console import Console

from .compare import Comparison


def show_comparison(console: Console, result: Comparison) -> None:
    """The summary on the screen: notes, the first divergence, advice."""
    if not console.is_terminal:
        console.width = 500  # a pipe has no width: nothing is folded there
    console.print(f"A {result.a.path}\nB {result.b.path}")
    rows, units = len(result.view.bad), len(result.units)
    console.print(f"{rows} leaves of {units} steps and ranks compared")
    for note in result.notes:
        console.print(f"note: {note}")
    if result.first is None:
        console.print("no divergence")
        return
    first = result.first
    ranks = ", ".join(map(str, first.ranks))
    console.print(f"\nfirst divergence: step {first.step}, rank {ranks}\n  {first.name}")
    console.print(f"  {first.argument}: {first.why}")
    for line in result.advice:
        console.print(f"  - {line}")
