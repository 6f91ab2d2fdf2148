"""Statistics of tensors: what a tensor is (`describe`) and what its values are
(`TensorStatistics`).
"""

from .columns import StatisticsColumns
from .describe import Description, describe
from .kernel import kernel_status
from .tensors import Pending, TensorStatistics

__all__ = [
    "Description",
    "Pending",
    "StatisticsColumns",
    "TensorStatistics",
    "describe",
    "kernel_status",
]
