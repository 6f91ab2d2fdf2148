"""The key `slice`: tensors are cut before they are measured and captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Slice = Mapping[str, int]  # dim, begin, end, and size: only tensors of this size are cut


def cut(value: Any, slices: Sequence[Slice]) -> Any:
    """The value with every tensor in it cut; lists, tuples and dicts are entered."""
    if isinstance(value, torch.Tensor):
        return _cut_tensor(value, slices)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cut(item, slices) for item in value))
    if isinstance(value, list | tuple):
        items = [cut(item, slices) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if type(value) is dict:
        return {key: cut(item, slices) for key, item in value.items()}
    return value


def _cut_tensor(tensor: torch.Tensor, slices: Sequence[Slice]) -> torch.Tensor:
    result = tensor.detach()
    for one in slices:
        dim = one["dim"]
        if not -result.dim() <= dim < result.dim():
            continue
        if "size" in one and result.shape[dim] != one["size"]:
            continue
        begin, end, _ = slice(one["begin"], one["end"]).indices(result.shape[dim])
        result = result.narrow(dim, begin, max(end - begin, 0))
    if result.shape == tensor.shape:
        return tensor
    return result.requires_grad_() if tensor.requires_grad else result
