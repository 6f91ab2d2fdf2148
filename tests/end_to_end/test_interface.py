"""The whole interface in real jobs."""

import csv
from pathlib import Path

import pytest
import torch

import rankscope.agent

SCRIPT = Path(__file__).with_name("interface_job.py")


@pytest.fixture
def run(job, tmp_path, monkeypatch):
    def run(level, **config):
        monkeypatch.chdir(tmp_path)
        return job(SCRIPT, name=level, config={"level": level} | config).finish()

    return run


def test_calls_at_l1(run, tmp_path):
    listed = tmp_path / "custom_wrap_ops.yaml"
    listed.write_text("__main__: [add_and_mul]\n")
    done = run("L1", rankscope={"custom_wrap_ops": str(listed)})
    assert "refused: argument task: 'no such task' is not allowed" in done.output
    assert "public: True" in done.output
    assert sorted(p.name for p in done.dump.iterdir()) == ["step10", "step11"]
    for step in (10, 11):
        data = done.document(folder="rank5", step=step)["data"]
        assert [name for name in data if "forward" in name] == [
            "Tensor.normal_.0.forward",
            "__main__.add_and_mul.0.forward",
            "Tensor.__add__.0.forward",
            "Module.Mine.Linear.forward.0",
            "Torch.bernoulli.0.forward",
            "Tensor.sum.0.forward",
        ]
    assert done.output.count("save() records at level debug only") == 1
    (table,) = (tmp_path / "randomness").iterdir()
    with table.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    drawn = [row["api_name"] for row in rows]
    assert drawn[-4:] == [
        "tensor_random.normal_.0",
        "torch_random.bernoulli.0",
        "tensor_random.normal_.1",
        "torch_random.bernoulli.1",
    ]
    assert "interface_job.py" in rows[-2]["stack"]
    assert "normal_(torch.empty(2))" in rows[-2]["stack"]
    assert table.name.startswith("random_proc")


def test_save_at_debug_with_tensors(run):
    done = run("debug", task="tensor")
    for step in (10, 11):
        document = done.document("debug.json", folder="rank5", step=step)
        assert list(document["data"]) == ["y.0.debug", "y_grad.0.debug"]
        (folder,) = (done.dump / f"step{step}").glob("rank5/dump_tensor_data")
        saved = {path.name: torch.load(path) for path in folder.iterdir()}
        assert sorted(saved) == ["y.0.debug.pt", "y_grad.0.debug.pt"]
        assert saved["y_grad.0.debug.pt"].tolist() == [[1.0, 1.0]]
        assert document["data"]["y.0.debug"]["Max"] == saved["y.0.debug.pt"].max().item()


def test_public_names():
    assert rankscope.agent.__all__ == sorted(rankscope.agent.__all__)
    for name in rankscope.agent.__all__:
        assert callable(getattr(rankscope.agent, name))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = rankscope.agent.no_such_name
