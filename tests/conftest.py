"""Recording in the test's own process."""

import pytest
from recorded import Recorded


@pytest.fixture
def record(monkeypatch):
    """Makes recordings: `record("mix", model=net)`. No hook of ours may have failed in one,
    unless it has `faults_expected`."""
    made = []

    def make(level="mix", **options):
        made.append(Recorded(monkeypatch, level, **options))
        return made[-1]

    yield make
    for recorded in made:
        errors = [drop for drop in recorded.drops if drop[0] == "error"]
        assert bool(errors) == recorded.faults_expected, errors
