"""What commands of the analysis print."""

from rich.console import Console

from .check import Checked
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


def show_check(console: Console, result: Checked) -> None:
    """Findings, the first of them in full, and notices."""
    if not console.is_terminal:
        console.width = 500
    console.print(f"{result.side.path}: {result.side.table.num_rows} leaves checked")
    if result.first is None:
        console.print("clean: no NaN, no infinity that is not meant, and the ranks agree")
    for number, finding in enumerate(result.findings):
        head = "first finding" if number == 0 else "then"
        ranks = ", ".join(map(str, finding.ranks))
        console.print(
            f"{head}: {finding.kind}, step {finding.step}, rank {ranks}\n  {finding.name}"
        )
        console.print(f"  {finding.argument}: {finding.why}")
    for notice in result.notices:
        ranks = ", ".join(map(str, notice.ranks))
        place = f"step {notice.step}, rank {ranks}: {notice.name} {notice.argument}"
        console.print(f"notice: {notice.kind}, {place}: {notice.why}")
