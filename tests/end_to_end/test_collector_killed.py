"""The collector dies in mid-job and another takes its place: nothing is lost or doubled."""

from pathlib import Path

import jobs
import pytest
from fake_agent import Daemon, wait_for

from rankscope.collector.query import RunNotFoundError, open_run

SCRIPT = Path(__file__).with_name("interrupted_job.py")
STEPS = range(12)


def stored_steps(run_path):
    try:
        return len(open_run(run_path).sql("select distinct step from nodes"))
    except RunNotFoundError:
        return 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The job's folder of results, and its run, after a kill -9 and a new collector."""
    tmp_path = tmp_path_factory.mktemp("killed")
    first = Daemon(tmp_path / "store")
    job = jobs.start(SCRIPT, tmp_path, folder=tmp_path / "job", ranks=2, daemon=first)
    try:
        wait_for((tmp_path / "middle").exists, 60)
        wait_for(lambda: stored_steps(job.dump) >= 3, 60)
        first.kill()
        (tmp_path / "resume").touch()
        second = Daemon(tmp_path / "store", "--listen", first.address)
        try:
            assert second.address == first.address
            yield job.finish()
        finally:
            assert second.stop() == 0
    finally:
        first.process.kill()
        job.process.kill()


def rows(job, statement):
    return open_run(job.dump).sql(statement).to_pylist()


def test_each_process_has_every_event_once(finished):
    counts = rows(
        finished,
        "select process, count(*) as n, count(distinct seq) as events, min(seq) as first,"
        " max(seq) as last from nodes group by process",
    )
    assert len(counts) == 2
    for count in counts:
        assert count["n"] == count["events"] == count["last"] + 1
        assert count["first"] == 0


def test_each_event_has_its_leaves_once(finished):
    wrong = rows(
        finished,
        "select * from (select process, seq, leaves from nodes) n left join"
        " (select process, seq, count(*) as n, count(distinct leaf) as leaves from records"
        " group by process, seq) r using (process, seq)"
        " where n.leaves <> coalesce(r.n, 0) or r.n <> r.leaves",
    )
    assert wrong == []


def test_no_event_was_dropped_and_every_step_ended(finished):
    events = rows(finished, "select process, step, event, events from steps")
    assert not [row for row in events if row["event"] == "dropped"]
    ended = {(r["process"], r["step"]): r["events"] for r in events if r["event"] == "end"}
    stored = rows(finished, "select process, step, count(*) as n from nodes group by process, step")
    assert {(row["process"], row["step"]): row["n"] for row in stored} == ended
    assert len(ended) == 2 * len(STEPS)


def test_every_document_is_complete_and_alike(finished):
    for rank in (0, 1):
        documents = [finished.document(folder=f"rank{rank}", step=step) for step in STEPS]
        names = list(documents[0]["data"])
        assert "Functional.linear.1.forward" in names
        assert [list(document["data"]) for document in documents] == [names] * len(STEPS)


def test_each_rank_says_once_that_the_collector_is_lost(finished):
    said = [line for line in finished.output.splitlines() if line.startswith("rankscope:")]
    lost = [line for line in said if "lost the collector" in line]
    assert len(lost) == 2
    assert len(said) == 4  # and where its records go
