"""Runs a script and records it, without a change in the script.

    torchrun --nproc-per-node 8 -m rankscope.agent.run --config config.json train.py --lr 0.1

What follows the script (or `-m MODULE`) is the script's own.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from rankscope.agent.errors import ConfigError, UsageError

STARTUP = Path(__file__).with_name("startup")


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with the script's status; 2 when the options or the configuration are wrong."""
    options = parser().parse_args(argv)
    if options.startup_path:
        print(STARTUP)
        return
    if not options.script:
        parser().error("no script given")
    from rankscope.agent import auto

    script, *arguments = options.script
    # The script sees what it would see if Python had been told to run it.
    sys.path[0] = os.getcwd() if options.module else str(Path(script).resolve().parent)
    try:
        auto.install(options.config, options.step_on)
    except (ConfigError, UsageError) as error:
        parser().exit(2, f"rankscope: {error}\n")
    sys.argv = [script, *arguments]
    if options.module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def parser() -> argparse.ArgumentParser:
    """The options; everything from the script on is left alone."""
    result = argparse.ArgumentParser(
        prog="python -m rankscope.agent.run",
        description="Record a script without a change in it.",
        epilog="example: torchrun --nproc-per-node 8 -m rankscope.agent.run --config cfg.json "
        "train.py --lr 0.1",
    )
    result.add_argument("--config", help="a config.json in msProbe's form; default: all defaults")
    result.add_argument(
        "--step-on",
        default="optimizer",
        metavar="WHAT",
        help="what ends a step: optimizer (its step; the default), forward (a call of the model), "
        "or MODULE:FUNCTION, whose calls are counted",
    )
    result.add_argument(
        "--startup-path",
        action="store_true",
        help="print the folder to put on PYTHONPATH, so that RANKSCOPE_AUTO=1 records any Python",
    )
    result.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    result.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    return result


if __name__ == "__main__":
    main()
