"""Many tensors in one file of the safetensors format: a JSON header, then all bytes."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from rankscope.collector.blobs.store import BlobReader

#: What the format calls each dtype; others cannot be written in it.
DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.complex64": "C64",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint64": "U64",
    "torch.uint32": "U32",
    "torch.uint16": "U16",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
_ALIGNMENT = 8
_LENGTH = struct.Struct("<Q")


def write(path: Path, blobs: BlobReader, wanted: Mapping[str, bytes]) -> list[str]:
    """Write the tensors of these names and digests; returns the names of those left out, which are
    not stored or whose dtype the format lacks.
    """
    header: dict[str, object] = {}
    written: list[bytes] = []
    left_out: list[str] = []
    end = 0  # equal tensors are written once each: readers refuse shared bytes
    for name, digest in wanted.items():
        try:
            tensor = blobs.tensor(digest)
        except KeyError:
            left_out.append(name)
            continue
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            left_out.append(name)
            continue
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.size],
        }
        written.append(digest)
        end += tensor.size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    with open(path, "xb") as file:
        file.write(_LENGTH.pack(len(head)) + head)
        for digest in written:
            for piece in blobs.pieces(digest):
                file.write(piece)
    return left_out
