"""The thread that writes the layout and seals steps, so that no acknowledgement waits for it.

Jobs are done in the order given, except that seals wait until nothing else was to be done for a
moment: a script that ends waits for its dump.json, nobody waits for a seal.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal, Protocol

import pyarrow as pa

from rankscope.collector.blobs.layout import TensorFiles
from rankscope.collector.jobs import (
    Job,
    Part,
    RemoveFolders,
    RenameFolder,
    RenderStep,
    SayFarewell,
    SealStep,
)
from rankscope.collector.layout import Layout
from rankscope.collector.render import Header, render
from rankscope.collector.render.columns import split
from rankscope.collector.steps import Seal
from rankscope.collector.store import RunStore

log = logging.getLogger(__name__)

_WRITERS = 4
_QUIET_SECONDS = 0.3
_SEAL_PATIENCE_SECONDS = 3.0
_SEALS_AT_ONCE = 32


class Reports(Protocol):
    """Whom the finisher tells. Called in its thread."""

    def sealed(self, seal: Seal, events: int) -> None:
        """The step's files were replaced."""

    def failed(self, job: RenderStep | SealStep, error: Exception) -> None:
        """The job was not done."""

    def farewell(self, process: str, folders: Sequence[str]) -> None:
        """Everything of the process stands; folders relative to the run."""


