"""Models as people train them: recording changes no result, and the dump says what msProbe's does.

Without `transformers`, `peft` and `accelerate` the cases that need them are left out, and without
msProbe the comparison; `make test-models` has both. Most levels are soak tests.
"""

import json

import model_runs
import peer
import pytest
from model_runs import ALONE, CASES, LEVELS
from peer_rules import RULES
from peerdiff import compare

QUICK = ("plain.", "library.llama", "library.vit", "training.lora")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = model_runs.Runs(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


def marks(case, level):
    if missing := model_runs.lacks(case):
        yield pytest.mark.skip(reason=f"needs {', '.join(missing)}: make test-models")
    if level != "mix" or not case.startswith(QUICK):
        yield pytest.mark.soak


def parameters(cases):
    return [
        pytest.param(case, level, marks=[*marks(case, level)]) for case in cases for level in LEVELS
    ]


ALL = parameters([*CASES, *ALONE])


def strict(path):
    def refuse(word):
        raise ValueError(f"{path}: {word} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize(("case", "level"), ALL)
def test_no_result_changes(runs, case, level):
    bare, recorded = runs.bare(case), runs.get(case, "rankscope", level)
    assert (bare.status, recorded.status) == (0, 0), bare.output + recorded.output
    assert len(bare.bits) == model_runs.RANKS.get(case, 1)
    assert recorded.changed(bare) == []


@pytest.mark.parametrize(("case", "level"), ALL)
def test_every_record_is_there_and_in_its_place(runs, case, level):
    recorded = runs.get(case, "rankscope", level)
    assert "recording failed" not in recorded.output
    folders = sorted(recorded.dump.glob("step*/*"))
    steps = len(list(recorded.dump.glob("step*")))
    assert len(folders) == steps * model_runs.RANKS.get(case, 1) > 0
    for folder in folders:
        data = strict(folder / "dump.json")["data"]
        tree = strict(folder / "construct.json")
        stacks = strict(folder / "stack.json").values()
        assert data
        assert {n for names, _ in stacks for n in names} == {n for n in data if ".forward" in n}
        if level != "L1":
            # A recomputation that stops inside a function leaves its record without output.
            stopped = {n for n, record in data.items() if list(record)[-1:] == ["input_kwargs"]}
            assert {n for n in data if ".parameters_grad." not in n} - stopped <= tree.keys()
            assert set(tree.values()) - tree.keys() <= {None}


@pytest.mark.skipif(peer.COMMAND is None, reason="needs msProbe: MSPROBE, or make test-models")
@pytest.mark.parametrize(("case", "level"), parameters(CASES))
def test_equals_msprobe(runs, case, level):
    bare, ours, theirs = (
        runs.bare(case),
        runs.get(case, "rankscope", level),
        runs.get(case, "msprobe", level),
    )
    assert theirs.status == 0, theirs.output
    report = compare(theirs.dump, ours.dump, RULES, changed=bool(theirs.changed(bare)))
    assert report.unexplained == []
    assert report.by_rule.keys() <= CASES[case]
    assert report.equal > 100
