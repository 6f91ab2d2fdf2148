"""Statistics of tensors: what a tensor is (`describe`) and what its values are
(`TensorStatistics`).
"""

from .columns import StatisticsColumns
from .describe import Description, describe
from .details import DetailedPending, DetailedStatistics, Wanted
from .kernel import kernel_status
from .tensors import Pending, TensorStatistics

__all__ = [
    "Description",
    "DetailedPending",
    "DetailedStatistics",
    "Pending",
    "StatisticsColumns",
    "TensorStatistics",
    "Wanted",
    "describe",
    "kernel_status",
]
