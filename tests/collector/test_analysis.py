"""Faults planted in a small decoder: the record that is named first is the planted one."""

import csv
import json
import zipfile

import planted
import pytest
from typer.testing import CliRunner

from rankscope.collector.analysis import sides
from rankscope.collector.analysis.check import check
from rankscope.collector.analysis.compare import compare
from rankscope.collector.analysis.outputs import write_reports
from rankscope.collector.cli import build, load

SEEDS = (11, 12, 13)


@pytest.fixture
def recording(monkeypatch):
    def make(seed, level, *fault, **options):
        return planted.side(monkeypatch, seed, level, *fault, **options)

    return make


def rankscope(*arguments):
    return CliRunner().invoke(
        build({name: load(name) for name in ("compare", "check")}), [str(a) for a in arguments]
    )


@pytest.mark.parametrize("level", ["L1", "mix", "L0"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_planted_record_is_named(recording, seed, level):
    clean = recording(seed, level)
    named, wanted = {}, {}
    for fault, (api, module) in planted.PLANTED.items():
        first = compare(clean, recording(seed, level, fault)).first
        named[fault.__name__] = first and (first.step, first.name)
        wanted[fault.__name__] = (0, module if level == "L0" else api)
    assert named == wanted


@pytest.mark.parametrize("mode", ["md5", "xor"])
def test_checksums_name_it_too(recording, mode):
    clean = recording(21, "L1", summary_mode=mode)
    for fault in (planted.transposed, planted.wrong_init, planted.dropout_left_on):
        first = compare(clean, recording(21, "L1", fault, summary_mode=mode)).first
        assert first.name == planted.PLANTED[fault][0]


def test_equal_runs_have_no_divergence(recording):
    result = compare(recording(31, "mix"), recording(31, "mix"))
    assert result.first is None
    assert not result.candidates


def test_an_argument_of_the_loss_is_named(recording):
    smoothed = recording(32, "L1", label_smoothing=0.1)
    first = compare(recording(32, "L1"), smoothed).first
    assert (first.name, first.argument) == (
        "Functional.cross_entropy.0.forward",
        "input_kwargs.label_smoothing",
    )


def test_at_l0_a_gradient_that_comes_in_is_named(recording):
    first = compare(recording(32, "L0"), recording(32, "L0", label_smoothing=0.1)).first
    assert (first.name, first.argument) == ("Module.head.Linear.backward.0", "input.0")


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_other_data_are_named_where_they_come_in(recording, level):
    first = compare(recording(33, level), recording(33, level, data_seed=5)).first
    assert (first.name, first.argument) == ("Functional.embedding.0.forward", "input_args.0")


@pytest.mark.parametrize("seed", SEEDS)
def test_check_names_the_op_that_made_nan(recording, seed):
    assert check(recording(seed, "mix")).first is None
    found = check(recording(seed, "mix", planted.masked_row)).first
    assert (found.kind, found.step, found.name) == ("nan", 0, "Functional.softmax.1.forward")


def test_reports_hold_every_row(recording, tmp_path):
    result = compare(recording(41, "mix"), recording(41, "mix", planted.wrong_eps))
    write_reports(result, tmp_path)
    with (tmp_path / "compare.csv").open(encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result.view.bad)
    wrong = [row for row in rows if row["NPU Name"] == "Functional.layer_norm.4.forward.input.4"]
    assert [float(row["Max diff"]) for row in wrong] == [1e-5 - 1e-4] * 2
    assert {row["Accuracy Reached or Not"] for row in wrong} == {"No"}
    with zipfile.ZipFile(tmp_path / "compare.xlsx") as archive:
        sheet = archive.read("xl/worksheets/sheet1.xml").decode()
    assert sheet.count("<row>") == len(rows) + 1
    page = (tmp_path / "compare.html").read_text()
    assert "Functional.layer_norm.4.forward" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.fixture
def dump(tmp_path):
    """Writes a dump directory of given tensors: {record: {part: [(max, norm)]}}."""

    def entry(high, norm):
        shape = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4]}
        return shape | {"Max": high, "Min": -1.0, "Mean": 0.5, "Norm": norm, "requires_grad": False}

    def write(name, records, rank="rank0"):
        folder = tmp_path / name / "step0" / rank
        folder.mkdir(parents=True, exist_ok=True)
        data = {
            record: {part: [entry(*one) for one in values] for part, values in parts.items()}
            for record, parts in records.items()
        }
        head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
        (folder / "dump.json").write_text(json.dumps(head | {"data": data}))
        return tmp_path / name

    return write


