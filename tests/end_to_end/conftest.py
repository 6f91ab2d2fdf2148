"""A collector daemon, and scripts started as jobs; whatever still runs at the end is killed."""

import jobs
import pytest
from fake_agent import Daemon


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory):
    """One `rankscope serve` for all tests that only read what it wrote."""
    daemon = Daemon(tmp_path_factory.mktemp("served") / "store")
    yield daemon
    assert daemon.stop() == 0


@pytest.fixture
def job(tmp_path):
    """`job(script, *arguments, name=..., ...)` as `jobs.start`, in a folder of the test's own."""
    started = []

    def start(script, *arguments, name="job", **options):
        started.append(jobs.start(script, *arguments, folder=tmp_path / name, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
