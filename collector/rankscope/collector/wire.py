"""Looking at messages before they are parsed, because parsing is what makes them large.

An empty message inside another takes two bytes on the wire and a hundred in memory, so 16 MiB could
become a gigabyte. Counting what stands in a message first costs next to nothing for honest ones.
"""

from rankscope.v1 import collector_pb2 as pb

LARGEST_HELLO_BYTES = 1 << 20
MOST_PARTS = 100_000

_BATCH, _CHUNK = 0x12, 0x22  # tags of FromAgent.batch and FromAgent.tensor_chunk


class Malformed(ValueError):
    """The bytes are no message of protobuf."""


def read_message(data: bytes) -> pb.FromAgent:
    """A message off a stream. A large one is one batch or chunk and nothing else; otherwise it is
    read as an empty message, which no stream may begin with."""
    if len(data) > LARGEST_HELLO_BYTES and not _is_one_payload(data):
        return pb.FromAgent()
    return pb.FromAgent.FromString(data)


def count_parts(data: bytes, most: int = MOST_PARTS) -> dict[int, int]:
    """How often each field stands in a message, without looking inside them; stops counting above
    `most` in all. Raises Malformed."""
    counts: dict[int, int] = {}
    at, total = 0, 0
    while at < len(data) and total <= most:
        tag, at = _varint(data, at)
        counts[tag >> 3] = counts.get(tag >> 3, 0) + 1
        total += 1
        at = _behind(data, at, tag & 7)
    return counts


def _is_one_payload(data: bytes) -> bool:
    """Whether one batch or chunk fills the message, and few fields fill that."""
    if data[0] not in (_BATCH, _CHUNK):
        return False
    try:
        size, at = _varint(data, 1)
        return at + size == len(data) and sum(count_parts(data[at:], 100).values()) <= 100
    except Malformed:
        return False


def _behind(data: bytes, at: int, kind: int) -> int:
    """Where the field ends whose value begins at `at`."""
    if kind == 0:
        return _varint(data, at)[1]
    if kind == 2:
        size, at = _varint(data, at)
        end = at + size
    elif kind in (1, 5):
        end = at + (8 if kind == 1 else 4)
    else:
        raise Malformed(f"a field of kind {kind}")
    if end > len(data):
        raise Malformed("a field ends behind the message")
    return end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise Malformed("a number without an end")
