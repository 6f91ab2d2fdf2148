"""A job that may spend a fifth of its time on recording."""

import time

import pytest
import torch

from rankscope.agent import PrecisionDebugger
from rankscope.collector.overview import overview
from rankscope.collector.query import open_run

JOB = """
import sys, time
import torch
from rankscope.agent import PrecisionDebugger

debugger = PrecisionDebugger(config_path=sys.argv[1])
x = torch.ones(4, requires_grad=True)
for _ in range(60):
    debugger.start()
    for _ in range(40):
        (x * 2).sum().backward()
    time.sleep(0.002)
    debugger.stop()
    debugger.step()
"""


def test_records_are_left_out_in_order_and_told(job, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    config = {"task": "statistics", "level": "L1", "rankscope": {"overhead_budget": 0.2}}
    done = job(script, config=config).finish()
    assert done.output.count("overhead_budget is 0.2") == 3
    run = open_run(done.dump)
    (process,) = run.processes().to_pylist()
    parts = {step: found[process["process"]] for step, found in overview(run).parts.items()}
    assert [parts[step].shed for step in range(2)] == ["", ""]
    assert [parts[step].shed for step in (2, 3)] == ["stacks", "stacks,inputs"]
    assert str(parts[3]).endswith("complete, without stacks and inputs")
    assert str(parts[4]) == "skipped (budget)"
    states = {part.state for part in parts.values()}
    assert states == {"complete", "skipped"}
    full = done.document(step=1)["data"]["Tensor.__mul__.0.forward"]
    less = done.document(step=3)["data"]["Tensor.__mul__.0.forward"]
    assert full["input_args"]
    assert full["output"] == less["output"]
    assert "input_args" not in less
    frames = done.document("stack.json", step=2)
    assert frames != done.document("stack.json", step=1)


def test_the_agents_own_figure_is_what_a_clock_outside_sees(monkeypatch, tmp_path):
    """Within a third: two clocks on a shared machine; `make bench` prints the ratio itself."""
    monkeypatch.setattr(PrecisionDebugger, "_instance", None)
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "run"), level="L1", task="statistics")
    x = torch.ones(4)

    def work():
        for _ in range(200):
            torch.mul(x, 2)

    outside = []
    for _ in range(12):
        began = time.perf_counter()
        work()
        plain = time.perf_counter() - began
        began = time.perf_counter()
        debugger.start()
        work()
        debugger.stop()
        debugger.step()
        outside.append(time.perf_counter() - began - plain)
    recording = debugger._recording
    recording.close("exit")
    rows = open_run(tmp_path / "run").sql(
        "select agent_seconds from steps where event = 'end' and step > 0 order by step"
    )
    inside = sorted(rows.column("agent_seconds").to_pylist())
    outside = sorted(outside[1:])
    assert inside[5] == pytest.approx(outside[5], rel=1 / 3)
