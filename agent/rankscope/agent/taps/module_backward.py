"""The backward record of a module, without a node of our own in the graph.

torch's full backward hook puts two nodes around a module; that reorders gradient sums and changes
bits. Here only hooks on nodes that exist anyway are used:

* before the forward, the gradient edges (node, output number) of the input tensors are noted;
* after it, a pre-hook on each output's *producer* node will see the gradient of the output;
* from the outputs the graph is walked back to the noted edges; each node that sends something along
  such an edge is a *consumer*, and a post-hook on it will see that part of the input's gradient.
  The parts are added in order of arrival.

A record is written where the full hook's input node would have run. The engine runs the ready node
with the highest sequence number first (gradient accumulators before everything), and that node
would bear the number current when the forward began. Whatever consumes a tensor is younger than
what produced it, so when a node older than the call runs, all of the call's nodes that will ever
run have run: that is when the record is written, also when some outputs were not used.

An output that the module itself uses again (y, y + 1) has the gradient that comes from outside:
what its producer receives less what the module's own nodes sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from rankscope.agent import recorder as rec
from rankscope.agent.session import Session
from rankscope.agent.taps.api_backward import Gradients

Edge = tuple[Node, int]

current_sequence: Callable[[], int] = vars(torch.autograd)["_get_sequence_nr"]
_graph_task = torch._C._current_graph_task_id
_clock = time.perf_counter


class Awaited:
    """The backward record that one module call will have. Holds no tensor and no node between
    passes.
    """

    __slots__ = (
        "call",
        "inputs",
        "name",
        "outputs",
        "parent",
        "passed",
        "sequence",
        "step",
    )

    def __init__(self, name: int, parent: int, step: int, sequence: int, call: int) -> None:
        self.name = name  # name id of the backward record
        self.parent = parent  # name id of the enclosing forward record
        self.step = step
        self.sequence = sequence  # priority that the full hook's node would have
        self.call = call  # tells calls of equal sequence apart: the inner one is later
        self.outputs = 0  # number of output gradients
        self.inputs = 0  # number of input gradients
        self.passed: list[
            tuple[int, int]
        ] = []  # (output, input) pairs where the input is returned as output


class Arrival:
    """What one backward pass has brought for one Awaited."""

    __slots__ = ("awaited", "inputs", "inside", "outputs", "outputs_left", "parent")

    def __init__(self, awaited: Awaited, parent: int) -> None:
        self.awaited = awaited
        self.parent = parent
        self.outputs: list[torch.Tensor | None] = [None] * awaited.outputs
        self.inputs: list[torch.Tensor | None] = [None] * awaited.inputs
        self.inside: dict[
            int, torch.Tensor
        ] = {}  # output index -> what the module's own nodes sent to it
        self.outputs_left = awaited.outputs


class _Pass(dict[Awaited, Arrival]):
    """What one backward pass has brought, and the calls whose records it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[Awaited] = set()


