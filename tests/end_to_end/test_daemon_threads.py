"""Daemon threads that are alive when the interpreter ends do not abort it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import environment

SCRIPT = Path(__file__).with_name("daemon_threads.py")


@pytest.mark.parametrize("exits", [12, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.timeout(1200)
def test_a_process_with_daemon_threads_ends_in_order(exits, tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(exits)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"0": exits}, done.stderr[-2000:]