def test_a_doubled_maximum_and_a_lone_record_do_not_pass(dump):
    good = {"Torch.sin.0.forward": {"input_args": [(1.0, 2.0)], "output": [(0.9, 1.5)]}}
    doubled = {"Torch.sin.0.forward": {"input_args": [(1.0, 2.0)], "output": [(1.8, 1.5)]}}
    lone = good | {"Torch.cos.0.forward": {"input_args": [(1.0, 2.0)], "output": [(0.3, 1.0)]}}
    a = dump("a", good)
    assert rankscope("compare", a, dump("same", good)).exit_code == 0
    for name, other, record in (
        ("b", doubled, "Torch.sin.0.forward"),
        ("c", lone, "Torch.cos.0.forward"),
    ):
        result = rankscope("compare", a, dump(name, other), "--json")
        assert result.exit_code == 1
        first = json.loads(result.stdout)["first"]
        assert set(first) == {"step", "ranks", "name", "argument", "why"}
        assert (first["step"], first["ranks"], first["name"]) == (0, [0], record)


def test_what_cannot_be_compared_is_status_2(dump, tmp_path):
    a = dump("a", {"Torch.sin.0.forward": {"output": [(1.0, 2.0)]}})
    assert rankscope("compare", a, tmp_path / "nothing").exit_code == 2
    assert rankscope("check", tmp_path / "nothing").exit_code == 2
    other = dump("b", {"Torch.sin.0.forward": {"output": [(1.0, 2.0)]}}, rank="rank1")
    dump("b", {"Torch.sin.0.forward": {"output": [(1.0, 2.0)]}}, rank="rank2")
    assert rankscope("compare", a, other).exit_code == 2
    assert rankscope("compare", a, other, "--map-ranks", "0:2").exit_code == 0


def test_names_are_mapped(dump, tmp_path):
    a = dump("a", {"Module.encoder.0.fc.Linear.forward.0": {"output": [(1.0, 2.0)]}})
    b = dump("b", {"Module.blocks.0.fc.Linear.forward.0": {"output": [(1.0, 2.0)]}})
    assert rankscope("compare", a, b).exit_code == 1
    (tmp_path / "names.yaml").write_text("encoder: blocks\n")
    assert rankscope("compare", a, b, "--map-names", tmp_path / "names.yaml").exit_code == 0


def test_rounding_everywhere_is_no_fault_but_a_jump_is(dump):
    def chain(fault):
        records, value = {}, 1.0
        for number in range(20):
            off = 1 + (3e-6 if fault is not None else 0.0) * (number + 1)
            jump = 1.5 if fault == number else 1.0
            came = (value * off, 2 * value * off)
            value *= 1.01
            gone = (value * off * jump, 2 * value * off * jump)
            records[f"Functional.linear.{number}.forward"] = {
                "input_args": [came],
                "output": [gone],
            }
        return records

    a = dump("a", chain(None))
    assert rankscope("compare", a, dump("noise", chain(-1))).exit_code == 0
    for number in (3, 11, 19):
        result = rankscope("compare", a, dump(f"jump{number}", chain(number)), "--json")
        assert json.loads(result.stdout)["first"]["name"] == f"Functional.linear.{number}.forward"


def test_bare_nan_of_msprobe_is_read(dump):
    folder = dump("a", {"Torch.sin.0.forward": {"output": [(float("nan"), float("nan"))]}})
    found = check(sides.open_side(folder)).first
    assert (found.kind, found.name) == ("nan", "Torch.sin.0.forward")
