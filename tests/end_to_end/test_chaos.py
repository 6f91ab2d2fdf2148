"""Every row of the chaos table: what was recorded is stored or counted, losses are the same."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from chaos.rows import ROWS
from chaos.stage import JOB, Nurseries, Stage, losses
from chaos.verdict import lines
from jobs import environment

AT_ONCE = 6


@pytest.fixture(scope="module")
def nurseries():
    made = Nurseries()
    yield made
    made.close()


@pytest.fixture(scope="module")
def outcomes(request, nurseries, tmp_path_factory):
    """Futures of the selected rows' outcomes; the table is printed when all are there."""
    folder = tmp_path_factory.mktemp("chaos")
    wanted = {
        item.callspec.params["row"].name
        for item in request.session.items
        if "row" in getattr(getattr(item, "callspec", None), "params", {})
    }
    rows = [row for row in ROWS if row.name in wanted]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {
            row.name: pool.submit(
                lambda row=row, n=n: Stage(row, folder / str(n), nurseries).play()
            )
            for n, row in enumerate(rows)
        }
        yield futures
    done = [f.result() for f in futures.values() if f.done() and f.exception() is None]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *lines(done), sep="\n")


@pytest.fixture(scope="module")
def bare_losses(nurseries, tmp_path_factory):
    """What the script computes without an agent: step -> loss."""
    folder = tmp_path_factory.mktemp("bare")
    plan = json.dumps({"folder": str(folder), "steps": 20, "bare": True})
    log = folder / "log"
    job = nurseries.jobs.start(JOB, plan, environ=environment(), output=log)
    assert job.wait(120) == 0, log.read_text()
    return dict(losses(log.read_text()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_after_recovery_the_store_has_what_was_produced(row, outcomes, bare_losses):
    outcome = outcomes[row.name].result()
    assert outcome.faults == []
    assert all(bare_losses[step] == loss for step, loss in outcome.losses)
