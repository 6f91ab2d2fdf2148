"""Names of files with tensors."""

import hashlib
import re

import pyarrow as pa
import pyarrow.compute as pc

#: What an agent calls files with tensors beside its spool.
FILE_NAME = re.compile(r"([0-9a-f]{32})-\d{20}\.tensors?")
#: Longest name that common file systems take.
MOST_BYTES = 255


def safe_names(names: pa.Array) -> pa.Array:
    """File names of dump_tensor_data as a file system takes them.

    What is too long or holds a slash or a control character gets other characters there, and a part
    of the name's hash at its end, so that it stays the only one.
    """
    odd = pc.or_(
        pc.greater(pc.binary_length(names), MOST_BYTES),
        pc.match_substring_regex(names, r"[/\x00-\x1f]"),
    )
    if not pc.any(odd).as_py():
        return names
    pairs = zip(names.to_pylist(), odd.to_pylist(), strict=True)
    return pa.array([_safe(name) if is_odd else name for name, is_odd in pairs], pa.string())


def _safe(name: str) -> str:
    mark = hashlib.sha256(name.encode()).hexdigest()[:12]
    ending = f"~{mark}.pt"
    plain = re.sub(r"[/\x00-\x1f]", "_", name.removesuffix(".pt"))
    return plain.encode()[: MOST_BYTES - len(ending)].decode(errors="ignore") + ending
