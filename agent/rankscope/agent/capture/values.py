"""Where a tensor's values lie as one run of bytes, and copies of those that do not. Called inside
`unseen`.
"""

from __future__ import annotations

import torch

from rankscope.agent.statistics import Description
from rankscope.agent.statistics.device import is_capturing
from rankscope.agent.statistics.memory import LOWEST_ADDRESS, has_memory
from rankscope.agent.statistics.special import values_of

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
unwrapped = torch._C._functorch.get_unwrapped
_WAITING = "torch.distributed._functional_collectives.AsyncCollectiveTensor"


def source_of(entry: torch.Tensor | Description) -> torch.Tensor | None:
    """The tensor whose values a leaf stands for; None when it has none that can be kept."""
    if isinstance(entry, Description):
        if entry.data is None or entry.type == _WAITING:
            return None
        entry = entry.data
    while is_wrapped(entry):
        entry = unwrapped(entry)
    if entry.is_meta or entry.numel() == 0 or entry.is_quantized:
        return None
    if entry.layout is not torch.strided or torch._is_functional_tensor(entry):
        return None
    if not entry.is_cpu:
        return None if is_capturing(entry) else entry
    return entry if has_memory(entry) else None


def is_unsupported(entry: torch.Tensor | Description) -> bool:
    """Whether a leaf has values, but in a form that is not kept: sparse, quantized."""
    tensor = entry.data if isinstance(entry, Description) else entry
    if tensor is None or tensor.is_meta:
        return False
    return tensor.is_quantized or tensor.layout is not torch.strided


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values in row-major order: the tensor itself if it is so, else a copy."""
    if tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        tensor = values_of(tensor)
    return tensor.detach().contiguous()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor's bytes lie at its address as they are to be kept."""
    return (
        tensor.is_contiguous()
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr() >= LOWEST_ADDRESS
    )
