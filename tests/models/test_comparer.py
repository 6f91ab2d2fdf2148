"""The comparison itself: what is not equal and fits no rule is found."""

import json
import re
import shutil
from pathlib import Path

import pytest
from model_runs import CASES
from peer_rules import RULES
from peerdiff import compare, longest_increasing

TESTS = Path(__file__).parent.parent
GOLDEN = TESTS / "golden" / "mlp_mix"


@pytest.fixture
def changed(tmp_path):
    """`changed(name, edit)`: the report when `edit` has changed one document of a copy."""

    def compared(name="dump.json", edit=lambda document: None):
        copy = tmp_path / "copy"
        shutil.copytree(GOLDEN, copy)
        path = next(copy.glob(f"step1/*/{name}"))
        document = json.loads(path.read_text())
        edit(document)
        path.write_text(json.dumps(document))
        report = compare(GOLDEN, copy, RULES)
        return report, report.unexplained

    return compared


def test_a_dump_equals_itself(changed):
    report, unexplained = changed()
    assert (unexplained, report.by_rule) == ([], {})
    assert report.equal > report.records > 40


def test_a_number_that_is_not_the_same(changed):
    def edit(document):
        document["data"]["Functional.relu.0.forward"]["output"][0]["Max"] += 1e-7

    (row,) = changed(edit=edit)[1]
    assert row.startswith("step1/proc0 value Functional.relu.0.forward.output.0:")


def test_a_sum_within_its_rounding(changed):
    def edit(document):
        document["data"]["Functional.relu.0.forward"]["output"][0]["Norm"] *= 1 + 1e-6

    assert changed(edit=edit)[1] == []


def test_a_record_that_is_missing(changed):
    (row,) = changed(edit=lambda document: document["data"].pop("Functional.relu.0.backward"))[1]
    assert row == "step1/proc0 record Functional.relu.0.backward: there != missing"


def test_a_record_in_another_place(changed):
    def edit(document):
        record = document["data"].pop("Functional.relu.0.forward")
        document["data"]["Functional.relu.0.forward"] = record

    (row,) = changed(edit=edit)[1]
    assert row.startswith("step1/proc0 order Functional.relu.0.forward")


def test_a_record_below_another_parent(changed):
    def edit(tree):
        tree["Functional.relu.0.forward"] = "Module.head.Linear.forward.0"

    (row,) = changed("construct.json", edit)[1]
    assert row.startswith("step1/proc0 tree Functional.relu.0.forward")


def test_longest_increasing_run():
    assert longest_increasing([]) == set()
    assert longest_increasing([0, 3, 1, 2, 4]) == {0, 2, 3, 4}


def test_every_rule_and_case_is_documented():
    page = (TESTS.parent / "docs" / "models.md").read_text()
    rules = {rule.name for rule in RULES}
    assert rules == set(re.findall(r"^\| ([a-z ]+) \| [^|]+ \|$", page, re.M)) - {"rule"}
    assert {case for case in CASES if f"| {case} |" not in page} == set()
    assert set().union(*CASES.values()) <= rules
