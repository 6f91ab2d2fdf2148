"""docs/benchmarks.md and its picture, from the rows that compare.py measured."""

import os
import platform
import subprocess
from html import escape
from pathlib import Path

import torch

Row = dict[str, float]

HEAD = """# Benchmarks

Made by `make bench PEER=/path/to/python PAGE=docs/benchmarks.md`; PEER is an interpreter with
`mindstudio-probe`.

Both tools record the same training steps of a small GPT, in turn, in fresh processes, torch on one
thread; each round also runs a debugger that does nothing, whose times are taken off. Medians over
{rounds} rounds.

- **loop**: milliseconds that recording adds to a step inside the training loop
- **all**: the same until the process has ended and everything is durable on disk
- **idle**: a step that is not recorded, over the same step without a debugger
- **MB**: on disk; rankscope's holds its tables beside the `dump.json` files

{machine}

![Added time per step, share of msProbe's]({picture})

{table}
"""


def write(path: Path, rows: dict[str, tuple[Row, Row | None]], rounds: int) -> None:
    """Write the page, and `benchmarks.svg` in the folder `pictures` beside it."""
    picture = path.parent / "pictures" / "benchmarks.svg"
    picture.parent.mkdir(exist_ok=True)
    picture.write_text(drawn(rows))
    page = HEAD.format(
        rounds=rounds,
        machine=machine(),
        picture=picture.relative_to(path.parent),
        table=table(rows),
    )
    path.write_text(page)


def machine() -> str:
    """One line on where and with what was measured."""
    cpus = Path("/proc/cpuinfo").read_text()
    name = next((x.partition(":")[2].strip() for x in cpus.splitlines() if "model name" in x), "?")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    load = os.getloadavg()[1]
    return (
        f"Machine: {os.cpu_count()} cores of {name}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, commit {commit}, load average {load:.1f} while it ran."
    )


def table(rows: dict[str, tuple[Row, Row | None]]) -> str:
    """A row a case."""
    titles = ["loop ms", "msProbe", "ratio", "all ms", "msProbe", "ratio"]
    titles += ["idle", "msProbe", "MB", "msProbe"]
    lines = [f"| case | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for case, (own, peer) in rows.items():
        cells = [case]
        for key in ("loop", "all"):
            cells.append(f"{own[key]:.1f}")
            cells += [f"{peer[key]:.0f}", f"**{own[key] / peer[key]:.3f}**"] if peer else ["", ""]
        for key, digits in (("idle", 2), ("MB", 0)):
            cells += [f"{own[key]:.{digits}f}", f"{peer[key]:.{digits}f}" if peer else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def drawn(rows: dict[str, tuple[Row, Row | None]]) -> str:
    """Bars: rankscope's loop and all as shares of msProbe's."""
    bars, y = [], 40
    for case, (own, peer) in rows.items():
        if peer is None:
            continue
        bars.append(f'<text x="150" y="{y + 17}" text-anchor="end">{escape(case)}</text>')
        for key, colour in (("loop", "#1f6feb"), ("all", "#8c959f")):
            share = own[key] / peer[key]
            width = max(1.0, min(share, 1.0) * 400)
            bars.append(
                f'<rect x="160" y="{y}" width="{width:.0f}" height="11" fill="{colour}"/>'
                f'<text x="{166 + width:.0f}" y="{y + 10}" font-size="11">{share:.2f}</text>'
            )
            y += 13
        y += 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {y + 10}" '
        'font-family="sans-serif" font-size="13">\n'
        f'<rect width="640" height="{y + 10}" fill="white"/>\n'
        '<text x="160" y="22">time added by rankscope, msProbe = 1: '
        '<tspan fill="#1f6feb">in the loop</tspan>, '
        '<tspan fill="#8c959f">until all is on disk</tspan></text>\n'
        f'<line x1="560" x2="560" y1="32" y2="{y}" stroke="#cf222e" stroke-dasharray="4"/>\n'
        + "\n".join(bars)
        + "\n</svg>\n"
    )
