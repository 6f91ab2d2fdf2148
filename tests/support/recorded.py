"""Recording without a collector: batches stay in memory and are read back as documents."""

import json
import tempfile

import pyarrow as pa
import pyarrow.compute as pc

import rankscope.agent.connection as connection_module
from rankscope.agent.config import Config
from rankscope.agent.recording import Recording
from rankscope.collector.decode import decode
from rankscope.collector.render import Header, render


class MemoryTransport:
    """Takes everything there is when it closes."""

    def __init__(self, config, hello, source, log, *more):
        self.hello, self._source = hello, source
        self.batches = []

    def start(self):
        pass

    def wake(self):
        pass

    def throttle(self):
        pass

    def close(self, reason, timeout_seconds):
        while (batch := self._source.take()) is not None:
            self.batches.append(batch)

    def abandon_after_fork(self):
        self._source = None


class Recorded:
    """A recording of this process with the debugger's methods, and what it holds after `end`.

    Every risk level is recorded unless the configuration says otherwise.
    """

    def __init__(self, monkeypatch, level="mix", *, model=None, **config):
        monkeypatch.setattr(connection_module, "Transport", MemoryTransport)
        # The test's process keeps its signal handlers and its environment.
        monkeypatch.setattr(connection_module.signals, "install", lambda *_: None)
        monkeypatch.setenv("RANKSCOPE_PARENT", "")
        self._recording = Recording(_config({"level": level, "risk_level": "ALL"} | config))
        self.faults_expected = False
        self._model = model
        self._tables = None

    @property
    def session(self):
        return self._recording._session

    @property
    def transport(self):
        """None while nothing has been recorded."""
        return self._recording._connection._transport

    def start(self, model=None, token_range=None, rank_id=None):
        self._recording.start(model if model is not None else self._model, token_range, rank_id)

    def stop(self):
        self._recording.stop()

    def step(self):
        self._recording.end_step()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    # ------------------------------------------------------------------------------- what it holds

    def end(self):
        """Close the recording; its documents can be read from now on."""
        if self._tables is None:
            self._recording.close("exit")
            if self.transport is not None:  # it has recorded something
                self._tables = _tables(self.transport)
        return self

    @property
    def drops(self):
        """(reason, events) of what was dropped."""
        if self.transport is None:  # it never recorded
            return []
        self.end()
        batches = self.transport.batches
        return [(drop.reason, drop.events) for batch in batches for drop in batch.drops]

    def document(self, name="dump.json", step=0):
        self.end()
        nodes, records, stacks, header = self._tables
        here = [table.filter(pc.equal(table["step"], step)) for table in (nodes, records)]
        return json.loads(render(*here, stacks, header)[name])

    def data(self, step=0):
        return self.document(step=step)["data"]

    def tree(self, step=0):
        return self.document("construct.json", step)

    def names(self, step=0, without=()):
        """Names of all records in order; those that contain one of the given words are left out."""
        return [n for n in self.data(step) if not any(word in n for word in without)]

    def forwards(self, step=0):
        """Names of forward records without their direction: "Torch.relu.0"."""
        return [n.replace(".forward", "") for n in self.data(step) if ".forward" in n]


def _config(content):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"dump_path": "nothing is written here"} | content, file)
        file.flush()
        return Config.load(file.name, environ={})


def _tables(transport):
    how = transport.hello.recording
    decoded = [
        decode(
            b.SerializeToString(), process="a" * 32, sequence=i + 1, summary_mode=how.summary_mode
        )
        for i, b in enumerate(transport.batches)
    ]
    stacks = {stack.id: list(stack.frames) for b in transport.batches for stack in b.stacks}
    header = Header(how.task, how.level, how.summary_mode, how.precision, how.extra_info, None)
    nodes = pa.concat_tables([d.nodes for d in decoded])
    return nodes, pa.concat_tables([d.records for d in decoded]), stacks, header
