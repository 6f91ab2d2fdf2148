"""Inputs and outputs of calls that records show as null, as a YAML file in the form of ignore.yaml
lists them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rankscope.agent.apis import Api
from rankscope.agent.errors import ConfigError

DEFAULT_PATH = Path(__file__).with_name("ignore.yaml")

Places = frozenset[int | str]


@dataclass(frozen=True)
class Ignored:
    """What one function's forward records do not show; None means everything."""

    input: Places | None = frozenset()
    output: Places | None = frozenset()

    def named(self, function: Callable[..., Any]) -> Ignored:
        """The same, with the names of the parameters at the positions given."""
        try:
            names = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            return self
        if not self.input:
            return self
        positions = [i for i in self.input if isinstance(i, int) and i < len(names)]
        return Ignored(self.input | {names[i] for i in positions}, self.output)

    def hide_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with what is ignored replaced by None."""
        if self.input == frozenset():
            return args, kwargs
        return (
            tuple(_hide(self.input, enumerate(args))),
            dict(zip(kwargs, _hide(self.input, kwargs.items()), strict=True)),
        )

    def hide_outputs(self, output: Any) -> Any:
        """A list or tuple of outputs with what is ignored replaced by None."""
        if self.output == frozenset():
            return output
        shown = _hide(self.output, enumerate(output))
        return tuple(shown) if isinstance(output, tuple) else shown


NOTHING = Ignored()


def _hide(places: Places | None, items: Any) -> list[Any]:
    return [None if places is None or place in places else value for place, value in items]


class IgnoreRules:
    """The rules of one file."""

    def __init__(self, rules: Mapping[tuple[str, str], Ignored]) -> None:
        self._rules = rules

    @classmethod
    def load(cls, path: Path = DEFAULT_PATH) -> IgnoreRules:
        """Read a file; a ConfigError names the rule that has another form."""
        try:
            raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            return cls(
                {
                    (prefix, name): _rule(f"{prefix}.{name}", entry)
                    for prefix, names in raw.items()
                    for name, entry in names.items()
                }
            )
        except (OSError, yaml.YAMLError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"rankscope.ignore: cannot read {str(path)!r} ({error}); expected a YAML file in "
                "the form of the ignore.yaml that ships with rankscope"
            ) from error

    def of(self, api: Api) -> Ignored:
        """The rule of a function; NOTHING when there is none."""
        return self._rules.get((api.prefix, api.name), NOTHING)


def _rule(name: str, entry: Any) -> Ignored:
    if not isinstance(entry, dict) or not entry.keys() <= {"input", "output"}:
        raise ValueError(f"{name}: {entry!r} is no rule")
    return Ignored(
        _places(name, entry.get("input", []), (int, str)),
        _places(name, entry.get("output", []), (int,)),
    )


def _places(name: str, value: Any, kinds: tuple[type, ...]) -> Places | None:
    if value == "all":
        return None
    if not isinstance(value, list) or not all(type(item) in kinds for item in value):
        raise ValueError(f"{name}: {value!r} is no list of positions or names, nor all")
    return frozenset(value)
