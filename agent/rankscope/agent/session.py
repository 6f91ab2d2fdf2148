"""What all taps share while a job is recorded: the step clock, call numbers, the call tree and the
guard around hooks.

A *step* is what lies between two calls of `step()`. Call numbers (`Functional.linear.3`) restart
with each step; several start/stop pairs inside one step go on counting.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from itertools import count
from types import FrameType
from typing import Any

import torch

from rankscope.agent import apis, ignore
from rankscope.agent import recorder as rec
from rankscope.agent.apis import Api, ApiTable
from rankscope.agent.config import Config
from rankscope.agent.ignore import Ignored, IgnoreRules
from rankscope.agent.log import log
from rankscope.agent.outline import Parts
from rankscope.agent.recorder import Recorder
from rankscope.agent.selection import Selection
from rankscope.agent.slicing import cut

_graph_task = torch._C._current_graph_task_id


class ThreadState(threading.local):
    """Per thread: where in the call tree it is."""

    def __init__(self) -> None:
        self.modules: list[int] = []  # name ids of the open module records, outermost first
        self.frames: list[Any] = []  # the module tap's open calls
        self.dunder: str | None = None  # name an operator shim left for the function tap
        self.api_open = False  # a watched function is running: what it calls is hidden
        self.has_mode = False  # the function tap is on this thread's stack


class Session:
    """State of one debugger between its construction and the end of the process."""

    def __init__(self, config: Config, recorder: Recorder) -> None:
        self.recorder = recorder
        self.local = ThreadState()
        self.running = False  # between start() and stop()
        self.watching = False  # running, and calls of functions are records too
        self.muted = False  # between module_dump() and module_dump_end()
        self.step = 0
        self.recording_step = False  # the current step has been started
        self.agent_seconds = 0.0  # spent in hooks and calls of ours, on the job's threads
        self.left_out: dict[str, None] = {}  # functions whose records risk_level leaves out
        self.configure(config)
        self.scope = 0  # name id of "optimizer" or "clip_grad" while one is open
        self._counters: defaultdict[str, count[int]] = defaultdict(count)
        self._pending_nodes: list[tuple[int, int, int, int, int]] = []
        self._scopes_seen: set[int] = set()
        self.parents: dict[int, int] = {}  # module forward record -> its parent, in this step
        self.mirrors: dict[
            int, int
        ] = {}  # module forward record -> its backward record, once that is awaited
        self.before_node: Callable[[int], None] = lambda sequence: None  # set by the module tap
        self._faults: set[str] = set()
        self._names: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def configure(self, config: Config) -> None:
        """Take over a configuration; only while nothing is recorded."""
        self.config = config
        self.watches_apis = config.level in ("L1", "mix")
        self.watches_modules = config.level in ("L0", "mix")
        self.has_data = config.task != "structure"
        parts = config.data_mode if self.has_data else frozenset[str]()
        self.keeps_input = {"forward", "input"} <= parts
        self.keeps_output = {"forward", "output"} <= parts
        self.keeps_backward = "backward" in parts
        self.slices = config.slices
        self._capture = self.recorder.stacks.capture if config.extra_info else None
        filtered = bool(config.scope or config.list)
        name_id, names = self.recorder.name_id, self.recorder.names
        self.selection = Selection(config, name_id, names) if filtered else None
        self.risk_level = None if filtered or not self.watches_apis else config.risk_level
        self.apis = ApiTable.load(config.apis or apis.DEFAULT_PATH, config.extras)
        self.ignore = IgnoreRules.load(config.ignore or ignore.DEFAULT_PATH)
        self.namespaces = {name: name for name in config.custom_op_namespaces}
        self.namespaces |= self.apis.namespaces
        #: What records of a function show; None: risk_level leaves them out.
        self.shown = functools.cache(self._shown)

    def leave_out(self, shed: Collection[str]) -> None:
        """Record less, as overhead_budget asks: without "stacks", without the "inputs" of forward
        records.
        """
        if "stacks" in shed:
            self._capture = None
        if "inputs" in shed:
            self.keeps_input = False

    def run(self, running: bool) -> None:
        """Switch recording on or off."""
        self.running = running
        self.watching = running and self.watches_apis and not self.muted

    def mute(self, muted: bool) -> None:
        """Let calls of functions, and modules but the one that is dumped, be no records."""
        self.muted = muted
        self.run(self.running)

    # --------------------------------------------------------------------------------------- names

    def next_call(self, stem: str) -> int:
        """Number of the next call of `stem` in this step, from 0."""
        return next(self._counters[stem])

    def api_names(self, stem: str) -> tuple[int, int]:
        """Name ids of the next call's forward and backward records."""
        number = next(self._counters[stem])
        known = self._names[stem]
        if number < len(known):
            return known[number]
        name_id = self.recorder.name_id
        pair = (name_id(f"{stem}.{number}.forward"), name_id(f"{stem}.{number}.backward"))
        if number == len(known):
            known.append(pair)
        return pair

    def clear_step(self) -> None:
        """Forget the finished step's numbers and call tree."""
        self._counters.clear()
        self._pending_nodes.clear()
        self._scopes_seen.clear()
        self.parents.clear()
        self.mirrors.clear()

    # ----------------------------------------------------------------------------------- call tree

    def begin_node(self, name: int, kind: int, direction: int, parent: int, stack: int) -> None:
        """A module record begins; it takes its place in construct.json right after the next record
        that completes.
        """
        self._pending_nodes.append((name, kind, direction, parent, stack))

    def complete_api(
        self, name: int, direction: int, parent: int, stack: int, has_output: bool
    ) -> None:
        """An API's record is complete: it takes its place, by its output's event where there is
        one, then the modules that have begun by now."""
        if not has_output:
            self.recorder.event(self.step, name, rec.NODE, rec.API, direction, parent, stack)
        if self._pending_nodes:
            self.flush_nodes()

    def flush_nodes(self) -> None:
        if self._pending_nodes:
            pending, self._pending_nodes = self._pending_nodes, []
            for name, kind, direction, parent, stack in pending:
                self.recorder.event(self.step, name, rec.NODE, kind, direction, parent, stack)

    def open_scope(self, word: str) -> int:
        """Records get `word` as their parent until the returned previous scope is put back. It
        takes its own place right before the first of them.
        """
        previous, self.scope = self.scope, self.recorder.name_id(word)
        return previous

    def parent(self) -> int:
        """Name id of the record that encloses what happens on this thread now."""
        if self.scope:
            if self.scope not in self._scopes_seen:
                self._scopes_seen.add(self.scope)
                self.recorder.event(self.step, self.scope, rec.NODE, rec.SCOPE, 0)
            return self.scope
        modules = self.local.modules
        return modules[-1] if modules else 0

    def backward_parent(self, forward_parent: int) -> int:
        """The backward record of the nearest enclosing module that has one."""
        while forward_parent:
            mirror = self.mirrors.get(forward_parent)
            if mirror is not None:
                return mirror
            forward_parent = self.parents.get(forward_parent, 0)
        return 0

    def enter_forward(self) -> None:
        """A forward record begins; inside a backward pass (recomputation) what was due before this
        node is written.
        """
        if _graph_task() >= 0:
            node = torch._C._current_autograd_node()
            if node is not None:
                self.before_node(node._sequence_nr())

    # -------------------------------------------------------------------------------------- events

    def event(
        self,
        name: int,
        what: int,
        kind: int,
        direction: int,
        parent: int,
        stack: int,
        parts: Parts,
    ) -> None:
        """An event with data; the structure task has none."""
        if self.has_data:
            if self.slices:
                parts = tuple((part, cut(value, self.slices)) for part, value in parts)
            self.recorder.event(self.step, name, what, kind, direction, parent, stack, parts)

    def backward_parts(self, inputs: Any, outputs: Any) -> Parts:
        """The fields of a backward record that data_mode keeps: `inputs` are the gradients of what
        the call returned, `outputs` those of what it was given.
        """
        if not self.keeps_backward:
            return ()
        sides = self.config.data_mode
        parts = (("input", inputs),) if "input" in sides else ()
        return (*parts, ("output", outputs)) if "output" in sides else parts

    def _shown(self, api: Api) -> Ignored | None:
        if not self.apis.keeps(api, self.risk_level):
            self.left_out[api.name] = None
            return None
        return self.ignore.of(api)

    def keeps(self, name: int) -> bool:
        """Whether scope and list keep the record of a call that is about to be made."""
        return self.selection is None or self.selection.keeps(name, self.local.modules)

    def enters(self, name: int) -> bool:
        """Whether scope and list keep a module record that begins."""
        return self.selection is None or self.selection.enters(name, self.local.modules)

    def leaves(self, name: int) -> bool:
        """Whether they keep what is written when it ends."""
        return self.selection is None or self.selection.leaves(name, self.local.modules)

    def keeps_gradient(self, stem: str, name: int) -> bool:
        """Whether they keep the gradients of a module's parameters."""
        return self.selection is None or self.selection.keeps_gradient(stem, name)

    def stack(self, frame: FrameType | None = None) -> int:
        """Id of the stack from `frame`, or from the caller; 0 without extra_info."""
        return self._capture(frame) if self._capture is not None else 0

    # --------------------------------------------------------------------------------------- guard

    def fault(self, where: str, error: BaseException) -> None:
        """A hook of ours failed: the job goes on, one record is lost and counted, the user is told
        once per place.
        """
        self.recorder.drop(self.step, 1, "error")
        if where not in self._faults:
            self._faults.add(where)
            log("error", f"recording failed in {where} and goes on without that record: {error!r}")
