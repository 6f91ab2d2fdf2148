"""Names of module objects: "Linear-2" is the second Linear that the watched models hold.

A module's name says where it stands in a model; the object's name says which object it is, and its
calls are counted as long as the process lives, not from each step on.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict

import numpy as np
import numpy.typing as npt
from torch import nn

from rankscope.v1 import collector_pb2 as pb

_Ints = npt.NDArray[np.int64]


class Objects:
    """Names and calls of the objects of one process. May be asked from any thread."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._of_class: Counter[str] = Counter()
        self._calls: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._records: dict[tuple[int, int], tuple[str, int]] = {}
        self._lock = threading.Lock()

    def name(self, module: nn.Module) -> str:
        """The name of an object; one that is new gets the next number of its class."""
        found = self._names.get(module)
        if found is None:
            kind = type(module).__name__
            with self._lock:
                self._of_class[kind] += 1
                found = self._names[module] = f"{kind}-{self._of_class[kind]}"
        return found

    def called(self, step: int, module: nn.Module, forward: int, backward: int) -> None:
        """A forward of the object has these records (name ids), the second one perhaps never."""
        name = self.name(module)
        with self._lock:
            counts = self._calls[name]
            counts["forward"] += 1
            self._records[step, forward] = (name, counts["forward"])
            self._records[step, backward] = (name, 0)

    def went_backward(self, step: int, backward: int) -> None:
        """A backward pass reaches the record: it is the object's next backward."""
        with self._lock:
            name, _ = self._records.get((step, backward), ("", 0))
            if name:
                counts = self._calls[name]
                counts["backward"] += 1
                self._records[step, backward] = (name, counts["backward"])

    def encode(self, columns: pb.Columns, steps: _Ints, names: _Ints) -> None:
        """Fill in the objects of the events that have these steps and name ids."""
        with self._lock:
            newest = int(steps.max())
            found = [
                self._records.get(record, ("", 0))
                for record in zip(steps.tolist(), names.tolist(), strict=True)
            ]
            for record in [known for known in self._records if known[0] < newest]:
                del self._records[record]
        distinct = {name: i for i, name in enumerate(dict.fromkeys(n for n, _ in found if n), 1)}
        columns.objects.extend(distinct)
        index = [distinct.get(name, 0) for name, _ in found]
        columns.event_object = np.array(index, "<u4").tobytes()
        columns.event_object_call = np.array([call for _, call in found], "<i8").tobytes()
