"""The demo as a user runs it, and its training job with and without the agent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "deploy" / "demo"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    environ = {name: value for name, value in os.environ.items() if "RANKSCOPE" not in name}
    done = subprocess.run(
        [sys.executable, str(DEMO / "run.py"), "--report", str(folder / "watched")],
        cwd=folder,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


def report(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text()))


def test_query_finds_the_uneven_batch(demo: tuple[Path, str]) -> None:
    first = next(line for line in demo[1].splitlines() if "[13, 64]" in line)
    cells = [cell.strip() for cell in first.strip("│").split("│")]
    assert cells == [
        "9",
        "Functional.embedding.0.forward",
        "input_args",
        "0",
        "[13, 64]",
        "[12, 64]",
    ]


def test_all_ranks_and_steps_are_there(demo: tuple[Path, str]) -> None:
    run = demo[0] / "demo_output" / "store" / "demo"
    assert {path.name for path in run.iterdir()} == {f"step{n}" for n in range(20)}
    for folder in run.glob("step*/*"):
        assert folder.name in ("rank0", "rank1")
        data = json.loads((folder / "dump.json").read_text())["data"]
        assert "Functional.cross_entropy.0.backward" in data
        stacks = json.loads((folder / "stack.json").read_text()).values()
        assert sum(len(names) for names, _ in stacks) == sum("forward" in name for name in data)
    assert not list(run.glob("step*/rank*/*.tmp*"))
    assert "complete" in demo[1]
    assert "incomplete" not in demo[1]


def test_training_is_the_same_to_the_last_bit_without_the_agent(
    demo: tuple[Path, str], tmp_path: Path
) -> None:
    command = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    command += [str(DEMO / "train.py"), "--report", str(tmp_path / "plain")]
    environ = dict(os.environ, OMP_NUM_THREADS="1")
    subprocess.run([sys.executable, *command], check=True, env=environ, capture_output=True)
    for rank in (0, 1):
        watched, plain = report(demo[0] / f"watched.{rank}"), report(tmp_path / f"plain.{rank}")
        assert watched == plain
    losses = [
        float.fromhex(loss) for loss in json.loads((tmp_path / "plain.0").read_text())["losses"]
    ]
    assert losses[0] > 4.5
    assert max(losses[-5:]) < 3.2
