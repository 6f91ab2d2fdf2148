"""Whether code waits for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def no_waiting() -> Iterator[list[str]]:
    """Notes every operator that brings a value to the host."""
    waits: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name, kwargs = str(func), kwargs or {}
            moves = "_to_copy" in name and kwargs.get("device") is not None
            if moves or "_local_scalar_dense" in name or "nonzero.default" in name:
                waits.append(name)
            return func(*args, **kwargs)

    with Watch():
        yield waits
