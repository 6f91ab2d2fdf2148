"""Writing what a comparison found: CSV, XLSX and HTML."""

from collections.abc import Mapping
from pathlib import Path

from .compare import Comparison
from .report import write_html
from .sheets import write_csv, write_xlsx
from .table import table
from .verdicts import verdicts


def write_reports(
    comparison: Comparison, folder: Path, tolerances: Mapping[str, float] | None = None
) -> list[str]:
    """compare.csv, compare.xlsx and compare.html in the folder, which is made; a line on each."""
    folder.mkdir(parents=True, exist_ok=True)
    verdict = verdicts(comparison.view.figures, comparison.origins, tolerances)
    rows = table(comparison, verdict)
    write_csv(rows, folder / "compare.csv")
    beyond = write_xlsx(rows, folder / "compare.xlsx", verdict.level.tolist())
    write_html(comparison, verdict, folder / "compare.html")
    lines = [f"written: {folder / name}" for name in ("compare.csv", "compare.html")]
    more = f", without the last {beyond} rows" if beyond else ""
    return [*lines, f"written: {folder / 'compare.xlsx'}{more}"]
