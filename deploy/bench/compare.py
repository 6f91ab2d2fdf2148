"""rankscope beside msProbe on the same steps, in turn, in fresh processes: `make bench
PEER=/path/to/python`.

PEER is an interpreter with mindstudio-probe; without it only rankscope's own figures are printed.
Each round also runs a debugger that does nothing, whose times are taken off. Columns, medians over
the rounds, ms a step:

    loop  added inside the training loop
    all   added until the process has ended and everything is on disk
    idle  a step that is not recorded, over the same step without a debugger

"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import page

CASES = {
    "tiny L1": ["--workload", "tiny", "--level", "L1", "--steps", "20"],
    "tiny mix": ["--workload", "tiny", "--level", "mix", "--steps", "20"],
    "small L0": ["--workload", "small", "--level", "L0", "--steps", "8"],
    "small mix": ["--workload", "small", "--level", "mix", "--steps", "8"],
    "small mix md5": ["--workload", "small", "--summary", "md5", "--steps", "6"],
    "small mix xor": ["--workload", "small", "--summary", "xor", "--steps", "6"],
    "small mix tensor": ["--workload", "small", "--task", "tensor", "--steps", "3"],
    "wide mix": ["--workload", "wide", "--level", "mix", "--steps", "4"],
}
SCRIPT = Path(__file__).with_name("overhead.py")


def run(python: str, tool: str, options: list[str]) -> dict[str, float]:
    """One process: {"loop", "all", "idle", "MB"}; raises with its output when it fails."""
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        command = [python, str(SCRIPT), "--tool", tool, "--out", str(folder / "dump"), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        ended = time.time()
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-800:]}\n{done.stderr[-1600:]}")
        found = json.loads([x for x in done.stdout.splitlines() if x.startswith('{"bare"')][-1])
        size = sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file())
        whole = (ended - found["begin"]) * 1e3 / found["steps"]
        return {
            "loop": found["recorded"] - found["bare"],
            "all": whole - found["bare"],
            "idle": found["idle"] / found["bare"],
            "MB": size / 1e6,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def median(rounds: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the rounds, the do-nothing debugger's taken off."""
    rows = [
        {
            "loop": r["loop"] - b["loop"],
            "all": r["all"] - b["all"],
            "idle": r["idle"] / b["idle"],
            "MB": r["MB"],
        }
        for r, b in zip(rounds, base, strict=True)
    ]
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", default="", help="python with mindstudio-probe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--page", type=Path, help="write a page and its picture, too")
    options = parser.parse_args()
    print("| case | loop ms | all ms | idle | MB | loop / msProbe | all / msProbe | MB / msProbe |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    rows = {}
    for case in options.cases.split(","):
        base, ours, peers = [], [], []
        for _ in range(options.rounds):
            base.append(run(sys.executable, "nothing", CASES[case]))
            ours.append(run(sys.executable, "rankscope.agent", CASES[case]))
            if options.peer:
                peers.append(run(options.peer, "msprobe.pytorch", CASES[case]))
        own, peer = median(ours, base), median(peers, base) if peers else None
        rows[case] = own, peer
        cells = [f"{own[k]:.1f}" for k in ("loop", "all")]
        cells += [f"{own['idle']:.2f}", f"{own['MB']:.1f}"]
        keys = ("loop", "all", "MB")
        cells += [f"{own[k] / peer[k]:.3f}" for k in keys] if peer else [""] * 3
        print(f"| {case} | {' | '.join(cells)} |", flush=True)
    if options.page:
        page.write(options.page, rows, options.rounds)


if __name__ == "__main__":
    main()
