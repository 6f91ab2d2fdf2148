"""Rows made by hand, shaped as `schema` says."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from rankscope.collector import schema
from rankscope.collector.config import Config
from rankscope.collector.runs import RunService


def _table(rows, of):
    plain = [f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in of]
    columns = [
        pa.array([row.get(field.name) for row in rows], kind)
        for field, kind in zip(of, plain, strict=True)
    ]
    return pa.table(columns, names=of.names).cast(of)


class Events:
    """The events of one process and step, numbered as they are added."""

    def __init__(self, process="a" * 32, step=0, rank=None):
        self.where = {"process": process, "step": step, "rank": rank, "batch": 1}
        self.node_rows, self.record_rows = [], []

    def node(self, record, kind="api", direction="forward", parent=None, stack=None):
        """A record takes its place in the call tree."""
        self._event(record, "node", kind, direction, parent=parent, stack=stack, leaves=0)

    def data(self, record, what, structure, *leaves, kind="api", direction="forward", **more):
        """A record's data; `structure` names the leaves by number."""
        seq = len(self.node_rows)
        text = json.dumps(structure)
        self._event(record, what, kind, direction, structure=text, leaves=len(leaves), **more)
        for number, leaf in enumerate(leaves):
            row = {"seq": seq, "leaf": number, "record": record, "kind": kind}
            self.record_rows.append(self.where | row | {"direction": direction} | leaf)

    def _event(self, record, what, kind, direction, **more):
        row = {"seq": len(self.node_rows), "record": record, "what": what, "kind": kind}
        self.node_rows.append(self.where | row | {"direction": direction} | more)

    def nodes(self):
        return _table(self.node_rows, schema.NODES)

    def records(self):
        return _table(self.record_rows, schema.RECORDS)


def tensor(dtype="float32", shape=(2,), **columns):
    row = {"form": "tensor", "type": "torch.Tensor", "dtype": f"torch.{dtype}"}
    return row | {"shape": list(shape), "requires_grad": False} | columns


def scalar(kind, value):
    return {"form": "scalar", "type": kind, "value": value}


class Store:
    """Tables of one run on disk, in Delta Lake as a collector writes them."""

    def __init__(self, run_path):
        self.run_path = run_path
        self.store = run_path.with_name(run_path.name + ".rankscope")

    def add(self, name, rows):
        """Append rows, dictionaries or a table."""
        table = rows if isinstance(rows, pa.Table) else _table(rows, schema.TABLES[name])
        write_deltalake(
            self.store / "tables" / name,
            table,
            mode="append",
            partition_by=["step"] if name in schema.PARTITIONED else None,
            configuration={"delta.dataSkippingStatsColumns": "process"},
        )

    def process(self, process, rank=0, revision=0, **columns):
        """What is known about a process; a later revision counts."""
        row = {"process": process, "revision": revision, "rank": rank, "instance": "launch-1"}
        row |= {"folder": f"rank{rank}", "host": "node1", "pid": 100, "state": "live"}
        row |= {"task": "statistics", "level": "L1", "summary_mode": "statistics"}
        row |= {
            "precision": "low",
            "extra_info": True,
            "joined": rank or 0,
            "time": 1000.0 + (rank or 0) + revision,
        }
        self.add("processes", [row | columns])

    def events(self, events):
        """The rows of an `Events`."""
        self.add("records", events.records())
        self.add("nodes", events.nodes())


@pytest.fixture
def rows():
    """Builders of rows: `rows.Events`, and `rows.tensor`, `rows.scalar` for their leaves."""
    return SimpleNamespace(Events=Events, tensor=tensor, scalar=scalar, table=_table)


@pytest.fixture
def store(tmp_path):
    """An empty run in a folder of its own."""
    return Store(tmp_path / "run")


@pytest.fixture
def open_run(tmp_path):
    """Opens the run, again if asked for; closes it at the end."""
    opened = []

    def start(**options):
        for service in opened:
            service.close()
        opened[:] = [RunService(tmp_path / "run", "test", Config(**options), "0")]
        return opened[0]

    yield start
    for service in opened:
        service.close()
