"""Standard deviations and samples of CPU tensors. Called inside `unseen` for all but plain ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .dtypes import NUMERIC
from .memory import array_at, dense_pieces, extents_of, strided_view
from .special import left_out_of, plain_numbers, plain_parts, values_of

Array = npt.NDArray[Any]

# Blocks of float64 that stay in the first caches, and below what malloc maps afresh.
_BLOCK_ELEMENTS = 1 << 13
# Squares of deviations between these are good float64 numbers.
_SAFE = (1e-140, 1e140)


def spread_of_parts(parts: Iterable[torch.Tensor], zeros: int = 0) -> float:
    """Standard deviation of the values of all parts and so many zeros more, dividing by their
    number. NaN where a value is NaN or infinite.

    `parts` are strided tensors of dtypes in NUMERIC, none empty.
    """
    parts = list(parts)
    deviation = _deviation(parts, zeros, 1.0)
    if _SAFE[0] < deviation < _SAFE[1]:
        return deviation
    largest = max((_largest(part) for part in parts), default=0.0)
    if not 0 < largest < math.inf:
        return math.nan if largest else 0.0
    return largest * _deviation(parts, zeros, largest)


def spread_of(tensor: torch.Tensor) -> float:
    """Standard deviation of any CPU tensor with values; of a sparse one with the zeros it leaves
    out, of complex numbers by their magnitude.
    """
    return spread_of_parts(plain_parts(tensor), left_out_of(tensor))


def _deviation(parts: Iterable[torch.Tensor], zeros: int, scale: float) -> float:
    """Of the values divided by `scale`, from sums of what is left of them less a number near their
    mean: in one pass, and exact also where the mean is far larger than the deviation.
    """
    count, total, squares, shift = zeros, 0.0, 0.0, math.nan
    room = np.empty(_BLOCK_ELEMENTS)
    with np.errstate(all="ignore"):
        for part in parts:
            repeats = extents_of(part.shape, part.stride()).repeats
            for block in _blocks(part):
                if scale != 1.0:
                    block = block.astype(np.float64) / scale
                if count == zeros:
                    shift = float(block.mean(dtype=np.float64))
                    total, squares = -shift * zeros, shift * shift * zeros
                rest = np.subtract(block, shift, out=room[: block.size], dtype=np.float64)
                total += float(rest.sum()) * repeats
                squares += float(rest @ rest) * repeats
                count += block.size * repeats
    return math.sqrt(max(squares - total * (total / count), 0.0) / count)


def _largest(part: torch.Tensor) -> float:
    return max(float(np.abs(block.astype(np.float64)).max()) for block in _blocks(part))


def _blocks(part: torch.Tensor) -> Iterable[Array]:
    """The distinct values of a tensor as numbers, in any order."""
    numeric = NUMERIC[part.dtype]
    view = strided_view(part.data_ptr(), numeric.storage, extents_of(part.shape, part.stride()))
    for piece in dense_pieces(view):
        for start in range(0, piece.size, _BLOCK_ELEMENTS):
            yield numeric.widen(piece[start : start + _BLOCK_ELEMENTS])


# --------------------------------------------------------------------------------------- samples


@lru_cache(maxsize=4096)
def positions(elements: int, samples: int) -> npt.NDArray[np.int64]:
    """Up to `samples` equally spaced positions among `elements` (at least one), the first and the
    last included; all of them when there are not more.
    """
    if elements <= samples:
        return np.arange(elements)
    if samples == 1:
        return np.zeros(1, np.int64)
    # In Python's integers: the products may exceed 64 bits.
    return np.array([i * (elements - 1) // (samples - 1) for i in range(samples)])


@lru_cache(maxsize=4096)
def _offsets(
    shape: tuple[int, ...], strides: tuple[int, ...], samples: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Where the samples lie in memory, and how much memory they span, in elements."""
    chosen = positions(math.prod(shape), samples)
    indices = np.unravel_index(chosen, shape) if shape else ()
    offsets = np.zeros(len(chosen), np.int64)
    for index, stride in zip(indices, strides, strict=True):
        offsets += index * stride
    return offsets, int(offsets.max()) + 1


def samples_of_plain(tensor: torch.Tensor, samples: int) -> Array:
    """Samples of a strided tensor of a dtype in NUMERIC, in float64."""
    offsets, span = _offsets(tensor.shape, tensor.stride(), samples)
    numeric = NUMERIC[tensor.dtype]
    memory = array_at(tensor.data_ptr(), numeric.storage, (span,))
    return numeric.widen(memory[offsets]).astype(np.float64)


def samples_of(tensor: torch.Tensor, samples: int) -> Array:
    """Samples of any CPU tensor with values, in the order of its indices."""
    if tensor.layout in (torch.strided, torch._mkldnn):  # type: ignore[attr-defined]
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        elif tensor.is_nested or tensor.layout is not torch.strided:
            tensor = values_of(tensor)
        if tensor.is_neg() or tensor.dtype not in NUMERIC:
            tensor = _chosen(tensor, samples)
        return samples_of_plain(tensor, samples)
    return _samples_of_sparse(tensor, samples)


def _chosen(tensor: torch.Tensor, samples: int) -> torch.Tensor:
    """The samples alone, so that only they are converted."""
    chosen = torch.from_numpy(positions(tensor.numel(), samples))
    picked = tensor[torch.unravel_index(chosen, tensor.shape)] if tensor.dim() else tensor
    return plain_numbers(picked.resolve_conj().resolve_neg())


def _samples_of_sparse(tensor: torch.Tensor, samples: int) -> Array:
    """Stored values are looked up by their position; all others are zeros."""
    if tensor.layout is not torch.sparse_coo:
        tensor = tensor.to_sparse_coo()  # type: ignore[no-untyped-call]
    tensor = tensor.coalesce()
    stored, indices = tensor._values(), tensor._indices()
    chosen = positions(tensor.numel(), samples)
    found = np.zeros(len(chosen))
    inner = math.prod(tensor.shape[tensor.sparse_dim() :])  # elements of one stored value
    if stored.numel() == 0:
        return found
    rows = np.zeros(indices.shape[1], np.int64)
    for index, size in zip(indices.numpy(), tensor.shape, strict=False):
        rows = rows * size + index
    wanted, within = np.divmod(chosen, inner)
    places = np.searchsorted(rows, wanted).clip(max=len(rows) - 1)
    hits = rows[places] == wanted
    picked = stored.reshape(len(rows), inner)[
        torch.from_numpy(places[hits]), torch.from_numpy(within[hits])
    ]
    if len(picked):
        found[hits] = samples_of_plain(plain_numbers(picked).contiguous(), len(picked))
    return found
