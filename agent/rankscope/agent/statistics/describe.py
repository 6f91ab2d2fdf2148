"""What a tensor is: the fields of its entry that are no statistics, and where its values lie."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from .guard import unseen

_functorch = torch._C._functorch


@dataclass(frozen=True)
class Description:
    """A tensor as its entry shows it.

    `data` is the tensor whose values count, or None with the reason in `note`. A dimension without
    a known size is -1. `extra_json` is a JSON object of further fields, or "".
    """

    type: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    extra_json: str = ""
    data: torch.Tensor | None = None
    note: str = ""


def describe(tensor: torch.Tensor) -> Description:
    """Describe any tensor. Never raises, calls no operator that a mode could see, waits for
    nothing.
    """
    try:
        with unseen():
            return _describe(tensor)
    except Exception as error:
        note = f"cannot be described: {type(error).__name__}: {error}"
        return Description("torch.Tensor", "", (), False, note=note)


def _describe(tensor: torch.Tensor) -> Description:
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return _transformed(tensor)
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _plain(tensor)
    for base in kind.__mro__:
        if base.__name__ in _KINDS and base.__module__.startswith("torch."):
            return _KINDS[base.__name__](tensor)
    return _subclass(tensor)


def _plain(tensor: torch.Tensor) -> Description:
    if torch._is_functional_tensor(tensor):
        return _of(tensor, note="functional tensor, being traced")
    if tensor.is_meta:
        return _of(tensor, note="meta tensor")
    return _of(tensor, data=tensor)


def _transformed(tensor: torch.Tensor) -> Description:
    """Inside torch.func: values and shape of what the transforms wrap, the name of the outermost
    one.
    """
    if _functorch.is_batchedtensor(tensor):
        name = "BatchedTensor"
    elif _functorch.is_gradtrackingtensor(tensor):
        name = "GradTrackingTensor"
    else:
        name = "FunctionalTensor"
    inner = tensor
    while _functorch.is_functorch_wrapped_tensor(inner):
        inner = _functorch.get_unwrapped(inner)
    return _wrapping(name, tensor, _describe(inner))


def _fake(tensor: torch.Tensor) -> Description:
    return _of(tensor, "torch._subclasses.fake_tensor.FakeTensor", note="fake tensor")


def _functional(tensor: torch.Tensor) -> Description:
    return _of(tensor, note="functional tensor, being traced")


def _distributed(tensor: Any) -> Description:
    extra = _placed(tensor.device_mesh, tensor.placements)
    name = "torch.distributed.tensor.DTensor"
    return _wrapping(name, tensor, _describe(tensor._local_tensor), extra)


def _waiting(tensor: Any) -> Description:
    name = "torch.distributed._functional_collectives.AsyncCollectiveTensor"
    if getattr(tensor, "completed", False):
        return _wrapping(name, tensor, _describe(tensor.elem))
    return _of(tensor.elem, name, note="collective has not been waited for")


def _jagged(tensor: Any) -> Description:
    name = "torch.nested._internal.nested_tensor.NestedTensor"
    return _wrapping(name, tensor, _describe(tensor._values))


_KINDS = {
    "FakeTensor": _fake,
    "FunctionalTensor": _functional,
    "DTensor": _distributed,
    "AsyncCollectiveTensor": _waiting,
    "NestedTensor": _jagged,
}


def _subclass(tensor: torch.Tensor) -> Description:
    if hasattr(tensor, "__tensor_flatten__"):
        return _of(tensor, note=f"{type(tensor).__name__} keeps its values in parts")
    if isinstance(tensor, UninitializedTensorMixin):
        return _of(tensor, shape=(), note="uninitialized parameter")
    if tensor.is_meta:
        return _of(tensor, note="meta tensor")
    return _of(tensor, data=tensor.as_subclass(torch.Tensor))


def _wrapping(name: str, outer: torch.Tensor, inner: Description, extra: str = "") -> Description:
    return Description(
        name, inner.dtype, inner.shape, outer.requires_grad, extra, inner.data, inner.note
    )


def _of(
    tensor: torch.Tensor,
    name: str = "torch.Tensor",
    *,
    shape: tuple[int, ...] | None = None,
    data: torch.Tensor | None = None,
    note: str = "",
) -> Description:
    known = _shape(tensor) if shape is None else shape
    return Description(name, str(tensor.dtype), known, tensor.requires_grad, "", data, note)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.layout is torch.strided and tensor.is_nested:
        return (tensor.numel(),)
    return tuple(_size(size) for size in tensor.shape)


def _size(size: Any) -> int:
    """A symbolic size by its hint: asking for its value would add a guard to the user's graph."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint if size.node.has_hint() else None
        return int(hint) if isinstance(hint, int) else -1
    return int(size)


@lru_cache(maxsize=256)
def _placed(mesh: Any, placements: tuple[Any, ...]) -> str:
    fields = {"device_mesh": mesh.mesh.tolist(), "placements": [_placement(p) for p in placements]}
    return json.dumps(fields)


def _placement(placement: Any) -> dict[str, dict[str, object]]:
    fields = {
        name: getattr(placement, name)
        for name in ("dim", "split_factor", "reduce_op")
        if hasattr(placement, name)
    }
    # Operators make partial placements of their own (of norms, of masks): all are Partial.
    kind = "Partial" if "reduce_op" in fields else type(placement).__name__
    return {kind: fields}
