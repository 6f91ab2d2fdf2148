"""Real jobs whose processes are to be told apart: groups, replicas, restarts, helpers, hosts."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import jobs
import peer
import pytest
from fake_agent import Daemon, wait_for

from rankscope.collector.query import open_run

MSPROBE = peer.COMMAND
SCRIPT = Path(__file__).parent / "identity_job.py"


@pytest.fixture(scope="module")
def splitting_daemon(tmp_path_factory):
    daemon = Daemon(tmp_path_factory.mktemp("split") / "store", "--split-replicas")
    yield daemon
    assert daemon.stop() == 0


def processes(run):
    return open_run(run).processes().to_pylist()


def cli(*arguments):
    command = [sys.executable, "-m", "rankscope.collector.cli", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def calls(document):
    return list(document["data"])


def layout(run):
    return sorted(str(path.relative_to(run)) for path in run.glob("*/*"))


def heard(run, count, column="rank"):
    """Wait until so many processes are known by this column; their rows."""

    def look():
        try:
            rows = processes(run)
        except Exception:  # the run is not there yet
            return None
        known = [row for row in rows if row[column] is not None]
        return rows if len(known) == count else None

    return wait_for(look, timeout=60)


def test_two_groups_that_claim_the_same_ranks(job, shared_daemon, tmp_path):
    go = tmp_path / "go"
    started = [
        job(SCRIPT, "clashing", name=f"{n}/clashing", ranks=2, daemon=shared_daemon, GO=str(go))
        for n in "ab"
    ]
    run = started[0].dump
    heard(run, 4)
    wait_for(lambda: sum(bool(row["clash"]) for row in processes(run)) == 2)
    shown = cli("ls", run, "--all")
    go.touch()
    outputs = [one.finish().output for one in started]
    rows = {row["process"]: row for row in processes(run)}
    for row in rows.values():
        if not row["clash"]:
            continue
        first = rows[row["clash"]]
        assert first["rank"] == row["rank"]
        assert row["folder"] == f"rank{row['rank']}.{row['host']}.{row['pid']}"
        for one, other in ((row, first), (first, row)):
            line = f"process {other['pid']} on {other['host']} claims rank {one['rank']} as well"
            (text,) = [t for output in outputs for t in output.splitlines() if line in t]
            assert "rank_id=self.gpu_id" in text
            assert "--split-replicas" in text
        assert row["folder"] in shown
    assert len(layout(run)) == 8
    for folder in {row["folder"] for row in rows.values()}:
        for step in (0, 1):
            document = started[0].document(folder=folder, step=step)
            relus = [name for name in calls(document) if "relu" in name]
            assert len(relus) == 2, (folder, step)


def test_a_rank_id_keeps_groups_apart(job, shared_daemon, tmp_path):
    go = tmp_path / "go"
    started = [
        job(
            *(SCRIPT, "numbered"),
            **{"name": f"{first}/numbered", "ranks": 2, "daemon": shared_daemon},
            **{"FIRST": str(first), "GO": str(go)},
        )
        for first in (0, 2)
    ]
    run = started[0].dump
    heard(run, 4, "tp")
    go.touch()
    for one in started:
        assert "claims rank" not in one.finish().output
    rows = sorted(processes(run), key=lambda row: row["rank"])
    assert [(row["rank"], row["rank_source"]) for row in rows] == [(r, "rank_id") for r in range(4)]
    assert [(row["tp"], row["dp"], row["local_rank"]) for row in rows] == [(0, 0, 0), (1, 0, 1)] * 2
    assert layout(run) == [f"step{s}/rank{r}" for s in (0, 1) for r in range(4)]
    # The clock of ranks 1 and 3 is an hour behind: it orders nothing and hides nothing.
    behind = open_run(run).sql("select rank, min(time) as t from nodes group by rank order by rank")
    times = behind["t"].to_pylist()
    assert times[1] < times[0] - 3000
    assert times[3] < times[2] - 3000
    for rank in range(4):
        data = started[0].document(folder=f"rank{rank}", step=1)
        assert calls(data) == [f"Torch.relu.{n}.forward" for n in range(3)]
    whole = open_run(run).sql("select * from completeness order by step, rank").to_pylist()
    assert [(row["step"], row["rank"]) for row in whole] == [
        (s, r) for s in (0, 1) for r in range(4)
    ]
    assert all(row["received"] == row["recorded"] > 0 for row in whole)


@pytest.fixture(scope="module")
def replicas(splitting_daemon, tmp_path_factory):
    """Two 2-rank groups in the shape of a serving engine: no launcher's variables, nothing said in
    the script. One ended job for each worker."""
    folder = tmp_path_factory.mktemp("workers")
    go = folder / "go"
    started = [
        jobs.start(
            *(SCRIPT, "worker"),
            **{"folder": folder / f"{replica}{rank}/replicas", "daemon": splitting_daemon},
            **{"ADDRESS": f"file://{folder}/store{replica}", "WORKER": str(rank)},
            **{"VALUE": str(10 * replica + rank), "GO": str(go), "config": {"level": "mix"}},
        )
        for replica in (0, 1)
        for rank in (0, 1)
    ]
    try:
        run = started[0].dump
        wait_for(lambda: {row["rank"] for row in heard(run, 4)} == {0, 1, 2, 3}, timeout=60)
        go.touch()
        return [one.finish() for one in started]
    finally:
        for one in started:
            one.process.kill()


def test_workers_that_are_each_a_group_become_replicas(replicas):
    run = replicas[0].dump
    assert not any("claims rank" in one.output for one in replicas)
    rows = sorted(processes(run), key=lambda row: row["rank"])
    assert [(r["replica"], r["claimed_rank"]) for r in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rows[0]["group"] == rows[1]["group"] != rows[2]["group"] == rows[3]["group"]
    assert layout(run) == [f"step0/rank{r}" for r in range(4)]
    sums = []
    for rank in range(4):
        data = replicas[0].document(folder=f"rank{rank}")["data"]
        assert next(iter(data)) == "Torch.relu.0.forward"
        sums.append(data["Distributed.all_reduce.0.forward"]["output"][0]["Max"])
    assert sorted(sums) == [1.0, 1.0, 21.0, 21.0]
    assert sums[0] == sums[1]  # those of one replica stand together
    assert "replica1/rank0" in cli("ls", run)
    ranks = open_run(run).sql("select distinct rank from records order by rank")
    assert ranks["rank"].to_pylist() == [0, 1, 2, 3]


@pytest.mark.skipif(MSPROBE is None, reason="needs msProbe: MSPROBE or msprobe on the path")
def test_msprobe_reads_the_layout_of_replicas(replicas, tmp_path):
    run = replicas[0].dump
    compare = [MSPROBE, "compare", "-tp", run / "step0", "-gp", run / "step0", "-o", tmp_path / "c"]
    subprocess.run(compare, check=True, capture_output=True)
    tables = sorted((tmp_path / "c").glob("compare_result_rank*.csv"))
    assert len(tables) == 4
    for table in tables:
        with table.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
        assert rows
        assert {row["Result"] for row in rows} == {"pass"}
    graph = [MSPROBE, "graph_visualize", "-tp", run, "-o", tmp_path / "g"]
    subprocess.run(graph, check=True, capture_output=True)
    assert len(list((tmp_path / "g").glob("build_*.vis.db"))) == 1


def test_an_elastic_restart_shows_the_newest_attempt_of_each_step(job, shared_daemon, tmp_path):
    done = job(
        SCRIPT, "elastic", name="elastic", ranks=2, restarts=1, daemon=shared_daemon
    ).finish()
    run = done.dump
    by_rank = {}
    for row in processes(run):
        by_rank.setdefault(row["rank"], []).append((row["attempt"], row["folder"]))
    assert {r: sorted(found) for r, found in by_rank.items()} == {
        r: [(0, f"rank{r}"), (1, f"rank{r}")] for r in (0, 1)
    }
    assert layout(run) == [f"step{s}/rank{r}" for s in range(3) for r in (0, 1)]
    for rank in (0, 1):
        counts = [len(calls(done.document(folder=f"rank{rank}", step=s))) for s in range(3)]
        assert counts == [5, 5, 1]
    stored = open_run(run).sql(
        "select attempt, step, count(distinct record) as n from records join processes using"
        " (process) group by all order by all"
    )
    assert list(map(tuple, zip(*stored.to_pydict().values(), strict=True))) == [
        *((0, 0, 2), (0, 1, 2), (0, 2, 1)),
        *((1, 0, 5), (1, 1, 5)),
    ]
    cli("export", run, "--to", tmp_path / "first", "--attempt", "0")
    assert layout(tmp_path / "first") == layout(run)
    old = json.loads((tmp_path / "first/step0/rank1/dump.json").read_text())
    assert len(calls(old)) == 2
    assert "attempt" in cli("ls", run)


def test_a_helper_of_a_rank_stays_apart_and_is_tied_to_it(job, shared_daemon):
    """It inherits the launcher's variables, which are its parent's; a forked child records
    nothing and says so."""
    done = job(
        *(SCRIPT, "helper"),
        **{"name": "helper", "daemon": shared_daemon, "RANK": "0", "WORLD_SIZE": "1"},
    ).finish()
    told = json.loads(done.output.splitlines()[-1])
    rank, helper = sorted(processes(done.dump), key=lambda row: row["joined"])
    assert (rank["rank"], rank["folder"], rank["parent_process"]) == (0, "rank0", None)
    assert (helper["rank"], helper["folder"]) == (None, f"proc{told['helper']}")
    assert (helper["pid"], helper["parent_process"]) == (told["helper"], rank["process"])
    assert "claims rank" not in done.output
    assert done.output.count("forked from one that records") == 1
    assert len(calls(done.document(folder="rank0"))) == 1
    assert layout(done.dump) == [f"step0/proc{told['helper']}", "step0/rank0"]


def can_unshare():
    command = ["unshare", "--uts", "--pid", "--fork", "hostname", "elsewhere"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_unshare(), reason="needs the right to make namespaces")
def test_one_pid_in_two_containers_of_one_name(job, shared_daemon, tmp_path):
    go = tmp_path / "go"
    command = ["unshare", "--uts", "--pid", "--fork", "sh", "-c"]
    started = [
        job(
            *(SCRIPT, "alone"),
            **{"name": f"{n}/containers", "daemon": shared_daemon, "GO": str(go)},
            under=[*command, 'hostname twin && exec "$@"', "sh"],
        )
        for n in "ab"
    ]
    run = started[0].dump
    heard(run, 2, "folder")
    go.touch()
    for one in started:
        assert "1" in one.finish().output.splitlines()
    first, second = processes(run)
    assert (first["host"], first["pid"]) == (second["host"], second["pid"]) == ("twin", 1)
    assert first["pid_namespace"] != second["pid_namespace"]
    assert [first["folder"], second["folder"]] == ["proc1", f"proc1.{second['process'][:8]}"]
    for folder in (first["folder"], second["folder"]):
        assert len(calls(started[0].document(folder=folder))) == 2
