"""Removing a run, or steps of it, with the tensors that nothing refers to any more."""

import os
import shutil
import uuid
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from .blobs.removal import Freed, remove_unreferenced
from .query import Run
from .store.remove import remove_steps
from .usage import usage


@dataclass(frozen=True)
class Plan:
    """What a removal would do: steps that are there, and those that cannot go now."""

    steps: tuple[int, ...]
    open: tuple[int, ...]
    live: tuple[str, ...]
    """Processes that may still record."""


def plan(run: Run, wanted: Container[int] | None = None) -> Plan:
    """Which steps of a run may go; all without `wanted`. Open ones stay while a process lives."""
    there = pc.unique(run.table("nodes", ["step"])["step"]).to_pylist()
    steps = sorted(step for step in there if wanted is None or step in wanted)
    rows = run.processes().to_pylist()
    live = tuple(row["process"] for row in rows if (row["state"] or "live") == "live")
    sealed = run.table("steps", ["step"], pc.field("event") == "sealed")["step"].to_pylist()
    unsealed = tuple(step for step in steps if live and step not in set(sealed))
    return Plan(tuple(step for step in steps if step not in unsealed), unsealed, live)


def remove(run: Run, plan: Plan, dry_run: bool = False) -> Freed:
    """Remove the steps of a plan: folders, rows, and tensors that no record refers to then."""
    if not dry_run and plan.steps:
        for step in plan.steps:
            _remove_folder(run, run.path / f"step{step}")
        remove_steps(run.path, plan.steps)
    staying = ~pc.field("step").isin(plan.steps) & pc.field("digest").is_valid()
    texts = pc.unique(run.table("records", ["digest"], staying)["digest"]).to_pylist()
    referenced = {bytes.fromhex(text) for text in texts}
    return remove_unreferenced(run.store, referenced, bool(plan.live), dry_run)


def remove_run(run: Run, dry_run: bool = False) -> int:
    """Remove everything of a run in which no process lives; bytes freed."""
    freed = usage(run).total
    if not dry_run:
        for path in (run.path, run.store):
            aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.removed")
            try:
                os.rename(path, aside)
            except FileNotFoundError:
                continue
            shutil.rmtree(aside)
    return freed


def _remove_folder(run: Run, path: Path) -> None:
    """In one move, so that nobody sees half of it."""
    aside = run.store / "tmp"
    aside.mkdir(exist_ok=True)
    aside = aside / f"{uuid.uuid4().hex}.{path.name}"
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside)
