"""torch.compile while recording: results and the number of graphs stay, nothing is seen inside."""

import itertools

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
    assert list(watch.data()) == ["Torch.cos.0.forward", "Torch.cos.1.forward"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_watched_module_inside_a_compiled_function_compiles_whole(record, backend):
    layer, _, compiled, x, expected = _case(backend)
    watch = record("mix", model=nn.Sequential(layer))
    watch.start(nn.Sequential(layer))
    result = compiled(x)
    torch.cos(x)
    watch.stop()
    torch.testing.assert_close(result, expected)
    assert list(watch.data()) == ["Torch.cos.0.forward"]


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
    assert list(watch.data()) == ["Torch.cos.0.forward"]
