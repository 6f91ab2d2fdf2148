"""How much of what a rank recorded is gone when it is killed: measure_loss.py [KILLS].

Each rank records as fast as it can and is killed from outside at a random moment, seeded. Prints
how old the oldest lost record was, and the machine's load. Run from the folder of the repository.
"""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "end_to_end")]

from chaos.stage import Nurseries, Row, Stage  # noqa: E402

SEED = 2026


def kill_after(seconds):
    def action(stage):
        time.sleep(seconds)
        stage.job.kill()

    return Row(
        "killed",
        plan={"steps": 1_000_000, "calls": 300, "pace_seconds": 0.0},
        during=action,
        status=-signal.SIGKILL,
        may_lose_seconds=60.0,
        blocked_seconds=60.0,
    )


def main(kills):
    rng, nurseries, lost = random.Random(SEED), Nurseries(), []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(kills):
                row = kill_after(rng.uniform(0.2, 2.0))
                outcome = Stage(row, Path(folder) / str(number), nurseries).play()
                assert outcome.faults == [], outcome.faults
                lost.append(1000 * outcome.lost_seconds)
    finally:
        nurseries.close()
    lost.sort()
    print(
        f"{kills} kills, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}: lost "
        f"{lost[len(lost) // 2]:.0f} ms in the middle, {lost[int(0.9 * (kills - 1))]:.0f} ms in 9 "
        f"of 10, {lost[-1]:.0f} ms at most"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
