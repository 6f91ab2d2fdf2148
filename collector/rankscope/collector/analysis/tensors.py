"""Reading whole tensors without torch: .pt files of one tensor, as a layout holds them."""

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_DTYPES = {
    "DoubleStorage": "f8", "FloatStorage": "f4", "HalfStorage": "f2", "LongStorage": "i8",
    "IntStorage": "i4", "ShortStorage": "i2", "CharStorage": "i1", "ByteStorage": "u1",
    "BoolStorage": "?", "ComplexDoubleStorage": "c16", "ComplexFloatStorage": "c8",
    "BFloat16Storage": "bfloat16",
    "float64": "f8", "float32": "f4", "float16": "f2", "int64": "i8", "int32": "i4",
    "int16": "i2", "int8": "i1", "uint8": "u1", "bool": "?", "uint16": "u2", "uint32": "u4",
    "uint64": "u8", "complex128": "c16", "complex64": "c8", "bfloat16": "bfloat16",
}  # fmt: skip


class Unreadable(Exception):
    """A file that holds no tensor of a kind that numpy has."""


class _Storage(NamedTuple):
    kind: str
    key: str


class _Named(NamedTuple):
    module: str
    name: str

    def __call__(self, *arguments: Any) -> Any:
        if self.name.startswith("_rebuild_tensor"):
            storage, offset, shape, stride = arguments[:4]
            return storage, offset, tuple(shape), tuple(stride)
        if self.name == "_rebuild_parameter":
            return arguments[0]
        if self.name == "OrderedDict":
            return {}
        raise Unreadable(f"{self.module}.{self.name}")


class _Unpickler(pickle.Unpickler):
    """Knows tensors and plain containers; executes nothing that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        return _Named(module, name)

    def persistent_load(self, pid: Any) -> Any:
        kind = pid[1].name if isinstance(pid[1], _Named) else str(pid[1])
        return _Storage(kind, pid[2])


def read_pt(source: Path | bytes) -> npt.NDArray[Any]:
    """The tensor of a .pt file; bfloat16 as float32. Unreadable says why not."""
    content = read_object(source)
    if not isinstance(content, np.ndarray):
        raise Unreadable(f"holds {type(content).__name__}, not one tensor")
    return content


def read_object(source: Path | bytes) -> Any:
    """What a .pt or .pth file holds, tensors as arrays: a tensor, or containers of them."""
    stream: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with zipfile.ZipFile(stream) as archive:
            names = {name.split("/", 1)[1]: name for name in archive.namelist() if "/" in name}
            loaded = _Unpickler(io.BytesIO(archive.read(names["data.pkl"]))).load()
            return _arrays(loaded, lambda key: archive.read(names[f"data/{key}"]))
    except (zipfile.BadZipFile, KeyError, pickle.UnpicklingError, ValueError, OSError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def _arrays(loaded: Any, read: Callable[[str], bytes]) -> Any:
    if isinstance(loaded, tuple) and len(loaded) == 4 and isinstance(loaded[0], _Storage):
        return _array(*loaded, read)
    if isinstance(loaded, dict):
        return {key: _arrays(value, read) for key, value in loaded.items()}
    if isinstance(loaded, list | tuple) and not isinstance(loaded, _Named):
        return [_arrays(value, read) for value in loaded]
    return loaded


def _array(
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    read: Callable[[str], bytes],
) -> npt.NDArray[Any]:
    kind = _DTYPES.get(storage.kind)
    if kind is None:
        raise Unreadable(f"dtype {storage.kind}")
    data = read(storage.key)
    if kind == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        flat: npt.NDArray[Any] = wide.view("<f4")
    else:
        flat = np.frombuffer(data, np.dtype(kind).newbyteorder("<"))
    flat = flat[offset:]
    steps = tuple(step * flat.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False)
