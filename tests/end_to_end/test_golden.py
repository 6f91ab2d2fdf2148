"""Whole runs against what msProbe wrote for the same scripts."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jobs
import pytest
from dumpdiff import differences, unexplained

GOLDEN = Path(__file__).parent.parent / "golden"
EMBEDDED = [
    "mlp_mix",
    "transformer_mix",
    "adam_steps",
    "ddp_gloo",
    "checkpoint_mix",
    "structure_mix",
    "token_range",
    "reuse_l0",
    "kwargs_nested",
    "conv_bn_l1",
]
SERVED = ["mlp_mix", "ddp_gloo", "kwargs_nested"]


@pytest.fixture(scope="module")
def finished(request, tmp_path_factory):
    """`finished(case, where)` is its ended job. Those that this session needs run two at a time."""
    daemon = None
    root = tmp_path_factory.mktemp("golden")
    wanted = {
        (item.callspec.params["case"], item.callspec.params["where"]): None
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }

    def run(case, where):
        nonlocal daemon
        folder = root / f"{case}-{where}-{uuid.uuid4().hex[:6]}"
        return jobs.start_case(case, folder, daemon if where == "served" else None).finish()

    if any(where == "served" for _, where in wanted):
        daemon = request.getfixturevalue("shared_daemon")
    with ThreadPoolExecutor(2) as pool:
        runs = {key: pool.submit(run, *key) for key in wanted}
        yield lambda case, where="embedded": runs[case, where].result()


CASES = [(case, "embedded") for case in EMBEDDED] + [(case, "served") for case in SERVED]


@pytest.mark.parametrize(("case", "where"), CASES)
def test_equals_msprobe(finished, case, where):
    job = finished(case, where)
    lines = differences(GOLDEN / case, job.dump)
    assert unexplained(lines, GOLDEN / f"{case}.known") == []


@pytest.mark.parametrize(("case", "where"), [("ddp_gloo", "embedded")])
def test_a_call_keeps_its_output_when_a_later_one_uses_the_same_function(finished, case, where):
    """dist.recv calls irecv inside; the record of the irecv before it holds what that received."""
    job = finished(case, where)
    received = job.document(folder="rank1")["data"]["Distributed.irecv.0.forward"]["output"]
    assert [received[0][k] for k in ("Max", "Min", "Norm")] == [4.0, 4.0, 8.0]
    assert received[1:] == [{"type": "int", "value": 0}]
    later = job.document(folder="rank1")["data"]["Distributed.recv.0.forward"]["output"]
    assert later[0]["Max"] == 9.0
    sent = job.document(folder="rank0")["data"]["Distributed.isend.0.forward"]["output"]
    assert sent == [None, {"type": "int", "value": 1}]


@pytest.mark.parametrize(("case", "where"), [("kwargs_nested", "embedded")])
def test_keyword_tensors_have_gradients(finished, case, where):
    data = finished(case, where).document()["data"]
    (gradient,) = data["Module.both.Both.backward.0"]["output"]
    assert (gradient["Max"], gradient["Min"], gradient["shape"]) == (2.0, 2.0, [2, 3])
    inner = data["Module.inner.Inner.backward.0"]["output"]
    # x, pair.left, pair.right, items[0], table["b"]["c"]. x was given twice: the sum stands first.
    assert [g and g["Max"] for g in inner] == [15.0, 5.0, -5.0, None, 5.0]


@pytest.mark.parametrize(("case", "where"), [("reuse_l0", "embedded")])
def test_a_pass_without_gradients_loses_no_parameter_gradient(finished, case, where):
    data = finished(case, where).document()["data"]
    names = [name for name in data if name.startswith("Module.twice.Linear.parameters_grad")]
    assert names == [f"Module.twice.Linear.parameters_grad.{k}" for k in (0, 1)]
    first, second = (data[name] for name in names)
    assert list(first) == list(second) == ["bias", "weight"]
    assert first["weight"][0]["Max"] != second["weight"][0]["Max"]  # they accumulate


@pytest.mark.parametrize(("case", "where"), [("mlp_mix", "embedded")])
def test_stacks_name_the_line_of_the_script(finished, case, where):
    job = finished(case, where)
    stacks = job.document("stack.json").values()
    (frames,) = [frames for names, frames in stacks if "Functional.relu.0.forward" in names]
    script = jobs.TESTS / "cases" / "mlp_mix.py"
    source = script.read_text().splitlines()
    number = source.index("        return F.relu(self.head(self.blocks(x)))") + 1
    assert frames[0] == f"File {script}, line {number}, in forward, \n {source[number - 1].strip()}"
    assert not any("agent/rankscope/" in frame for frame in frames)
