"""Statistics of CPU tensors that are no plain numbers in memory. Called inside `unseen`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from .columns import Partial
from .dtypes import NUMERIC
from .table import combine_all

Measure = Callable[[torch.Tensor], Partial]

_SPARSE = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)
_ZEROS = Partial(0.0, 0.0, 0.0, 0.0)
_BLOCK_ELEMENTS = 1 << 20


class NoValues(Exception):
    """The tensor has no values that can be read; the text says why."""


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The strided tensor that stores the tensor's values, for statistics and for bytes alike."""
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce()._values()
    if tensor.layout in _SPARSE:
        return tensor.values()
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor.is_quantized:
        return tensor.int_repr()
    return tensor.resolve_conj().resolve_neg()


def measure_special(tensor: torch.Tensor, measure: Measure) -> Partial:
    """Statistics of any CPU tensor with values; `measure` takes plain numbers.

    Complex numbers count by their magnitude. Elements that a sparse tensor leaves out are zeros.
    """
    partials = [measure(part) for part in plain_parts(tensor)]
    if left_out := left_out_of(tensor):
        partials.append(_ZEROS._replace(zero_count=left_out))
    return combine_all(partials)


def left_out_of(tensor: torch.Tensor) -> int:
    """How many zeros a sparse tensor does not store."""
    return tensor.numel() - values_of(tensor).numel() if tensor.layout in _SPARSE else 0


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The stored values of any CPU tensor as strided tensors of a dtype in NUMERIC, in order."""
    if tensor.is_quantized:
        yield tensor.dequantize()
        return
    stored = values_of(tensor)
    if stored.numel() == 0:
        return
    if stored.dtype in NUMERIC:
        yield stored
    else:
        yield from map(plain_numbers, _blocks(stored))


def plain_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A small strided tensor in a dtype of NUMERIC; complex numbers by their magnitude."""
    if tensor.dtype in NUMERIC:
        return tensor
    if not tensor.is_complex():
        return _single(tensor)
    if tensor.dtype is torch.complex32:
        tensor = torch.view_as_complex(torch.view_as_real(tensor).float().contiguous())
    with np.errstate(all="ignore"):  # by numpy, whose last digit is msProbe's
        magnitude = np.abs(tensor.detach().resolve_conj().numpy())
        if tensor.dtype is torch.complex64 and np.isinf(magnitude).any():
            magnitude = np.abs(tensor.detach().resolve_conj().numpy().astype(np.complex128))
    return torch.from_numpy(np.asarray(magnitude))


def _single(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.to(torch.float32)
    except RuntimeError as error:
        raise NoValues(f"torch cannot read {tensor.dtype}") from error


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts whose converted copies stay small."""
    if tensor.numel() <= _BLOCK_ELEMENTS:
        yield tensor
    elif tensor.dim() == 1:
        yield from torch.split(tensor, _BLOCK_ELEMENTS)
    else:
        for part in tensor.unbind():
            yield from _blocks(part)