class Finisher(threading.Thread):
    """Works off jobs until it is told to stop."""

    def __init__(
        self, store: RunStore, layout: Layout, reports: Reports, tensors: TensorFiles
    ) -> None:
        super().__init__(name="rankscope-finisher", daemon=True)
        self._store, self._layout, self._reports = store, layout, reports
        self._tensors = tensors
        self._jobs: deque[Job] = deque()
        self.seals, self.seal_seconds = 0, 0.0
        self._seals: dict[int, tuple[float, SealStep]] = {}
        self._last_job_at = 0.0
        self._changed = threading.Condition()
        self._stopping = False
        self._deadline = float("inf")
        self._busy = False
        self._maintain = False
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="rankscope-layout")

    def add(self, jobs: Iterable[Job]) -> None:
        """Give more to do."""
        with self._changed:
            for job in jobs:
                if isinstance(job, SealStep):
                    added_at, _ = self._seals.get(job.seal.step, (time.monotonic(), None))
                    self._seals[job.seal.step] = (added_at, job)
                elif not (isinstance(job, RenderStep) and self._merged(job)):
                    self._jobs.append(job)
            self._changed.notify()

    def maintain_soon(self) -> None:
        """Tidy the store up before the next job."""
        with self._changed:
            self._maintain = True
            self._changed.notify()

    def idle(self) -> bool:
        """Whether nothing is left to do."""
        with self._changed:
            return not (self._busy or self._jobs or self._seals)

    def stop(self, deadline: float = float("inf")) -> bool:
        """End after what is there to do, at the deadline (of time.monotonic()) after the job that
        is being done; whether nothing is left.
        """
        with self._changed:
            stopped_before, self._stopping = self._stopping, True
            self._deadline = deadline
            self._changed.notify()
        self.join()
        self._writers.shutdown()
        left = len(self._jobs) + len(self._seals)
        if left and not stopped_before:
            log.warning("%d jobs of the layout and seals are left for the next start", left)
        return not left

    def run(self) -> None:
        while (job := self._next()) is not None:
            try:
                if job == "maintain":
                    self._store.maintain()
                elif isinstance(job, SealStep):
                    self._timed_seal([job, *self._more_seals(job)])
                else:
                    self._do(job)
            except Exception as error:
                log.exception("%s failed", job if job == "maintain" else type(job).__name__)
                if isinstance(job, RenderStep | SealStep):
                    self._reports.failed(job, error)

    def _merged(self, job: RenderStep) -> bool:
        """Join a render with one of the same step that waits, if no folder changes in between."""
        for index in range(len(self._jobs) - 1, -1, -1):
            other = self._jobs[index]
            if isinstance(other, RenameFolder | RemoveFolders):
                return False
            if isinstance(other, RenderStep) and other.step == job.step:
                self._jobs[index] = replace(other, parts={**other.parts, **job.parts})
                return True
        return False

    def _next(self) -> Job | Literal["maintain"] | None:
        with self._changed:
            self._busy = False
            if self._stopping and time.monotonic() >= self._deadline:
                return None
            while not (self._jobs or self._maintain):
                if (wait := self._until_seal()) == 0.0:
                    break
                if self._stopping and wait is None:
                    return None
                self._changed.wait(wait)
            self._busy = True
            if self._maintain:
                self._maintain = False
                return "maintain"
            if self._jobs:
                self._last_job_at = time.monotonic()
                return self._jobs.popleft()
            return self._seals.pop(next(iter(self._seals)))[1]

    def _until_seal(self) -> float | None:
        """How long the oldest seal still waits, None without one."""
        if not self._seals:
            return None
        added_at, _ = next(iter(self._seals.values()))
        at = min(self._last_job_at + _QUIET_SECONDS, added_at + _SEAL_PATIENCE_SECONDS)
        return 0.0 if self._stopping else max(0.0, at - time.monotonic())

    def _do(self, job: Job) -> None:
        match job:
            case RenderStep():
                self._render(job)
            case RenameFolder():
                self._layout.rename(job.old, job.new)
            case RemoveFolders():
                self._layout.remove(job.folders)
            case SayFarewell():
                paths = [self._layout.folder(*folder) for folder in job.folders]
                there = [path for path in paths if path.is_dir()]
                names = [str(path.relative_to(self._layout.run_path)) for path in there]
                self._reports.farewell(job.process, names)

    def _more_seals(self, first: SealStep) -> list[SealStep]:
        """Others that wait for the same ranks: a commit for each would take longer than a small
        step itself.
        """
        with self._changed:
            steps = [s for s, (_, job) in self._seals.items() if job.ranks == first.ranks]
            return [self._seals.pop(step)[1] for step in steps[: _SEALS_AT_ONCE - 1]]

    def _timed_seal(self, jobs: Sequence[SealStep]) -> None:
        began = time.monotonic()
        self._seal(jobs)
        self.seals += len(jobs)
        self.seal_seconds += time.monotonic() - began

    def _seal(self, jobs: Sequence[SealStep]) -> None:
        try:
            events = self._store.seal_steps([job.seal.step for job in jobs], jobs[0].ranks)
        except Exception as error:
            if len(jobs) == 1:
                log.error("step %d is not sealed: %s", jobs[0].seal.step, error)
                return self._reports.failed(jobs[0], error)
            for job in jobs:  # one of them is to blame, not the others
                self._seal([job])
            return
        for job in jobs:
            self._reports.sealed(job.seal, events[job.seal.step])

    def _render(self, job: RenderStep) -> None:
        processes = list(job.parts)
        nodes, records = self._store.read_step(job.step, processes)
        stacks = self._store.stacks(processes)
        nodes_of, records_of = split(nodes, "process"), split(records, "process")
        writing = []
        for process, part in job.parts.items():
            own_nodes = nodes_of.get(process, nodes.slice(0, 0))
            own_records = records_of.get(process, records.slice(0, 0))
            header = self._header(job.step, part, own_records)
            documents = render(own_nodes, own_records, stacks, header)
            self._tensors.write(job.step, part.folder, own_records)
            # The disk makes files for some while the next ones are rendered.
            writing.append(self._writers.submit(self._write, job.step, part.folder, documents))
        for written in writing:
            written.result()

    def _write(self, step: int, folder: str, documents: Mapping[str, bytes]) -> None:
        self._layout.write(step, folder, documents)

    def _header(self, step: int, part: Part, records: pa.Table) -> Header:
        data_dir = None
        if part.task == "tensor" or records["data_name"].null_count < records.num_rows:
            data_dir = str(self._layout.folder(step, part.folder) / "dump_tensor_data")
        return Header(
            task=part.task,
            level=part.level,
            summary_mode=part.summary_mode,
            precision=part.precision,
            extra_info=part.extra_info,
            dump_data_dir=data_dir,
        )
