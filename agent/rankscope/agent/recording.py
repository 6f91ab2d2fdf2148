"""One process's recording from the first start() to the end: step filter, taps on and off, rank,
transport.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rankscope.agent import hello as hello_message
from rankscope.agent import notices
from rankscope.agent.budget import Budget
from rankscope.agent.capture import Capture
from rankscope.agent.config import Config
from rankscope.agent.config_watch import ConfigWatch
from rankscope.agent.connection import Connection
from rankscope.agent.errors import UsageError
from rankscope.agent.load import Loader
from rankscope.agent.log import log
from rankscope.agent.objects import Objects
from rankscope.agent.recorder import Recorder, StepCost
from rankscope.agent.session import Session
from rankscope.agent.statistics import Wanted
from rankscope.agent.taps import Taps
from rankscope.agent.taps.modules import Model, named_modules
from rankscope.agent.taps.saves import Saves, is_savable
from rankscope.agent.taps.tokens import TokenRange, check_token_range
from rankscope.agent.taps.wrappers import CustomApis
from rankscope.v1 import collector_pb2 as pb


class Recording:
    """What the debugger's calls act on. Its methods are called by the script's threads, one at a
    time.
    """

    def __init__(self, config: Config, reload: Callable[[], Config] | None = None) -> None:
        """`reload` reads the configuration once more, for dump_enable."""
        self._config = config
        self._recorder = Recorder(
            "" if config.summary_mode == "statistics" else config.summary_mode,
            _capture(config),
            Wanted(config.samples, config.std),
        )
        if config.object_names:
            self._recorder.objects = Objects()
        self._session = Session(config, self._recorder)
        self._taps = Taps(self._session)
        self._saves = Saves(self._session)
        self.custom = CustomApis(self._session, config.custom_wrap_ops)
        self.custom.register_listed(imports=False)
        self._watch: ConfigWatch | None = None
        self._has_followed = False  # the configuration is no longer that of the construction
        if config.dump_enable is not None and config.path is not None and reload is not None:
            self._watch = ConfigWatch(config.path, config.dump_enable, reload)
        self._lock = threading.RLock()
        self._started = False  # between the script's start() and stop()
        self._said: set[str] = set()
        self._skipped: set[str] = set()  # filters that have kept a step from being recorded
        self._closed = False
        self._forked = False
        self._budget = Budget(config.overhead_budget)
        self._unmet = config.tensor_list  # entries that no record's name is known to have met
        self._data_before = 0  # events with data before this step
        self._ended: float | None = None  # when the step before this one ended
        self._connection = Connection(self._recorder, self._flush_on_signal)
        self._tokens: TokenRange | None = None
        self._loader: Loader | None = None
        if config.replacing is not None:
            self._loader = Loader(config.replacing, lambda: self._session.step, self._rank)
        _recordings.add(self)

    @property
    def needs_model(self) -> bool:
        return self._session.watches_modules

    # -------------------------------------------------------------------------- the script's calls

    def start(
        self, model: Model | None, token_range: list[int] | None, rank_id: int | None
    ) -> None:
        with self._lock, self._counted():
            self._look_at_config()
            try:
                self._check_start(model, token_range)
            except UsageError as error:
                if not self._has_followed:
                    raise
                # The file has changed under a script that was right: it goes on.
                return self._say_once("error", f"nothing is recorded: {error}")
            if not self._load_inputs(model, rank_id) or not self._may_record(rank_id):
                return
            self._begin()
            self._started = True
            self._watch_model(model)
            self._taps.start()
            self.custom.register_listed(imports=True)
            self._count_tokens(model, token_range)

    def stop(self) -> None:
        with self._lock, self._counted():
            if self._loader is not None:
                self._loader.stop()
            if not self._started:
                # A stop inside a watched call left the mode for torch to put back.
                self._taps.stop()
                return
            self._stop()
            self._look_at_config()

    def _stop(self) -> None:
        self._started = False
        self._pause()
        self._recorder.step_event(self._session.step, pb.StepEvent.PAUSE)
        self._connection.wake()

    def end_step(self) -> None:
        with self._lock:
            session, began = self._session, time.perf_counter()
            recorded = session.recording_step
            if recorded:
                self._taps.end_step()
                self._say_what_is_missing()
                session.recording_step = False
            cost = self._step_cost(began, recorded)
            if recorded:
                self._recorder.step_event(session.step, pb.StepEvent.END, cost=cost)
                self._connection.wake()
            if self._loader is not None:
                self._loader.end_step()
            session.clear_step()
            session.step += 1
            if not self._started:
                self._taps.stop()
            elif self._wants_step():  # step() without stop(): recording goes on in the next step
                self._begin()
            else:
                self._started = False
                self._pause()
            self._look_at_config()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What happens inside is the agent's time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._session.agent_seconds += time.perf_counter() - began

    def _step_cost(self, began: float, recorded: bool) -> StepCost:
        """The cost of the step that ends, which the budget takes in."""
        session, now = self._session, time.perf_counter()
        agent_seconds, session.agent_seconds = session.agent_seconds + now - began, 0.0
        wall_seconds = now - self._ended if self._ended is not None else 0.0
        self._ended, shed = now, ",".join(self._budget.shed)
        if self._budget.step_ended(agent_seconds, wall_seconds, recorded):
            left_out = self._budget.shed[-1]
            share = agent_seconds / max(wall_seconds - agent_seconds, 1e-9)
            text = notices.over_budget(left_out, share, self._config.overhead_budget, session.step)
            self._say_once("warning", text, about=f"budget {left_out}")
        return StepCost(agent_seconds, wall_seconds, shed)

    def save(self, value: Any, name: str, with_gradients: bool) -> None:
        """Record one value at level debug, and the gradients that its tensors will have."""
        if not isinstance(name, str) or not name:
            raise UsageError(f"save(..., {name!r}): the name must be a string that is not empty")
        with self._lock:
            if self._config.level != "debug":
                self._say_once("warning", "save() records at level debug only; nothing is saved")
            elif not is_savable(value):
                self._say_once(
                    "warning",
                    f"save(..., {name!r}): nothing is saved; only tensors, int, float, str and "
                    "lists, tuples and dicts (with string keys) of these can be",
                )
            elif self._may_record(None):
                self._begin()
                self._saves.save(value, name, with_gradients)

    def set_init_step(self, step: int) -> None:
        """The current step, which has recorded nothing yet, bears this number."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"set_init_step({step!r}): must be a whole number from 0")
        with self._lock:
            if self._session.recording_step:
                raise UsageError(
                    f"set_init_step({step}) inside step {self._session.step}: "
                    "call it before the loop, or after step()"
                )
            self._session.clear_step()
            self._session.step = step

    def module_dump(self, module: nn.Module, name: str) -> None:
        """Until `module_dump_end`, only this module is recorded."""
        if not isinstance(module, nn.Module) or not isinstance(name, str) or not name:
            raise UsageError(
                f"module_dump({type(module).__name__}, {name!r}): "
                "needs a torch.nn.Module and a name for it"
            )
        with self._lock:
            if self._closed or self._config.level == "debug":
                return
            if not self._taps.dump_module(module, name):
                self._say_once(
                    "info",
                    f"module_dump({name!r}) changes nothing: the module is recorded as a part of "
                    "the model given to start()",
                )

    def module_dump_end(self) -> None:
        """Everything is recorded again."""
        with self._lock:
            self._taps.end_dump()

    def close(self, reason: str, timeout_seconds: float | None = None) -> None:
        """The process ends: flush within the deadline, say goodbye. Safe to call twice and at any
        time.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._config.steps and "step" in self._skipped and not self._connection.is_open:
                text = notices.step_never_reached(self._config.steps, self._session.step)
                self._say_once("warning", text)
            self._pause()
            self._taps.end_dump()
            self.custom.clear()
        self._connection.close(reason, timeout_seconds or self._config.exit_seconds)

    # ---------------------------------------------------------------------------- step and filters

    def _may_record(self, rank_id: int | None) -> bool:
        """Whether this process records the current step; learns its rank on the way."""
        if self._forked:
            self._say_once(
                "warning",
                "this process was forked from one that records and records nothing itself; "
                "start it with spawn, or make the debugger after the fork",
            )
        if self._closed or self._is_past_last_step():
            return False
        if self._watch is not None and not self._watch.is_on:
            return False
        self._connection.call_rank(rank_id)
        if not self._session.recording_step or self._config.level != "debug":
            self._connection.learn_rank()
        return self._wants_step()

    def _load_inputs(self, model: Model | None, rank_id: int | None) -> bool:
        """Have inputs replaced, as "load" asks; whether there is to be a recording as well."""
        load = self._config.replacing
        if self._loader is None or load is None or self._closed or self._forked:
            return True
        self._connection.call_rank(rank_id)
        self._connection.learn_rank()
        assert model is not None  # _check_start
        self._loader.start(named_modules(model))
        if not load.record:
            self._say_once(
                "info",
                'load replaces inputs and nothing is recorded; "dump_after_load": true records',
            )
        return load.record

    def _rank(self) -> int | None:
        known = self._connection.rank
        return None if known is None else known.rank

    def _watch_model(self, model: Model | None) -> None:
        if model is not None and self._session.watches_modules:
            self._taps.watch(model)

    def _count_tokens(self, model: Model | None, token_range: list[int] | None) -> None:
        if self._tokens is not None:
            self._tokens.remove()
            self._tokens = None
        if token_range is not None:
            self._tokens = TokenRange(self._session, model, *token_range)

    def _look_at_config(self) -> None:
        """Follow config.json, when dump_enable says so."""
        if self._watch is None or self._closed:
            return
        config = self._watch.look(self._config)
        if self._started and (not self._watch.is_on or config is not self._config):
            self._stop()
        if config is not self._config:
            self._config, self._has_followed = config, True
            self._taps.stop()
            self._session.configure(config)
            self._taps = Taps(self._session)
            if self._connection.is_open:
                self._recorder.recording_changed(hello_message.recording(config))

    def _say_what_is_missing(self) -> None:
        session = self._session
        if session.selection is not None:
            for text in session.selection.end_step():
                self._say_once("warning", notices.unused(text, session.step), about=text)
        # Names stay known, so an entry that was met or told about is not looked for again.
        unmet, self._unmet = self._unmet, ()
        for entry in unmet:
            if not any(entry in name for name in self._recorder.names):
                text = f"tensor_list entry {entry!r}"
                self._say_once("warning", notices.unused(text, session.step), about=text)
        if session.has_data and self._recorder.events_with_data == self._data_before:
            self._say_once("warning", notices.no_data(self._config, session.step), about="no data")
        names, session.left_out = session.left_out, {}
        if self._connection.rank is None or self._connection.rank.rank == 0:
            if text := notices.left_out(session.risk_level, names):
                self._say_once("info", text, about="left out")

    def _check_start(self, model: Model | None, token_range: list[int] | None) -> None:
        roots = model if isinstance(model, list | tuple) else [model]
        if model is not None and not all(isinstance(root, nn.Module) for root in roots):
            raise UsageError(
                f"start(model={type(model).__name__}): model must be a torch.nn.Module, "
                "or a list or tuple of them"
            )
        if model is None and self._config.replacing is not None:
            raise UsageError("load needs the model: start(model=net)")
        if model is None and self._session.watches_modules:
            raise UsageError(
                f"start() needs the model at level {self._config.level}: start(model=net)"
            )
        if token_range is not None:
            check_token_range(model, token_range)

    def _wants_step(self) -> bool:
        """Whether the filters let this process record the current step; says so where
        they do not.
        """
        config, session = self._config, self._session
        if config.steps is not None and session.step not in config.steps:
            self._skip("step")
            return False
        if config.ranks is not None:
            known = self._connection.rank
            rank = known.rank if known is not None else None
            if known is None:
                self._say_once(
                    "warning",
                    "nothing is recorded: config.json selects ranks "
                    f"{sorted(config.ranks)} and this process does not know its rank; "
                    "start after init_process_group, or pass start(rank_id=...)",
                )
            elif text := notices.ranks_outside(config.ranks, known.world_size):
                self._say_once("warning", text)
            if rank not in config.ranks:
                self._skip("rank")
                return False
        if not session.recording_step and not self._budget.wants_step():
            self._skip("budget")
            return False
        return True

    def _is_past_last_step(self) -> bool:
        steps = self._config.steps
        if not steps or self._session.step <= max(steps):
            return False
        self._say_once(
            "info", f"the last selected step, {max(steps)}, is over; recording has ended"
        )
        return True

    def _skip(self, reason: str) -> None:
        self._skipped.add(reason)
        if self._connection.is_open or reason == "rank":
            self._recorder.step_event(self._session.step, pb.StepEvent.SKIPPED, reason)

    def _begin(self) -> None:
        session = self._session
        if not self._connection.is_open:
            self._connection.open(self._config)
        if not session.recording_step:
            session.recording_step = True
            self._data_before = self._recorder.events_with_data
            session.leave_out(self._budget.shed)
            self._recorder.step_event(session.step, pb.StepEvent.BEGIN)
        session.run(True)

    def _pause(self) -> None:
        self._session.run(False)
        self._taps.stop()
        if self._tokens is not None:
            self._tokens.remove()
            self._tokens = None

    def _say_once(self, level: str, text: str, about: str = "") -> None:
        if (about or text) not in self._said:
            self._said.add(about or text)
            log(level, text)

    def _flush_on_signal(self, seconds: float) -> None:
        self._session.run(False)
        self._connection.close("signal", seconds)

    def abandon_after_fork(self) -> None:
        """In a forked child: it records nothing and owns nothing of the parent's."""
        self._closed = self._forked = True
        self._lock = threading.RLock()
        self._recorder.lock = threading.RLock()
        self._session.run(False)
        self._taps.stop()
        self._connection.abandon_after_fork()


def _capture(config: Config) -> Capture | None:
    """What keeps whole tensors; None when no record is to have any."""
    if config.task == "tensor":
        wanted = [""]
    elif config.tensor_list:
        wanted = list(config.tensor_list)
    else:
        return None
    return Capture(
        lambda name: any(text in name for text in wanted),
        config.tensor_memory_bytes,
        config.block_seconds,
        config.tensor_quota_bytes,
    )


_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()


def _after_fork() -> None:
    for recording in list(_recordings):
        recording.abandon_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
