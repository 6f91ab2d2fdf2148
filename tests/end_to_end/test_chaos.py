"""Every row of the chaos table: what was recorded is stored or counted, losses are the same."""

import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chaos.kills import kill_writer_often, verify_store
from chaos.resident import growth, watch
from chaos.rows import LONG, ROWS
from chaos.stage import JOB, Nurseries, Row, Stage, losses
from chaos.verdict import lines
from jobs import environment

AT_ONCE = 6
WRITER = Path(__file__).parents[1] / "support" / "crash_writer.py"


@pytest.fixture(scope="module")
def nurseries():
    made = Nurseries()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """In memory where that is large enough: a neighbour's disk traffic is no fault of the table."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 4 << 30:
        yield tmp_path_factory.mktemp("chaos")
        return
    with tempfile.TemporaryDirectory(prefix="rankscope-chaos-", dir=memory) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def outcomes(request, nurseries, folder):
    """Futures of the selected rows' outcomes; the table is printed when all are there."""
    wanted = {
        item.callspec.params["row"].name
        for item in request.session.items
        if item.path == request.path and "row" in getattr(item, "fixturenames", ())
    }
    rows = [row for row in (*ROWS, *LONG) if row.name in wanted]
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


@pytest.mark.parametrize(
    "row",
    [*ROWS, *(pytest.param(row, marks=pytest.mark.soak) for row in LONG)],
    ids=lambda r: r.name,
)
@pytest.mark.timeout(2400)
def test_after_recovery_the_store_has_what_was_produced(row, outcomes, bare_losses):
    outcome = outcomes[row.name].result()
    assert outcome.faults == []
    assert all(bare_losses.get(step, loss) == loss for step, loss in outcome.losses)


@pytest.mark.parametrize("moments", [20, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.timeout(2400)
def test_a_store_killed_at_random_moments(moments, nurseries, folder):
    place = folder / f"store-{moments}"
    place.mkdir()
    process, acks = "a" * 32, place / "acks"
    arguments = (place / "run", "one", process, acks)
    kill_writer_often(
        nurseries, WRITER, arguments, acks, moments, place / "writer.log", environment()
    )
    assert verify_store(place / "run", process, acks) >= moments


@pytest.mark.parametrize("seconds", [60, pytest.param(600, marks=pytest.mark.soak)])
@pytest.mark.timeout(1500)
def test_64_agents_at_full_rate_do_not_grow_the_collector(seconds, nurseries, folder, capsys):
    stage = Stage(Row("memory"), folder / f"memory-{seconds}", nurseries)
    try:
        stage.start_daemon()
        samples, figures = watch(stage, seconds)
    finally:
        stage.end_everything()
    rate, grown = figures["events"] / seconds, growth(samples)
    peak = max(size for _, size in samples) / 2**20
    with capsys.disabled():
        print(
            f"\n{seconds} s: {rate:.0f} events/s, peak {peak:.0f} MiB, grown {grown:.1%}, {figures}"
        )
    assert figures["durable"] == figures["sent"]
    assert grown < 0.05
