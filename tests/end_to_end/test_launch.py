"""Scripts that know nothing of rankscope, recorded by how they are launched."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.collector.query import open_run

TRAIN = """
import os, sys
import torch, torch.distributed as dist
from torch import nn

if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
if dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
measure = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step():
    optimizer.zero_grad()
    x, y = torch.randn(3, 4), torch.randint(0, 2, (3,))
    loss = measure(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

for _ in range(int(sys.argv[1])):
    loss = train_step()
print("loss", loss.item())
if dist.is_initialized():
    dist.destroy_process_group()
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""

EXPLICIT = (
    """
import sys
from rankscope.agent import PrecisionDebugger
debugger = PrecisionDebugger(config_path=sys.argv.pop())
"""
    + TRAIN.replace("    loss = measure", "    debugger.start(model)\n    loss = measure")
).replace("    optimizer.step()\n", "    optimizer.step(); debugger.stop(); debugger.step()\n")


@pytest.fixture
def files(tmp_path):
    """train.py and config.json in an empty folder."""
    (tmp_path / "train.py").write_text(TRAIN)
    config = {
        "task": "statistics",
        "level": "mix",
        "risk_level": "ALL",
        "dump_path": str(tmp_path / "run"),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def launched(folder, *command, status=0, **environ):
    """Output of a command in the folder."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def data(folder, step):
    (path,) = folder.glob(f"step{step}/*/dump.json")
    return json.loads(path.read_text())["data"]


LAUNCHER = (sys.executable, "-m", "rankscope.agent.run", "--config", "config.json")


def test_a_script_is_recorded_as_if_it_had_asked(files):
    output = launched(files, *LAUNCHER, "train.py", "3", "7", status=7)
    (files / "explicit.py").write_text(EXPLICIT)
    config = json.loads((files / "config.json").read_text())
    (files / "own.json").write_text(json.dumps(config | {"dump_path": str(files / "own")}))
    explicit = launched(files, sys.executable, "explicit.py", "3", "own.json")
    loss = [line for line in output.splitlines() if line.startswith("loss")]
    assert loss == [line for line in explicit.splitlines() if line.startswith("loss")]
    assert sorted(p.name for p in (files / "run").iterdir()) == ["step0", "step1", "step2"]
    for step in range(3):
        assert data(files / "run", step) == data(files / "own", step)


@pytest.mark.parametrize(
    ("step_on", "steps"), [("forward", 4), ("helper:work", 2), ("helper:Worker.work", 2)]
)
def test_steps_are_counted_by_something_else(files, step_on, steps):
    (files / "helper.py").write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
        "def work():\n    for _ in range(2): model(torch.ones(1, 2))\n"
        "class Worker:\n    def work(self): work()\n"
    )
    (files / "serve.py").write_text(
        "import helper\n"
        f"for _ in range(2): helper.{'Worker().work' if 'Worker' in step_on else 'work'}()\n"
    )
    launched(files, *LAUNCHER, "--step-on", step_on, "serve.py")
    found = sorted(p.name for p in (files / "run").iterdir())
    assert found == [f"step{n}" for n in range(steps)]
    calls = 4 // steps
    names = [n for n in data(files / "run", 1) if n.startswith("Module")]
    assert names == [f"Module.0.Linear.forward.{n}" for n in range(calls)]


def test_a_second_model_has_names_of_its_own(files):
    (files / "two.py").write_text(
        "import torch\nfrom torch import nn\n"
        "one, two = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))\n"
        "optimizer = torch.optim.SGD(one.parameters(), lr=0.1)\n"
        "for _ in range(2):\n"
        "    two(one(torch.ones(1, 2))).sum().backward(); optimizer.step()\n"
    )
    launched(files, *LAUNCHER, "two.py")
    for step in range(2):
        names = {n.split(".forward")[0] for n in data(files / "run", step) if ".forward" in n}
        assert {"Module.0.Linear", "Module.1.0.Linear"} <= names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--config", "none.json", "train.py"], "none.json"),
        (["--config", "config.json", "--step-on", "nothing:f", "train.py"], "--step-on nothing:f"),
        (["--config", "config.json", "--step-on", "os:nope", "train.py"], "nope"),
        (["--config", "config.json"], "no script given"),
    ],
)
def test_wrong_options_are_told_before_the_script_runs(files, options, said):
    output = launched(files, sys.executable, "-m", "rankscope.agent.run", *options, status=2)
    assert said in output
    assert "Traceback" not in output
    assert "loss" not in output


def test_the_environment_alone_records_every_rank(files):
    command = [Path(sys.executable).with_name("rankscope"), "run", "--config", "config.json", "--"]
    torchrun = Path(sys.executable).with_name("torchrun")
    launched(files, *command, torchrun, "--nproc-per-node", "2", "train.py", "2")
    assert sorted(p.parent.name for p in (files / "run").glob("step1/*/dump.json")) == [
        "rank0",
        "rank1",
    ]
    processes = open_run(files / "run").processes().to_pylist()
    assert sorted(p["rank"] for p in processes) == [0, 1]


def test_nothing_is_recorded_unless_asked(files):
    startup = launched(files, sys.executable, "-m", "rankscope.agent.run", "--startup-path").strip()
    (files / "site").mkdir()
    (files / "site" / "sitecustomize.py").write_text("print('the other one')\n")
    path = os.pathsep.join([startup, str(files / "site")])
    output = launched(files, sys.executable, "train.py", "1", PYTHONPATH=path)
    assert "the other one" in output
    assert not (files / "run").exists()
    launched(
        *(files, sys.executable, "train.py", "1"),
        PYTHONPATH=path,
        RANKSCOPE_AUTO="1",
        RANKSCOPE_CONFIG="config.json",
    )
    assert data(files / "run", 0)


def test_two_launchers_are_two_nodes_of_one_run(files, shared_daemon):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = Path(sys.executable).with_name("torchrun")
    common = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    environ = os.environ | {"RANKSCOPE_COLLECTOR": shared_daemon.address, "RANKSCOPE_RUN": "nodes"}
    script = ["-m", "rankscope.agent.run", "--config", "config.json", "train.py", "2"]
    nodes = [
        subprocess.Popen(
            [torchrun, *common, "--master-port", str(port), "--node-rank", str(node), *script],
            cwd=files,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=150)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    run = open_run(shared_daemon.store / "nodes")
    assert sorted(p["rank"] for p in run.processes().to_pylist()) == [0, 1, 2, 3]
    ended = run.sql("select count(*) as n from steps where event = 'end'")
    assert ended.column("n").to_pylist() == [8]
