"""Every query of docs/sql.md, asked of a real run of two ranks with one NaN."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.collector.query import open_run

ROOT = Path(__file__).parent.parent.parent
QUERIES = dict(
    re.findall(r"^## (.+?)\n.*?```sql\n(.+?)```", (ROOT / "docs/sql.md").read_text(), re.M | re.S)
)


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Rows of the query below a heading that begins so."""
    folder = tmp_path_factory.mktemp("sql")
    job = [sys.executable, ROOT / "tests/support/sql_job.py", folder]
    ranks = [
        subprocess.Popen(job, env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in (0, 1)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    run = open_run(folder / "run")

    def ask(heading):
        (sql,) = [sql for title, sql in QUERIES.items() if title.startswith(heading)]
        return run.sql(sql).to_pylist()

    return ask


def test_there_are_ten_queries():
    assert len(QUERIES) == 10


def test_first_nan(ask):
    (row,) = ask("Where is the first NaN")
    assert row == {
        "step": 2,
        "rank": 1,
        "record": "Module.0.Linear.forward.0",
        "part": "input_args",
        "path": "0",
        "nan_count": 1,
    }


def test_ranks_that_differ(ask):
    (row,) = ask("Where do two ranks begin to differ")
    assert row["step"] == 2  # after the update of step 1, where rank 1 had a row less
    assert row["record"] == "Module.0.Linear.forward.0"
    assert row["rank0"] != row["rank1"]


def test_shapes_that_differ(ask):
    rows = ask("Which shapes")
    assert len(rows) == 5
    assert rows[0]["step"] == 1
    assert rows[0]["shapes"] == [[3, 4], [4, 4]]


def test_gradients(ask):
    rows = ask("How large are the gradients")
    assert len(rows) == 3 * 2 * 4
    assert {(row["module"], row["parameter"]) for row in rows} == {
        (f"Module.{layer}.Linear", name) for layer in (0, 2) for name in ("weight", "bias")
    }
    assert all(row["gradient_norm"] > 0 for row in rows if (row["step"], row["rank"]) != (2, 1))


def test_overflow(ask):
    assert ask("Which activations") == []


def test_dead_outputs(ask):
    rows = ask("Which outputs are dead")
    assert {row["record"] for row in rows} >= {"Module.1.ReLU.forward.0"}
    assert all(row["seen"] == 6 for row in rows)


def test_calls(ask):
    calls = {row["api"]: row["calls"] for row in ask("What is called how often")}
    assert calls["Functional.linear"] == 2 * 2 * 3
    assert calls["Functional.relu"] == 2 * 3


def test_places(ask):
    rows = ask("Where in the script")
    assert len(rows) == 2
    assert all(re.match(r"File .*, line \d+, in ", row["line"]) for row in rows)


def test_children(ask):
    rows = ask("What ran inside")
    assert [row["record"] for row in rows] == ["Functional.linear.0.forward"]


def test_completeness(ask):
    rows = ask("What is missing")
    assert [(row["step"], row["rank"]) for row in rows] == [
        (s, r) for s in range(3) for r in (0, 1)
    ]
    assert all(row["received"] == row["recorded"] > 0 for row in rows)
    assert all((row["dropped"], row["missing"]) == (0, None) for row in rows)
    assert all(0 < row["agent_percent"] < 100 for row in rows[2:])
