"""The table of docs/models.md: measure.py [CASE...] prints its rows.

One row a case and level: records, equal rows, rows that differ by a rule, results that are not
those of a run without a tool (of ours, of msProbe). Needs the libraries and msProbe:
make test-models.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import model_runs
from peer_rules import RULES
from peerdiff import compare


def row(runs, case, level):
    bare, ours, theirs = (
        runs.bare(case),
        runs.get(case, "rankscope", level),
        runs.get(case, "msprobe", level),
    )
    results = sum(map(len, bare.bits.values()))
    cells = [case, level, "", "", "", f"{changed(ours, bare)} of {results}"]
    if theirs.status:
        return [*cells, f"ends with status {theirs.status}"]
    report = compare(theirs.dump, ours.dump, RULES, changed=bool(theirs.changed(bare)))
    rules = ", ".join(f"{name} {count}" for name, count in report.by_rule.items())
    if report.unexplained:
        rules += f" **unexplained {len(report.unexplained)}**"
        print(*report.unexplained[:12], sep="\n", file=sys.stderr, flush=True)
    cells[2:5] = report.records, report.equal, rules
    return [*cells, changed(theirs, bare)]


def changed(run, bare):
    return len(run.changed(bare)) if run.status == 0 else f"ends with status {run.status}"


def main():
    with tempfile.TemporaryDirectory() as folder:
        runs = model_runs.Runs(Path(folder))
        for case in sys.argv[1:] or model_runs.CASES:
            for level in model_runs.LEVELS:
                print("|", " | ".join(map(str, row(runs, case, level))), "|", flush=True)
        runs.close()


if __name__ == "__main__":
    main()
