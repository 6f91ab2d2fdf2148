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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from rankscope.agent import encoding
from rankscope.agent.encoding import Leaf
from rankscope.agent.native import walk as _compiled
from rankscope.agent.statistics import Description, describe
from rankscope.v1 import collector_pb2 as pb

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
#: Outlines, or texts, that are kept; about 300 bytes each.
MOST_KNOWN = 1 << 15

_MAX_DEPTH = 400
_SCALARS = encoding.SCALARS
_EMPTY_MAPPING = (dict, ())
_interpreters = torch._C._functorch.peek_interpreter_stack

TensorEntry = torch.Tensor | Description
#: Fields of a record with their values, in order: ("input_args", args), ("input_kwargs", kwargs).
Parts = tuple[tuple[str, Any], ...]


class Outlines:
    """Interned outlines and value texts of one process. Ids start at 1; 0 means none."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = [b""]  # serialized Outline by id
        self.texts: list[str] = [""]  # JSON text by id
        self._ids: dict[tuple[Any, ...], int] = {}
        self._scalar_ids: dict[tuple[type, Any], int] = {}
        self._text_ids: dict[str, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether so much is known that it is time to begin anew: a job whose shapes or numbers
        never repeat must not fill its memory."""
        return len(self.payloads) > MOST_KNOWN or len(self.texts) > MOST_KNOWN

    def scan(self, parts: Parts, part: str, tensors: list[TensorEntry], values: list[int]) -> int:
        """Outline id of an event's fields; its tensors and one value id a leaf are appended.

        `part` is what the tables call the fields, or "": each by its own name. Raises nothing but
        what the values' own properties raise.
        """
        # Inside vmap, grad and jvp a tensor that looks plain is a wrapper.
        transformed = _interpreters() is not None
        key = _scan(part, parts, tensors, values, self._scalar_ids, transformed, self._visit)
        outline = self._ids.get(key)
        if outline is None:
            outline = self._ids[key] = len(self.payloads)
            self.payloads.append(_build(key))
        return outline

    def _visit(
        self,
        tensors: list[TensorEntry],
        values: list[int],
        transformed: bool,
        value: Any,
        depth: int,
    ) -> Any:
        return _Walk(self, tensors, values, transformed).visit(value, depth)

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
            if value == value and (value != 0 or kind is not float):
                self._scalar_ids[(kind, value)] = found
        return found


class _Walk:
    """One walk over the values of an event.

    Trees are tuples: (dtype, shape, requires_grad) for a tensor, (list, ...) and (dict, keys, ...)
    for containers, a Leaf or _Described for everything else.
    """

    __slots__ = ("outlines", "tensors", "transformed", "values")

    def __init__(
        self,
        outlines: Outlines,
        tensors: list[TensorEntry],
        values: list[int],
        transformed: bool,
    ) -> None:
        self.outlines, self.transformed = outlines, transformed
        self.tensors, self.values = tensors, values

    def visit(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if (kind is _Tensor or kind is _Parameter) and not self.transformed:
            self.tensors.append(value)
            self.values.append(0)
            return (value.dtype, value.shape, value.requires_grad)
        if kind is tuple or kind is list:
            return self._sequence(value, depth)
        if kind in _SCALARS:
            self.values.append(self.outlines.scalar_id(kind, value))
            return _SCALARS[kind]
        if value is None:
            self.values.append(0)
            return encoding.NULL
        if kind is dict:
            return self._mapping(value.items(), depth) if value else _EMPTY_MAPPING
        return self._unusual(value, depth)

    def _sequence(self, items: Any, depth: int) -> Any:
        if depth >= _MAX_DEPTH:
            return self._leaf(encoding.NULL, json.dumps(f"nested deeper than {_MAX_DEPTH}"))
        tree: list[Any] = [list]
        tensors, values, transformed = self.tensors, self.values, self.transformed
        for value in items:
            kind = type(value)
            if (kind is _Tensor or kind is _Parameter) and not transformed:
                tensors.append(value)
                values.append(0)
                tree.append((value.dtype, value.shape, value.requires_grad))
            else:
                tree.append(self.visit(value, depth + 1))
        return tuple(tree)

    def _mapping(self, items: Iterable[tuple[Any, Any]], depth: int) -> Any:
        if depth >= _MAX_DEPTH:
            return self._leaf(encoding.NULL, json.dumps(f"nested deeper than {_MAX_DEPTH}"))
        keys, trees = [], []
        for key, value in items:
            text = key if type(key) is str else encoding.key_text(key)
            keys.append(text)
            special = encoding.by_key(text, value) if text in encoding.SPECIAL_KEYS else None
            trees.append(self._leaf(*special) if special else self.visit(value, depth + 1))
        return (dict, tuple(keys), *trees)

    def _unusual(self, value: Any, depth: int) -> Any:
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
            return self._sequence(encoded, depth)
        if isinstance(encoded, dict):
            return self._mapping(encoded.items(), depth)
        return self._leaf(*encoded)

    def _leaf(self, leaf: Leaf, text: str) -> Leaf:
        self.values.append(self.outlines.text_id(text) if text else 0)
        return leaf


def scan_in_python(
    part: str,
    parts: Parts,
    tensors: list[TensorEntry],
    values: list[int],
    scalar_ids: dict[tuple[type, Any], int],
    transformed: bool,
    visit: Callable[[list[TensorEntry], list[int], bool, Any, int], Any],
) -> tuple[Any, ...]:
    """What `scan` of the compiled loops does, for installations without them."""
    key: list[Any] = [part]
    for name, value in parts:
        key += (name, visit(tensors, values, transformed, value, 0))
    return tuple(key)


class _Described(NamedTuple):
    type: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    extra_json: str


def _build(tree: tuple[Any, ...]) -> bytes:
    """The serialized Outline of a tree: (part, name, node, name, node, ...)."""
    leaves: list[pb.LeafTemplate] = []
    fields: Any = {}
    part = tree[0]
    for name, node in zip(tree[1::2], tree[2::2], strict=True):
        if part == "save":  # no record with fields: the one value is all there is
            fields = _number(node, part, "", leaves)
        elif part:  # a parameter's gradient: a list of one, addressed by the parameter's name alone
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


_scan = scan_in_python
if _compiled is not None:
    _compiled.bind(
        _Tensor, _Parameter, torch._C.TensorBase, encoding.NULL, _SCALARS, _EMPTY_MAPPING
    )
    _scan = _compiled.scan
