"""msProbe's own tools on our output: compare, graph_visualize and data2db."""

import csv
import json
import math
import sqlite3
import subprocess

import model_runs
import peer
import pytest

pytestmark = pytest.mark.skipif(
    peer.COMMAND is None, reason="needs msProbe: MSPROBE, or make test-models"
)

#: One process, and two ranks; no row of either differs from msProbe's own.
CASES = ["plain.data_loader", "plain.ddp_accumulation"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = model_runs.Runs(tmp_path_factory.mktemp("interop"))
    yield made
    made.close()


@pytest.fixture(params=CASES)
def dumps(request, runs):
    """Ours and msProbe's of the same script at level mix."""
    return [runs.get(request.param, tool, "mix").dump for tool in ("rankscope", "msprobe")]


def msprobe(*arguments):
    command = [peer.COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr


def compared(target, golden, folder):
    """Rows of all tables of `msprobe compare`, which lists what the target has."""
    msprobe("compare", "-tp", target, "-gp", golden, "-o", folder)
    rows = []
    for table in sorted(folder.glob("compare_result_*.csv")):
        with table.open(newline="", encoding="utf-8-sig") as file:
            rows += csv.DictReader(file)
    return rows


def unequal(row):
    """Why a row is not equal; msProbe's "pass" leaves room, and passes rows without a partner."""
    if "N/A" in (row["NPU Name"], row["Bench Name"]):
        return "no partner"
    columns = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
    if 0 < max(size(row["NPU max"]), size(row["NPU min"])) < 2.0**-60:
        columns = columns[:2]  # squares are below the smallest float32: msProbe's norm is 0
    elif row["Result"] == "error":  # a warning only sets outputs against inputs, as those are
        return row["Result"]
    norm = size(row["NPU l2norm"])
    elements = math.prod(json.loads(row["NPU Tensor Shape"])) if norm else 1
    # Sums may differ by their rounding.
    allowed = {"Mean diff": 2e-6 * norm / math.sqrt(elements), "L2norm diff": 2e-6 * norm}
    for column in columns:
        if size(row[column]) > allowed.get(column, 0.0):
            return f"{column} {row[column]}"
    return None


def size(text):
    """A number without its sign, and 0 for the words that stand where neither side has one."""
    try:
        return abs(float(text))
    except ValueError:
        return 0.0


def test_compare_finds_every_row_equal(dumps, tmp_path):
    """Both ways: a record that only the golden side has is in no table."""
    ours, theirs = (dump / "step0" for dump in dumps)
    there, back = compared(ours, theirs, tmp_path / "a"), compared(theirs, ours, tmp_path / "b")
    assert [(r["NPU Name"], why) for r in there + back if (why := unequal(r))] == []
    assert len(there) == len(back) > 50


def query(database, text):
    connection = sqlite3.connect(database)
    try:
        return connection.execute(text).fetchall()
    finally:
        connection.close()


def test_graph_visualize_builds_from_the_dump_path(dumps, tmp_path):
    ours, _ = dumps
    msprobe("graph_visualize", "-tp", ours, "-o", tmp_path)
    (graph,) = tmp_path.glob("build_*.vis.db")
    names = {name for (name,) in query(graph, "select node_name from tb_nodes")}
    for tree in ours.glob("step*/*/construct.json"):
        assert json.loads(tree.read_text()).keys() <= names


TREND = """select rank, step, target_name, metric_name, max, min
    from trend_data join monitoring_targets using (target_id)
    join monitoring_metrics using (metric_id) order by 1, 2, 3, 4"""


def test_data2db_imports_what_it_imports_of_its_own(dumps, tmp_path):
    found = []
    for name, dump in zip("ab", dumps, strict=True):
        msprobe("data2db", "--db", tmp_path / name, "--data", dump)
        found.append(query(tmp_path / name / "dump_data.trend.db", TREND))
    assert found[0] == found[1]
    assert len(found[0]) > 100
