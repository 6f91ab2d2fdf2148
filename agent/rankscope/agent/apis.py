"""Which torch functions are watched and what their records are called: the table of apis.yaml,
resolved once.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rankscope.agent.errors import ConfigError

DEFAULT_PATH = Path(__file__).with_name("apis.yaml")

#: Prefixes whose functions take part in __torch_function__; the others are watched by wrappers.
MODE_PREFIXES = ("Functional", "Tensor", "Torch", "VF")

# max_pool2d(return_indices=True) dispatches to max_pool2d_with_indices; the record bears the called
# name.
_INDICES_SUFFIX = "_with_indices"


@dataclass(frozen=True, eq=False)
class Api:
    """A watched function: `prefix` and `name` make its record names
    `{prefix}.{name}.{n}.forward`. Compared by identity, which is cheap.
    """

    prefix: str
    name: str

    @functools.cached_property
    def stem(self) -> str:
        return f"{self.prefix}.{self.name}"

    @functools.cached_property
    def is_dropout(self) -> bool:
        return "dropout" in self.name


@dataclass(frozen=True)
class ApiTable:
    """The parsed table: names per prefix, and the names that risk levels leave out or keep."""

    prefixes: Mapping[
        str, tuple[str, tuple[str, ...]]
    ]  # prefix -> (path of the Python object, names)
    low: frozenset[str]
    core: frozenset[str]
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """Namespaces of torch.ops whose operators are all watched -> prefix of their records."""

    @classmethod
    def load(cls, path: Path = DEFAULT_PATH, extras: Collection[str] = ()) -> ApiTable:
        """Read a table in the form of apis.yaml, with these of its extras; raises ConfigError when
        it has another form or lacks an extra.
        """
        try:
            raw = yaml.safe_load(path.read_text(encoding="utf-8"))
            levels = raw.pop("risk_levels", {})
            more = raw.pop("extras", {})
            prefixes = {
                prefix: (str(entry["of"]), tuple(map(str, entry["names"])))
                for prefix, entry in raw.items()
            }
            namespaces: dict[str, str] = {}
            for extra in extras:
                namespaces |= more[extra].get("namespaces", {})
                for prefix, names in more[extra].get("names", {}).items():
                    owner, known = prefixes[prefix]
                    prefixes[prefix] = (owner, (*known, *map(str, names)))
            low, core = frozenset(levels.get("low", ())), frozenset(levels.get("core", ()))
            return cls(prefixes, low, core, namespaces)
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"rankscope.apis: cannot read {str(path)!r} ({type(error).__name__}: {error}); "
                "expected a YAML file in the form of the apis.yaml that ships with rankscope"
            ) from error

    def functions(self) -> dict[Any, Api]:
        """Function object -> Api, for the prefixes that a torch function mode sees; the first
        prefix wins.
        """
        found: dict[Any, Api] = {}
        for prefix in MODE_PREFIXES:
            for function, api in self.resolve(prefix):
                found.setdefault(function, api)
                # seed_all and random_save replace functions; C code reports the original.
                while (function := getattr(function, "_rankscope_original", None)) is not None:
                    found.setdefault(function, api)
        return found

    def resolve(self, prefix: str) -> Iterator[tuple[Any, Api]]:
        """The functions of one prefix that exist in this torch, with their names."""
        for owner, attribute, api in self.places(prefix):
            yield getattr(owner, attribute), api

    def places(self, prefix: str) -> Iterator[tuple[Any, str, Api]]:
        """Where the functions of one prefix stand: the object that has them and the attribute."""
        if prefix not in self.prefixes:
            return
        path, names = self.prefixes[prefix]
        try:
            root = _load(path)
        except (ImportError, AttributeError):
            return
        for dotted in names:
            *parents, attribute = dotted.split(".")
            owner = functools.reduce(lambda o, part: getattr(o, part, None), parents, root)
            if getattr(owner, attribute, None) is not None:
                yield owner, attribute, Api(prefix, attribute.removesuffix(_INDICES_SUFFIX))

    def keeps(self, api: Api, risk_level: str | None) -> bool:
        """Whether records of this function are written at a risk level (None and "ALL":
        everything).
        """
        if risk_level == "FOCUS":
            return api.name not in self.low
        if risk_level == "CORE":
            return api.name in self.core or api.prefix in ("Distributed", "NPU", "MindSpeed")
        return True


def _load(path: str) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        if not module:
            raise
        return getattr(importlib.import_module(module), attribute)