class ModuleBackward:
    """Awaits and writes module backward records; one per session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._calls = 0
        self._passes: dict[int, _Pass] = {}  # by the engine's id of a backward pass
        session.before_node = self.before_node

    def end_step(self) -> None:
        """Forget passes that never came to an end; none is open when step() is called between
        passes.
        """
        self._passes.clear()

    # ------------------------------------------------------------------------------ at the forward

    def begin(self) -> tuple[int, int]:
        """(sequence, call) of a module call that is about to start."""
        self._calls += 1
        return current_sequence(), self._calls

    def await_call(
        self,
        name: int,
        parent: int,
        began: tuple[int, int],
        edges: list[Edge],
        outputs: list[torch.Tensor],
        producers: dict[Node, Producer],
    ) -> bool:
        """Await the gradients of a finished call; `outputs` are its output tensors that require
        grad, `edges` its inputs'. `producers` are those of the calls inside it, and gets this
        call's. False: there will be none.
        """
        awaited = Awaited(name, parent, self._session.step, *began)
        awaited.outputs, awaited.inputs = len(outputs), len(edges)
        places: dict[Edge, int] = {}
        for index, noted in enumerate(edges):
            places.setdefault(noted, index)
        output_edges = [_edge(tensor) for tensor in outputs]
        inside: dict[Edge, int] = {}
        for index, edge in enumerate(output_edges):
            if edge is None:
                continue
            inside.setdefault(edge, index)
            if edge in places:
                awaited.passed.append((index, places[edge]))
            producer = producers.get(edge[0])
            if producer is None:
                producer = producers[edge[0]] = Producer(self, edge[0])
            producer.add(awaited, edge[1], index)
        if inside and (edges or len(inside) > 1):
            for node, sends in consumers(inside, places, awaited.sequence):
                node.register_hook(_ConsumerHook(self, awaited, sends, node._sequence_nr()))
        return bool(inside)

    # ----------------------------------------------------------------------------- at the backward

    def before_node(self, sequence: int) -> None:
        """A node with this priority runs: write the records whose turn was before it."""
        arrivals = self._passes.get(_graph_task())
        if arrivals:
            self._write(arrivals, sequence)

    def output_arrived(self, awaited: Awaited, index: int, gradient: torch.Tensor | None) -> None:
        if awaited.passed and any(output == index for output, _ in awaited.passed):
            known = self._passes.get(_graph_task())
            if known is not None and awaited in known.written:
                # An input handed on beside other outputs: its whole gradient comes when the call's
                # turn is over, and what of it came through the call cannot be told.
                return
        arrival = self._arrival(awaited)
        if arrival is None:
            return
        inside = arrival.inside.pop(index, None)
        if inside is not None and gradient is not None:
            gradient = _outside(gradient, inside)
        arrival.outputs[index] = gradient
        arrival.outputs_left -= 1
        for output, place in awaited.passed:
            if output == index:
                arrival.inputs[place] = gradient
        if not awaited.inputs and not arrival.outputs_left:
            # Nothing upstream wants a gradient: the full hook fires at once.
            self._finish(self._passes[_graph_task()], arrival)

    def consumer_ran(self, awaited: Awaited, sends: list[Send], inputs: Gradients) -> None:
        """Gradients went along the edges of `sends`."""
        arrival = self._arrival(awaited)
        if arrival is None or not self._session.running:
            return
        for send in sends:
            gradient = inputs[send.number]
            if gradient is None:
                continue
            if send.to_input:
                known = arrival.inputs[send.place]
                arrival.inputs[send.place] = gradient if known is None else known + gradient
            else:
                before = arrival.inside.get(send.place)
                arrival.inside[send.place] = gradient if before is None else before + gradient

    def _arrival(self, awaited: Awaited) -> Arrival | None:
        session = self._session
        # After stop() records still take their places, until step(); they have no data then.
        if not session.recording_step or session.step != awaited.step:
            return None
        task = _graph_task()
        arrivals = self._passes.get(task)
        if arrivals is None:
            arrivals = self._passes[task] = _Pass()
            if task >= 0:
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        arrival = arrivals.get(awaited)
        if arrival is None:
            parent = session.backward_parent(awaited.parent)
            arrival = arrivals[awaited] = Arrival(awaited, parent)
            if session.recorder.objects is not None:
                session.recorder.objects.went_backward(session.step, awaited.name)
            session.begin_node(awaited.name, rec.MODULE, rec.BACKWARD, parent, 0)
            session.enters(awaited.name)
            session.local.modules.append(awaited.name)
        return arrival

    def _end(self, task: int) -> None:
        """A backward pass is over: write what is left."""
        arrivals = self._passes.pop(task, _Pass())
        with torch._C.DisableTorchFunction():
            self._write(arrivals, -1)

    def _write(self, arrivals: _Pass, sequence: int) -> None:
        due = [a for a in arrivals.values() if a.awaited.sequence > sequence]
        for arrival in sorted(
            due, key=lambda a: (a.awaited.sequence, a.awaited.call), reverse=True
        ):
            self._finish(arrivals, arrival)

    def _finish(self, arrivals: _Pass, arrival: Arrival) -> None:
        session, awaited = self._session, arrival.awaited
        arrivals.pop(awaited, None)
        arrivals.written.add(awaited)
        _pop_last(session.local.modules, awaited.name)
        if session.step != awaited.step:
            return
        try:
            kept = session.leaves(awaited.name)
            if not session.running:
                return
            parts = session.backward_parts(arrival.outputs, arrival.inputs)
            if kept and parts:
                session.event(
                    awaited.name, rec.OUTPUT, rec.MODULE, rec.BACKWARD, arrival.parent, 0, parts
                )
            session.flush_nodes()
        except Exception as error:
            session.fault("a module's backward", error)


class Producer:
    """The one pre-hook on a node that produced outputs of module calls; outer calls are
    told first.
    """

    def __init__(self, owner: ModuleBackward, node: Node) -> None:
        self._owner = owner
        self._awaited: list[tuple[Awaited, int, int]] = []
        self._sequence = node._sequence_nr()
        node.register_prehook(self)

    def add(self, awaited: Awaited, number: int, index: int) -> None:
        """The node's output `number` is the call's output `index`."""
        self._awaited.insert(0, (awaited, number, index))

    def __call__(self, gradients: Gradients) -> None:
        owner, began = self._owner, _clock()
        try:
            with torch._C.DisableTorchFunction():
                owner.before_node(self._sequence)
                for awaited, number, index in self._awaited:
                    owner.output_arrived(awaited, index, gradients[number])
                    owner.before_node(
                        self._sequence
                    )  # a call that only hands its input on is over now
        except Exception as error:
            owner._session.fault("a module's output gradient", error)
        owner._session.agent_seconds += _clock() - began


class _ConsumerHook:
    def __init__(
        self, owner: ModuleBackward, awaited: Awaited, sends: list[Send], sequence: int
    ) -> None:
        self._owner, self._awaited, self._sends = owner, awaited, sends
        self._sequence = sequence

    def __call__(self, inputs: Gradients, outputs: Gradients) -> None:
        began = _clock()
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._owner.before_node(self._sequence)
                self._owner.consumer_ran(self._awaited, self._sends, inputs)
        except Exception as error:
            self._owner._session.fault("a module's input gradient", error)
        self._owner._session.agent_seconds += _clock() - began


def gradient_edges(tensors: Iterable[torch.Tensor]) -> list[Edge]:
    """The edges along which the tensors will receive gradients, in order; those that have none are
    left out.
    """
    return [edge for tensor in tensors if (edge := _edge(tensor)) is not None]


def _edge(tensor: torch.Tensor) -> Edge | None:
    try:
        edge: GradientEdge = get_gradient_edge(tensor)
    except (RuntimeError, ValueError):
        return None
    return (edge.node, edge.output_nr)


class Send(NamedTuple):
    """A node's gradient output `number` goes to input or output `place` of a module call."""

    number: int
    to_input: bool
    place: int


