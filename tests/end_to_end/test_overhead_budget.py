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
    recorded = {step: part for step, part in parts.items() if part.state == "complete"}
    first = {part.shed: step for step, part in reversed(recorded.items())}
    assert sorted(first, key=first.__getitem__) == ["", "stacks", "stacks,inputs"]
    assert str(recorded[first["stacks,inputs"]]).endswith("complete, without stacks and inputs")
    skipped = [str(part) for step, part in parts.items() if step not in recorded]
    assert set(skipped) == {"skipped (budget)"}
    assert len(skipped) > 10
    full = done.document(step=1)["data"]["Tensor.__mul__.0.forward"]
    less = done.document(step=first["stacks,inputs"])["data"]["Tensor.__mul__.0.forward"]
    assert full["input_args"]
    assert full["output"] == less["output"]
    assert "input_args" not in less
    without = done.document("stack.json", step=first["stacks"])
    assert without != done.document("stack.json", step=1)


def test_the_agents_own_figure_is_what_a_clock_outside_sees(monkeypatch, tmp_path):
    """Within a third: two clocks on a shared machine; `make bench` prints the ratio itself."""
    monkeypatch.setattr(PrecisionDebugger, "_instance", None)
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "run"), level="L1", task="statistics")
    x = torch.ones(4)

    def work():
        for _ in range(200):
            torch.mul(x, 2)

    def timed(call):
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def recorded():
        debugger.start()
        work()
        debugger.stop()
        debugger.step()

    recorded()
    plain, whole = zip(*[(timed(work), timed(recorded)) for _ in range(40)], strict=True)
    recording = debugger._recording
    recording.close("exit")
    rows = open_run(tmp_path / "run").sql(
        "select min(agent_seconds) as quickest from steps where event = 'end' and step > 0"
    )
    # What is least disturbed by others on the machine, on both sides.
    (inside,) = rows.column("quickest").to_pylist()
    assert inside == pytest.approx(min(whole) - min(plain), rel=1 / 3)
