"""The tables say what dump.json says, and dump.json can be made from them again."""

import json
import math

import jobs
import pytest

from rankscope.collector.export import Selection, export
from rankscope.collector.query import open_run

WITHOUT_SUMS = ("torch.float64", "torch.int64")  # dump.json has no Mean and Norm of them
RANKS, STEPS = (0, 1), (0, 1)


@pytest.fixture(scope="module")
def job(tmp_path_factory, shared_daemon):
    return jobs.start_case(
        "every_kind", tmp_path_factory.mktemp("every_kind"), shared_daemon
    ).finish()


def leaves(value, path=()):
    """(path, entry) of each leaf below a part of a record."""
    is_entry = isinstance(value, dict) and ("type" in value or not value)
    if value is None or is_entry:
        yield ".".join(path), value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    else:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, str(index)))


def entries(document):
    """(record, part, path) -> entry, of a whole dump.json."""
    found = {}
    for record, parts in document["data"].items():
        for name, part in parts.items():
            if ".parameters_grad." in record:
                (gradient,) = part
                found[record, "parameters_grad", name] = gradient
                continue
            found |= {(record, name, path): entry for path, entry in leaves(part)}
    # `{}` is an empty dictionary of the user's, or a type that msProbe has no word for.
    return {key: entry for key, entry in found.items() if entry != {}}


def rows(job, rank, step):
    columns = "record, part, path, form, type, dtype, shape, requires_grad, value, elements"
    columns += ", max, min, mean, norm, sum, sum_of_squares, nan_count, inf_count"
    where = f"rank = {rank} and step = {step} and form <> 'empty'"
    table = open_run(job.dump).sql(f"select {columns} from records where {where}")
    return table.to_pylist()


def word(number):
    """A number of a table as dump.json writes it."""
    return "nan" if number is not None and math.isnan(number) else number


def agree(row, entry):
    if entry is None:
        return row["form"] == "null"
    if row["form"] in ("scalar", "verbatim"):
        value = json.loads(row["value"])
        return entry == (
            value if row["form"] == "verbatim" else {"type": row["type"], "value": value}
        )
    described = {key: row[key] for key in ("type", "dtype", "shape", "requires_grad")}
    if row["form"] != "tensor" or described != {key: entry[key] for key in described}:
        return False
    numbers = [entry[key] for key in ("Max", "Min", "Mean", "Norm")]
    if row["elements"] == 0:
        return numbers == [None] * 4
    if row["dtype"] == "torch.bool":
        return numbers == [bool(row["max"]), bool(row["min"]), None, None]
    expected = [word(row[key]) for key in ("max", "min", "mean", "norm")]
    if not row["shape"]:
        expected = [row["max"]] * 4  # the value of a scalar tensor stands in all four places
    elif row["dtype"] in WITHOUT_SUMS:
        expected[2:] = [None, None]
    return numbers == expected


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rank", RANKS)
def test_leaves_and_entries_are_the_same(job, rank, step):
    expected = entries(job.document(folder=f"rank{rank}", step=step))
    found = rows(job, rank, step)
    keys = [(row["record"], row["part"], row["path"]) for row in found]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(expected)
    wrong = [
        (key, row, expected[key])
        for key, row in zip(keys, found, strict=True)
        if not agree(row, expected[key])
    ]
    assert wrong == []


def test_the_run_holds_what_is_hard_to_agree_on(job):
    found = rows(job, 0, 0)
    assert {row["form"] for row in found} == {"tensor", "scalar", "null"}
    kinds = {row["dtype"] for row in found}
    assert kinds >= {
        "torch.float64",
        "torch.int64",
        "torch.bool",
        "torch.float16",
        "torch.bfloat16",
    }
    assert any(row["elements"] == 0 for row in found)
    assert any(row["nan_count"] and row["inf_count"] for row in found)


def test_tables_have_the_numbers_that_dump_json_leaves_out(job):
    found = [
        row
        for row in rows(job, 0, 0)
        if row["record"].startswith("Torch.abs.") and row["part"] == "output"
    ]
    integers = next(row for row in found if row["dtype"] == "torch.int64")
    assert (integers["sum"], integers["sum_of_squares"], integers["elements"]) == (12, 28, 7)
    wide = next(row for row in found if row["dtype"] == "torch.float64")
    assert (wide["mean"], wide["norm"]) == (1.5, 3.0)
    # 4 times 60000 squared is beyond float16, whose own norm would be infinite.
    half = next(row for row in found if row["dtype"] == "torch.float16")
    assert half["norm"] == pytest.approx(120_000, rel=1e-3)


def test_export_writes_the_same_bytes(job, tmp_path):
    every = Selection()
    assert len(list(export(open_run(job.dump), tmp_path / "again", every, every))) == 4
    written = {p.relative_to(job.dump): p.read_bytes() for p in job.dump.rglob("*.json")}
    again = {
        p.relative_to(tmp_path / "again"): p.read_bytes() for p in tmp_path.rglob("again/**/*.json")
    }
    assert len(written) == 3 * len(RANKS) * len(STEPS)
    assert again == written


def test_stored_parents_are_those_of_the_call_tree(job):
    tree = job.document("construct.json", folder="rank1")
    places = "what = 'node' or (kind = 'api' and what = 'output')"
    statement = f"select record, parent from nodes where rank = 1 and step = 0 and ({places})"
    stored = open_run(job.dump).sql(statement).to_pylist()
    assert {row["record"]: row["parent"] for row in stored} == tree