def consumers(
    outputs: dict[Edge, int], inputs: dict[Edge, int], since: int
) -> list[tuple[Node, list[Send]]]:
    """Nodes between a call's outputs and inputs that send along one of these edges.

    Nodes older than `since` that are no input belong to what ran before the call: the walk does not
    enter them.
    """
    found: list[tuple[Node, list[Send]]] = []
    todo = [edge[0] for edge in outputs if edge not in inputs]
    seen = set(todo)
    while todo:
        node = todo.pop()
        sends = []
        for number, (target, output) in enumerate(node.next_functions):
            if target is None:
                continue
            place = inputs.get((target, output))
            if place is not None:
                sends.append(Send(number, True, place))
                continue
            index = outputs.get((target, output))
            if index is not None:
                sends.append(Send(number, False, index))
            if target not in seen and target._sequence_nr() >= since:
                seen.add(target)
                todo.append(target)
        if sends:
            found.append((node, sends))
    return found


def _outside(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
    """total - part, computed wide: None when nothing is left, total itself where the difference
    says nothing (infinities, sparse).
    """
    try:
        if torch.equal(total, part):
            return None
        rest = (total.detach().double() - part.detach().double()).to(total.dtype)
        return rest if bool(torch.isfinite(rest).all()) else total
    except (RuntimeError, TypeError):
        return total


def _pop_last(names: list[int], name: int) -> None:
    for index in range(len(names) - 1, -1, -1):
        if names[index] == name:
            del names[index]
            return
