"""torch_npu, as far as a stand-in can show: names, and which code is reached.

Nothing here says anything about NPU hardware.
"""

import json
import os
from pathlib import Path

import pytest

from rankscope.collector.query import open_run

SCRIPT = Path(__file__).parent.parent / "support" / "stand_in_npu.py"


@pytest.fixture(scope="module")
def done(tmp_path_factory, shared_daemon):
    import jobs

    folder = tmp_path_factory.mktemp("npu")
    config = {"level": "L1", "risk_level": "ALL"}
    job = jobs.start(
        SCRIPT, folder / "report.json", folder=folder / "npu", config=config, daemon=shared_daemon
    ).finish()
    return job, json.loads((folder / "report.json").read_text())


def test_it_is_never_imported(done):
    assert done[1]["imported torch_npu"] is False


def test_its_functions_are_records_of_their_own(done):
    job, report = done
    data = job.document()["data"]
    names = [name for name in data if name.startswith("NPU.")]
    assert names == ["NPU.npu_rms_norm.0.forward", "NPU.npu_rms_norm.0.backward"]
    forward = data[names[0]]
    assert [t["shape"] for t in forward["input_args"]] == [[2, 4], [4]]
    assert forward["input_kwargs"] == {"epsilon": {"type": "float", "value": 1e-5}}
    assert [t["shape"] for t in forward["output"]] == [[2, 4], [2, 1]]
    assert not any(name.startswith("Tensor.square") for name in data)  # what it calls is hidden
    assert report["left in place"] is False


def test_device_and_version_are_known(done):
    (process,) = open_run(done[0].dump).processes().to_pylist()
    assert process["device"] == "npu:3"
    assert "2.13.0.stand.in" in json.dumps(process, default=os.fspath)


def test_seeds_and_streams_are_asked_of_the_device_itself(done):
    report = done[1]
    assert {"manual_seed(5)", "manual_seed_all(5)"} <= set(report["asked"])
    waits = [text for text in report["asked"] if "stream" in text]
    assert waits == ["wait for the loop's stream", "on a stream of our own"]
    assert (report["max"], report["sum"], report["capturing"]) == (1.0, -2.0, True)
