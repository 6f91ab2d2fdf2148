"""Python runs this when its folder is on PYTHONPATH. With RANKSCOPE_AUTO=1 a process that imports
torch is recorded; nothing happens otherwise.

Another sitecustomize that this one hides is run as well.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any


class _TorchWatcher(importlib.abc.MetaPathFinder):
    """Lets torch be found as always and adds one call after it was loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load: Any = spec.loader.exec_module

            def load_and_watch(module: Any) -> None:
                load(module)
                _watch()

            vars(spec.loader)["exec_module"] = load_and_watch
        return spec


def _watch() -> None:
    try:
        from rankscope.agent import auto

        auto.install_from_environment()
    except Exception as error:
        print(f"rankscope: this process is not recorded: {error}", file=sys.stderr)


def _run_hidden() -> None:
    ours = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != ours]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# A process that a recorded one started (a data loader's worker, a compiler) is no rank.
if os.environ.get("RANKSCOPE_AUTO") == "1" and not os.environ.get("RANKSCOPE_PARENT"):
    sys.meta_path.insert(0, _TorchWatcher())
_run_hidden()
