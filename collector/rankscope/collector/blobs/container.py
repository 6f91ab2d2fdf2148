"""The .pt file of one tensor, made without torch: what `torch.save` writes, and `torch.load` reads.

A .pt file is a zip archive whose members are stored, not compressed: the tensor's bytes stand in it
as they are. So what is before them (`head`) and behind them (`tail`) can be put around bytes that
lie in a file already.
"""

import io
import math
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from rankscope.collector.blobs.checksum import crc32

#: Data of a large tensor begins here: the agent leaves so much room, and it is aligned for mmap.
LARGE_OFFSET = 4096
#: torch's own alignment.
SMALL_ALIGNMENT = 64

_STORAGES = {
    "torch.float64": ("DoubleStorage", 8),
    "torch.float32": ("FloatStorage", 4),
    "torch.float16": ("HalfStorage", 2),
    "torch.bfloat16": ("BFloat16Storage", 2),
    "torch.int64": ("LongStorage", 8),
    "torch.int32": ("IntStorage", 4),
    "torch.int16": ("ShortStorage", 2),
    "torch.int8": ("CharStorage", 1),
    "torch.uint8": ("ByteStorage", 1),
    "torch.bool": ("BoolStorage", 1),
    "torch.complex128": ("ComplexDoubleStorage", 16),
    "torch.complex64": ("ComplexFloatStorage", 8),
}
_DTYPES = {storage: dtype for dtype, (storage, _) in _STORAGES.items()}
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_PADDING_ID = 0x4246  # as torch pads
_DATE = 0x21  # 1 January 1980, the first that a zip archive can say
_BIG = 0xFFFFFFFF


class _Member(NamedTuple):
    name: bytes
    size: int
    crc: int
    offset: int


def around(
    dtype: str, shape: Sequence[int], size: int, crc: int, offset: int | None = None
) -> tuple[bytes, bytes]:
    """What stands before and behind the `size` bytes of a contiguous CPU tensor, whose CRC-32 is
    `crc`.

    What stands before is `offset` bytes long, or as long as need be.
    """
    head = bytearray()
    members = []
    for name, content in (
        (b"archive/data.pkl", _pickled(dtype, shape, size)),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    ):
        member = _Member(name, len(content), crc32(content), len(head))
        head += _local(member, 0) + content
        members.append(member)
    data = _Member(b"archive/data/0", size, crc, len(head))
    begin = len(head) + len(_local(data, 4))
    if offset is None:
        offset = -(-begin // SMALL_ALIGNMENT) * SMALL_ALIGNMENT
    if offset < begin:
        raise ValueError(
            f"{dtype} of {len(shape)} dimensions: {begin} bytes do not fit in {offset}"
        )
    head += _local(data, 4 + offset - begin)
    return bytes(head), _tail([*members, data], offset + size)


class _Reader(pickle.Unpickler):
    """Reads our own pickles: names stay names, nothing is called but what is given here."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_rebuild_tensor_v2":
            return lambda storage, offset, shape, *rest: (*storage, shape)
        if name == "_rebuild_tensor_v3":
            return lambda storage, offset, shape, strides, grad, hooks, dtype: (
                dtype,
                storage[1],
                shape,
            )
        return dict if name == "OrderedDict" else _DTYPES.get(name, f"{module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[str, int]:
        _, storage, _, _, elements = pid
        return storage, elements * _STORAGES.get(storage, ("", 1))[1]


def described(head: bytes) -> tuple[str, tuple[int, ...], int]:
    """Dtype, shape and bytes of the tensor whose file begins with `head`, as `around` made it."""
    fields = _LOCAL.unpack_from(head)
    begin = _LOCAL.size + fields[-2] + fields[-1]
    dtype, size, shape = _Reader(io.BytesIO(head[begin : begin + fields[8]])).load()
    return str(dtype), tuple(shape), size


def _local(member: _Member, padding: int) -> bytes:
    """The header before a member, with a padding field of so many bytes (0, or 4 and more)."""
    name, size, crc, _ = member
    extra, shown, version = b"", size, 20
    if size >= _BIG:
        extra, shown, version = struct.pack("<2H2Q", 1, 16, size, size), _BIG, 45
    if padding:
        extra += struct.pack("<2H", _PADDING_ID, padding - 4) + b"Z" * (padding - 4)
    fixed = _LOCAL.pack(
        b"PK\3\4", version, 0, 0, 0, _DATE, crc, shown, shown, len(name), len(extra)
    )
    return fixed + name + extra


def _tail(members: list[_Member], begin: int) -> bytes:
    """The central directory, which begins at `begin`."""
    directory = b"".join(map(_entry, members))
    count, size = len(members), len(directory)
    end64 = b""
    if begin >= _BIG:
        end64 = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin)
        end64 += _LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, size, min(begin, _BIG), 0)
    return directory + end64 + end


def _entry(member: _Member) -> bytes:
    name, size, crc, offset = member
    extra, shown, version = b"", size, 20
    if size >= _BIG:
        extra, shown, version = struct.pack("<2H2Q", 1, 16, size, size), _BIG, 45
    fixed = _CENTRAL.pack(
        *(b"PK\1\2", version, version, 0, 0, 0, _DATE, crc, shown, shown),
        *(len(name), len(extra), 0, 0, 0, 0, offset),
    )
    return fixed + name + extra


def _pickled(dtype: str, shape: Sequence[int], size: int) -> bytes:
    """The pickle of torch's call that rebuilds a tensor from its storage.

    Dtypes younger than typed storages are named by themselves and lie in an untyped storage.
    """
    typed = _STORAGES.get(dtype)
    storage, width = typed or ("UntypedStorage", 1)
    module = "torch" if typed else "torch.storage"
    parts = [
        b"\x80\x02",
        _global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"),
        b"((",
        _text("storage"),
        _global(module, storage),
        _text("0"),
        _text("cpu"),
        _number(size // width),
        b"tQ",
        _number(0),
        _numbers(shape),
        _numbers(contiguous_strides(shape)),
        b"\x89",  # requires_grad
        _global("collections", "OrderedDict"),
        b")R",
        b"" if typed else _global(*dtype.rsplit(".", 1)),
        b"tR.",
    ]
    return b"".join(parts)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Row-major strides, in elements."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<L", len(data)) + data


def _number(number: int) -> bytes:
    return pickle.dumps(number, 2)[2:-1]


def _numbers(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t" if numbers else b")"
