"""From Python values to leaves: the shape of an event's data is interned as an outline, its values
go beside it.

`scan` is on the hot path. It walks a value once and returns a *shape tree* that determines the
outline (containers, leaf types, dtype, shape and requires_grad of tensors), the tensors in order,
and one value id a leaf. Only when a tree is new is the outline itself built from it, as the
serialized `Outline` message of the contract.

    args = (x, 3), kwargs = {"dim": 1}
    structure {"input_args":[0,1],"input_kwargs":{"dim":2}}; leaves tensor, int, int; values -, 3, 1

"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rankscope.agent import encoding
from rankscope.agent.encoding import Leaf
from rankscope.agent.statistics import Description, describe
from rankscope.v1 import collector_pb2 as pb

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_MAX_DEPTH = 400

TensorEntry = torch.Tensor | Description


class Part(NamedTuple):
    """One field of a record: where it stands in the record, and the value to look at."""

    name: str  # "input_args", "output", ...; for parameters_grad the parameter's name
    value: Any
    part: str = ""  # what the tables call the part; the name when empty


@dataclass(frozen=True)
class Scanned:
    outline: int
    tensors: list[TensorEntry]
    values: list[int]


class Outlines:
    """Interned outlines and value texts of one process. Ids start at 1; 0 means none."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = [b""]  # serialized Outline by id
        self.texts: list[str] = [""]  # JSON text by id
        self._ids: dict[tuple[Any, ...], int] = {}
        self._scalar_ids: dict[tuple[type, Any], int] = {}
        self._text_ids: dict[str, int] = {}

    def scan(self, parts: Sequence[Part]) -> Scanned:
        """Look at the parts of one event. Raises nothing but what the values' own
        properties raise.
        """
        walk = _Walk(self)
        tree = tuple((part.name, part.part, walk.visit(part.value, None, 0)) for part in parts)
        outline = self._ids.get(tree)
        if outline is None:
            outline = self._ids[tree] = len(self.payloads)
            self.payloads.append(_build(tree))
        return Scanned(outline, walk.tensors, walk.values)

    def text_id(self, text: str) -> int:
        """Id of a JSON text."""
        found = self._text_ids.get(text)
        if found is None:
            found = self._text_ids[text] = len(self.texts)
            self.texts.append(text)
        return found

    def scalar_id(self, kind: type, value: Any) -> int:
        """Id of the JSON text of a bool, int, float or str."""
        found = self._scalar_ids.get((kind, value))
        if found is None:
            found = self.text_id(encoding.scalar_json(value))
            # NaN would never be found again, and 0.0 would stand for -0.0.
            if value == value and value != 0:
                self._scalar_ids[(kind, value)] = found
        return found


class _Walk:
    """One walk over the values of an event. Trees are tuples: (dtype, shape, requires_grad) for a
    tensor, (list, ...) and (dict, keys, ...) for containers, a Leaf or Description for everything
    else.
    """

    __slots__ = ("outlines", "tensors", "transformed", "values")

    def __init__(self, outlines: Outlines) -> None:
        self.outlines = outlines
        self.tensors: list[TensorEntry] = []
        self.values: list[int] = []
        # Inside vmap, grad and jvp a tensor that looks plain is a wrapper.
        self.transformed = torch._C._functorch.peek_interpreter_stack() is not None

    def visit(self, value: Any, key: str | None, depth: int) -> Any:
        kind = type(value)
        if (kind is _Tensor or kind is _Parameter) and not self.transformed:
            self.tensors.append(value)
            self.values.append(0)
            return (value.dtype, value.shape, value.requires_grad)
        scalar = encoding.SCALARS.get(kind)
        if scalar is not None:
            self.values.append(self.outlines.scalar_id(kind, value))
            return scalar
        if value is None:
            self.values.append(0)
            return encoding.NULL
        if depth >= _MAX_DEPTH:
            return self._leaf(encoding.NULL, json.dumps(f"nested deeper than {_MAX_DEPTH}"))
        if kind is tuple or kind is list:
            return (list, *[self.visit(item, None, depth + 1) for item in value])
        if kind is dict:
            return self._mapping(value.items(), depth)
        return self._unusual(value, key, depth)

    def _mapping(self, items: Iterable[tuple[Any, Any]], depth: int) -> Any:
        keys, trees = [], []
        for key, value in items:
            text = key if type(key) is str else encoding.key_text(key)
            keys.append(text)
            special = encoding.by_key(text, value) if text in encoding.SPECIAL_KEYS else None
            trees.append(self._leaf(*special) if special else self.visit(value, text, depth + 1))
        return (dict, tuple(keys), *trees)

    def _unusual(self, value: Any, key: str | None, depth: int) -> Any:
        if isinstance(value, _Tensor):
            described = describe(value)
            self.tensors.append(described)
            self.values.append(0)
            # The tree must not keep the tensor alive.
            return _Described(
                described.type,
                described.dtype,
                tuple(described.shape),
                described.requires_grad,
                described.extra_json,
            )
        encoded = encoding.encode(value)
        if isinstance(encoded, list):
            return (list, *[self.visit(item, None, depth + 1) for item in encoded])
        if isinstance(encoded, dict):
            return self._mapping(encoded.items(), depth)
        return self._leaf(*encoded)

    def _leaf(self, leaf: Leaf, text: str) -> Leaf:
        self.values.append(self.outlines.text_id(text) if text else 0)
        return leaf


class _Described(NamedTuple):
    type: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    extra_json: str


def _build(tree: tuple[tuple[str, str, Any], ...]) -> bytes:
    """The serialized Outline of a shape tree."""
    leaves: list[pb.LeafTemplate] = []
    fields = {}
    for name, part, node in tree:
        if (
            part
        ):  # a parameter's gradient: a list of one that is addressed by the parameter's name alone
            fields[name] = [_number(item, part, name, leaves) for item in node[1:]]
        else:
            fields[name] = _number(node, name, "", leaves)
    structure = json.dumps(fields, separators=(",", ":"))
    return pb.Outline(structure=structure, leaves=leaves).SerializeToString(deterministic=True)


def _number(node: Any, part: str, path: str, leaves: list[pb.LeafTemplate]) -> Any:
    """The node with its leaves replaced by their numbers; their templates are appended to
    `leaves`.
    """
    if type(node) is tuple and node[0] is list:
        return [_number(x, part, _join(path, i), leaves) for i, x in enumerate(node[1:])]
    if type(node) is tuple and node[0] is dict:
        pairs = zip(node[1], node[2:], strict=True)
        return {key: _number(x, part, _join(path, key), leaves) for key, x in pairs}
    leaves.append(_template(node, part, path))
    return len(leaves) - 1


def _template(node: Any, part: str, path: str) -> pb.LeafTemplate:
    if type(node) is Leaf:
        return pb.LeafTemplate(part=part, path=path, form=pb.Form.Name(node.form), type=node.type)
    template = pb.LeafTemplate(part=part, path=path, form=pb.TENSOR)
    if type(node) is _Described:
        template.type, template.dtype, shape, template.requires_grad, template.extra_json = node
    else:
        dtype, shape, template.requires_grad = node
        template.type, template.dtype = "torch.Tensor", str(dtype)
    template.shape.extend(map(int, shape))
    return template


def _join(path: str, step: object) -> str:
    return f"{path}.{step}" if path else str(step)
