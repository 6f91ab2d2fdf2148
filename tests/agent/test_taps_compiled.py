"""torch.compile while recording: results and the number of graphs stay, nothing is seen inside."""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

BACKENDS = ("eager", "aot_eager")


def _case(backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(
        lambda x: torch.sin(torch.relu(layer(x))), backend=counter, fullgraph=True
    )
    x = torch.randn(2, 3)
    return layer, counter, compiled, x, torch.sin(torch.relu(layer(x)))


@pytest.mark.parametrize(
    ("backend", "compiled_before"), list(itertools.product(BACKENDS, (True, False)))
)
def test_switching_recording_on_and_off_compiles_no_second_graph(record, backend, compiled_before):
    _, counter, compiled, x, expected = _case(backend)
    if compiled_before:
        compiled(x)
    watch = record("L1")
    for _ in range(2):
        watch.start()
        result = compiled(x)
        torch.cos(x)
        watch.stop()
        torch.testing.assert_close(result, expected)
        compiled(x)
    assert counter.frame_count == 1
    inside = watch.names(without=("Compiled",))
    assert inside == ["Torch.cos.0.forward", "Torch.cos.1.forward"]
    assert watch.data()["Compiled.lambda.1.forward"]["output"][0]["shape"] == [2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_watched_module_inside_a_compiled_function_compiles_whole(record, backend):
    layer, _, compiled, x, expected = _case(backend)
    watch = record("mix", model=nn.Sequential(layer))
    watch.start(nn.Sequential(layer))
    result = compiled(x)
    torch.cos(x)
    watch.stop()
    torch.testing.assert_close(result, expected)
    assert list(watch.data()) == ["Compiled.lambda.0.forward", "Torch.cos.0.forward"]


def test_a_call_that_dynamo_refuses_leaves_recording_on(record):
    def refused(x):
        torch._dynamo.graph_break()
        return torch.relu(x)

    torch._dynamo.reset()
    watch = record("L1")
    watch.start()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(refused, backend="eager", fullgraph=True)(torch.ones(2))
    torch.cos(torch.ones(2))
    watch.stop()
    assert list(watch.data()) == ["Compiled.refused.0.forward", "Torch.cos.0.forward"]
    assert "output" not in watch.data()["Compiled.refused.0.forward"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_border_of_a_region_is_a_record(record, backend, capfd):
    _, counter, compiled, x, expected = _case(backend)
    x.requires_grad_()
    watch = record("mix", model=nn.Sequential(nn.Sequential(nn.Linear(3, 3))))
    for _ in range(2):
        watch.start()
        compiled(x).sum().backward()
        watch.stop()
    watch.step()
    assert counter.frame_count == 1
    data = watch.data()
    call = data["Compiled.lambda.0.forward"]
    assert [entry["shape"] for entry in call["input_args"] + call["output"]] == [[2, 3], [2, 3]]
    assert call["output"][0]["Max"] == pytest.approx(expected.max().item())
    assert data["Compiled.lambda.1.backward"]["input"][0]["Max"] == 1.0
    assert watch.tree()["Compiled.lambda.0.forward"] is None
    said = [line for line in capfd.readouterr().err.splitlines() if "Compiled.lambda" in line]
    assert len(said) == 1
    assert "nothing inside it" in said[0]


def test_a_compiled_module_is_named_by_its_class(record):
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    net[0] = torch.compile(net[0], backend="eager")
    x = torch.ones(1, 3)
    expected = net(x)
    with (watch := record("mix", model=net)):
        torch.testing.assert_close(net(x), expected)
    names = watch.forwards()
    assert "Compiled.Linear.0" in names
    assert "Module.0.OptimizedModule.0" in names


LATE = """
import sys, torch
from rankscope.agent import PrecisionDebugger

compile = torch.compile
debugger = PrecisionDebugger(dump_path=sys.argv[1], level="L1", task="statistics")
for how in ("none", "compiled"):
    debugger.start()
    torch.cos(torch.ones(2))
    if how == "compiled":
        assert "torch._dynamo" not in sys.modules

        @torch.compile(backend="eager")
        def late(x):
            return torch.sin(torch.relu(x))

        late(torch.ones(3))
        late(torch.ones(3))
    debugger.stop()
    debugger.step()
    assert torch.compile is compile
"""


def test_dynamo_that_is_loaded_while_recording_is_followed(tmp_path):
    command = [sys.executable, "-c", LATE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("run/step1/*/dump.json")
    names = list(json.loads(path.read_text())["data"])
    assert names == ["Torch.cos.0.forward", "Compiled.late.0.forward", "Compiled.late.1.forward"]
