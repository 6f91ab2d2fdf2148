"""Statistics of CPU tensors that are no plain numbers in memory. Called inside `unseen`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .columns import Partial
from .dtypes import NUMERIC
from .table import combine, combine_all

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
    if tensor.layout in _SPARSE:
        return _measure_sparse(tensor, measure)
    if tensor.is_quantized:
        return _in_blocks(tensor.dequantize(), lambda block: block, measure)
    plain = values_of(tensor)
    if plain.is_complex():
        return _measure_complex(plain, measure)
    if plain.dtype in NUMERIC:
        return measure(plain)
    return _in_blocks(plain, _single, measure)


def _single(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.to(torch.float32)
    except RuntimeError as error:
        raise NoValues(f"torch cannot read {tensor.dtype}") from error


def _measure_sparse(tensor: torch.Tensor, measure: Measure) -> Partial:
    values = values_of(tensor)
    left_out = tensor.numel() - values.numel()
    zeros = _ZEROS._replace(zero_count=left_out)
    if values.numel() == 0:
        return zeros
    partial = measure_special(values, measure)
    return combine(partial, zeros) if left_out else partial


def _measure_complex(tensor: torch.Tensor, measure: Measure) -> Partial:
    if tensor.dtype is torch.complex32:
        tensor = torch.view_as_real(tensor).float()
        tensor = torch.view_as_complex(tensor.contiguous())
    partial = _in_blocks(tensor, torch.abs, measure)
    if partial.inf_count and tensor.dtype is torch.complex64:
        return _in_blocks(tensor, lambda block: block.to(torch.complex128).abs(), measure)
    return partial


def _in_blocks(
    tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor], measure: Measure
) -> Partial:
    return combine_all([measure(convert(block)) for block in _blocks(tensor)])


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts whose converted copies stay small."""
    if tensor.numel() <= _BLOCK_ELEMENTS:
        yield tensor
    elif tensor.dim() == 1:
        yield from torch.split(tensor, _BLOCK_ELEMENTS)
    else:
        for part in tensor.unbind():
            yield from _blocks(part)
