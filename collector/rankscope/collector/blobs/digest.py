"""What names a tensor: the digest of its dtype, its shape and its bytes."""

from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

from rankscope.v1 import collector_pb2 as pb

DIGEST_BYTES = 32


class Tensor(NamedTuple):
    """A whole tensor without its bytes. `size` counts these."""

    digest: bytes
    dtype: str
    shape: tuple[int, ...]
    size: int

    @staticmethod
    def of(blob: pb.Blob) -> "Tensor":
        """As a batch tells of it."""
        return Tensor(blob.digest, blob.dtype, tuple(blob.shape), blob.size)

    @staticmethod
    def parse(digest: bytes, description: str, size: int) -> "Tensor":
        """The inverse of `description`."""
        dtype, _, sizes = description.partition(" ")
        shape = tuple(int(number) for number in sizes.split(",") if number)
        return Tensor(digest, dtype, shape, size)

    @property
    def description(self) -> str:
        return f"{self.dtype} {','.join(map(str, self.shape))}"


def hasher(dtype: str, shape: Sequence[int]) -> "blake3":
    """To be updated with the tensor's bytes."""
    return blake3(f"{dtype} {','.join(map(str, shape))}\n".encode())
